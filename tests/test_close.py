"""An engine is closed while other threads are in calls of it: it waits for them, and who waits inside is woken."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest

from support.threads import together
from viking._engine import Engine, Home

KB = 1 << 10


def make(count: int = 4, **options: int) -> tuple[Engine, list[int], bytearray]:
    """An engine with `count` weights and room for two of them; its slab, which the caller keeps."""
    engine = Engine("host", **options)
    weights = [engine.add(Home(4 * KB), 4 * KB) for _ in range(count)]
    nbytes = engine.layout(engine.budget_range()[0])
    return engine, weights, use(engine, nbytes)


def use(engine: Engine, nbytes: int) -> bytearray:
    slab = bytearray(nbytes + 256)
    address = ctypes.addressof(ctypes.c_char.from_buffer(slab))
    engine.use_layout(address + -address % 256)
    return slab


def call_until_closed(call: Callable[[], object]) -> None:
    while True:
        call()


def close_once_waiting(engine: Engine, threads: int) -> None:
    while engine.stats()["waiting"] < threads:
        pass
    engine.close()


CALLS: dict[str, Callable[[Engine], object]] = {
    "stats": lambda engine: engine.stats(),
    "budget_range": lambda engine: engine.budget_range(),
    "layout": lambda engine: engine.layout(1 << 20),
    "drain_copies": lambda engine: engine.drain_copies(),
    "use": lambda engine: engine.release(engine.acquire(0)[0]),
    "pass_begin": lambda engine: engine.pass_begin(1, False),
    "memory": lambda engine: engine.memory(),
    "pin": lambda engine: engine.pin(0),
}


@pytest.mark.parametrize("name", CALLS)
def test_closing_waits_for_the_calls_of_other_threads(name: str) -> None:
    call = CALLS[name]

    def round_of(seed: int) -> None:
        engine, _, slab = make(delay_ns=2000, seed=seed)
        running = threading.Barrier(3)

        def calling() -> None:
            running.wait()
            with pytest.raises(RuntimeError, match="this engine is closed: its models were detached"):
                call_until_closed(lambda: call(engine))

        def closing() -> None:
            running.wait()
            for _ in range(seed % 7 * 30):
                engine.memory()
            engine.close()

        together(calling, calling, closing)
        del slab

    for seed in range(40):
        round_of(seed)


def test_who_waits_for_room_is_woken_and_told() -> None:
    engine, weights, slab = make()
    held = [engine.acquire(w)[0] for w in weights[:2]]

    def wait_for_room() -> None:
        with pytest.raises(RuntimeError, match="this engine is closed"):
            call_until_closed(lambda: engine.release(engine.acquire(weights[2])[0]))

    together(wait_for_room, lambda: close_once_waiting(engine, 1))
    assert held
    del slab


def test_who_waits_for_a_slab_is_woken_and_told() -> None:
    engine, weights, slab = make()
    engine.layout(1 << 20)
    engine.drop_slab()  # the next one is about to come

    def wait_for_slab() -> None:
        with pytest.raises(RuntimeError, match="this engine is closed"):
            engine.acquire(weights[0])

    together(wait_for_slab, wait_for_slab, lambda: close_once_waiting(engine, 2))
    del slab


def test_who_waits_for_the_end_of_a_use_is_woken_and_told() -> None:
    engine, weights, slab = make()
    engine.acquire(weights[0])  # by this thread

    def wait_for_use() -> None:
        with pytest.raises(RuntimeError, match="this engine is closed"):
            engine.drop_slab()

    together(wait_for_use, lambda: close_once_waiting(engine, 1))
    del slab


def test_closing_twice_and_calls_afterwards() -> None:
    engine, weights, slab = make()
    engine.close()
    engine.close()

    for call in CALLS.values():
        with pytest.raises(RuntimeError, match="this engine is closed: its models were detached"):
            call(engine)
    with pytest.raises(RuntimeError, match="this engine is closed"):
        engine.add(Home(KB), KB)
    assert weights
    del slab
