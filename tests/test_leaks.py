"""Nothing grows: not over steps, not over attach and detach."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import viking
from support.models import build
from support.training import inputs, one_step, train
from viking import _engine
from viking.nn.device import DeviceEngine

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 1 << 20


def attach(model: nn.Module, budget: Any = 0) -> nn.Module:
    return viking.attach(model, "cpu", weights_budget=budget, progress=False)


def rss() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def threads() -> int:
    return psutil.Process().num_threads()


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(o) is kind for o in gc.get_objects())


def growth_over(work: Callable[[], None]) -> list[int]:
    """Of this process's memory, each of three times that the work is done: a leak shows in all of them, the
    allocator's mood in one or two."""
    growth = []
    for _ in range(3):
        before = rss()
        work()
        growth.append(rss() - before)
    return growth


def test_steps_of_changing_sizes_take_no_more_memory_after_the_first_hundred() -> None:
    model, trained = build(checkpointing="early stop", depth=2)
    attach(model)
    sizes = [(1 + i % 3, 3 + i % 11, 64) for i in range(33)]

    def steps(count: int) -> None:
        for i in range(count):
            one_step(model, inputs(i, shape=sizes[i % len(sizes)]))
            with torch.no_grad():
                model(inputs(i, shape=sizes[-i % len(sizes)]))
            for p in trained:
                p.grad = None

    steps(100)
    running, objects = threads(), len(gc.get_objects())
    growth = growth_over(lambda: steps(70))

    assert min(growth) < MIB // 2
    assert threads() == running
    assert len(gc.get_objects()) - objects < 200


def test_changing_orders_do_not_pile_up_paths() -> None:
    model, _ = build(depth=6)
    attach(model)
    order = list(range(6))

    def steps(count: int) -> None:
        for i in range(count):
            model.order = order[i % 6 :] + order[: i * 7 % 6]
            one_step(model, inputs(i))
            model.zero_grad()

    steps(150)

    assert min(growth_over(lambda: steps(100))) < MIB // 2


@linux
def test_fifty_rounds_of_attach_and_detach_leave_nothing_alive() -> None:
    model, trained = build(depth=2)

    def rounds(count: int) -> None:
        for i in range(count):
            attach(model, (0, 200_000, "1MB")[i % 3])
            train(model, trained, 2)
            viking.stats(model)
            viking.detach(model)

    def mappings() -> int:
        with open("/proc/self/maps") as file:
            return len(file.readlines())

    kinds = (viking.LinearLayerMemoryManager, viking.MemoryManager, _engine.Engine)
    others = [alive(kind) for kind in kinds]  # of tests before, kept by what they raised
    rounds(5)
    running, maps, in_python = threads(), mappings(), threading.active_count()
    growth = growth_over(lambda: rounds(18))

    assert [alive(kind) for kind in kinds] == others
    assert threads() == running == psutil.Process().num_threads()
    assert min(growth) < MIB // 2
    assert mappings() - maps < 12  # one home each would be 500
    assert threading.active_count() == in_python


def test_reference_counts_are_as_before() -> None:
    model, trained = build(depth=1)
    linear = model.enter
    watched = [
        linear,
        linear.weight,
        linear.bias,
        linear._parameters,
        model,
        None,
        nn.Linear.forward,
        viking.LinearLayerMemoryManager,
    ]
    before = [sys.getrefcount(o) for o in watched]

    for _ in range(3):
        attach(model)
        train(model, trained, 4)
        for _ in range(20):
            _, _, ticket = linear._layer_memory_manager.acquire()
            linear._layer_memory_manager.release(ticket)
            linear._layer_memory_manager.forward(input=inputs(0))
        viking.detach(model)
    gc.collect()

    after = [sys.getrefcount(o) for o in watched]
    for o, a, b in zip(watched, after, before, strict=True):
        assert abs(a - b) < (500 if o is None else 3), o


def test_failed_calls_leak_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    attach(model)
    manager = model[0]._layer_memory_manager

    def fail() -> None:
        for arguments in ((), (1, 2), (torch.zeros(2, 3),)):
            with pytest.raises((TypeError, RuntimeError)):
                manager.forward(*arguments)
        with pytest.raises(RuntimeError):
            manager.release(12345)
        with pytest.raises(TypeError):
            manager.bind(0, object(), 3)

    for _ in range(20):
        fail()
    before = [sys.getrefcount(o) for o in (model[0].weight, manager, model[0])]
    for _ in range(100):
        fail()

    assert [sys.getrefcount(o) for o in (model[0].weight, manager, model[0])] == before


def test_a_model_that_is_dropped_without_detach_goes_and_its_engine_with_it() -> None:
    model = attach(build()[0])
    model(inputs(0)).sum().backward()
    gone = weakref.ref(model)

    del model
    gc.collect()

    assert gone() is None
    assert not DeviceEngine._open


def test_a_model_dropped_beside_another_leaves_its_room_to_it() -> None:
    kept, expected = attach(build()[0]), build()[0]
    dropped = attach(build()[0])
    for model in (kept, dropped):
        model(inputs(0))
    managed = viking.stats(kept).streamed_bytes

    del dropped, model
    gc.collect()

    for seed in range(3):
        assert torch.equal(kept(inputs(seed)), expected(inputs(seed)))
    assert viking.stats(kept).streamed_bytes == managed // 2
