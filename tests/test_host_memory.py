"""Host memory: no second copy of the model, nothing kept after detach, nothing copied by forked workers."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import viking
from support.models import Net, build
from support.processes import measure
from support.training import assert_same, inputs, train
from viking import _engine
from viking.nn import managing, pinning, storage
from viking.nn.device import DeviceEngine

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 1 << 20
CSRC = Path(__file__).parents[1] / "csrc"


def attach(model: nn.Module, **how: Any) -> nn.Module:
    return viking.attach(model, "cpu", **{"weights_budget": 0, "progress": False, **how})


# ---- how much there is ----


@linux
def test_attach_needs_no_second_copy_of_the_model() -> None:
    found = measure("""
        side, count = 4096, 18
        empty = status("VmRSS")
        model = make(count, side)
        nbytes = count * side * side * 4
        built = status("VmHWM")
        viking.attach(model, "cpu", weights_budget=0, progress=False)
        print(json.dumps({"model": nbytes, "built": built - empty, "peak": status("VmHWM") - empty,
                          "slab": viking.stats(model).slab_bytes}))
    """)

    assert found["model"] > 1200 * 1000**2
    assert found["built"] < 1.05 * found["model"]  # else this test would prove nothing
    assert found["peak"] - found["slab"] < 1.1 * found["model"] + 64 * MIB


@linux
def test_detach_gives_back_what_attach_and_training_took() -> None:
    found = measure("""
        model = make(18, 2048)
        adapter = nn.Linear(2048, 2048, bias=False)
        x = torch.randn(4, 2048)
        def step():
            (model(adapter(x)).square().mean()).backward()
            adapter.weight.grad = None
        step()
        before, maps = status("VmRSS"), len(open("/proc/self/maps").readlines())
        rounds = []
        for budget in (0, "100MB", "1GB"):
            viking.attach(model, "cpu", weights_budget=budget, progress=False)
            for _ in range(2):
                step()
            viking.detach(model)
            gc.collect()
            rounds.append(status("VmRSS"))
        print(json.dumps({"before": before, "rounds": rounds}))
    """)

    assert found["before"] > 300 * 1000**2
    for after in found["rounds"]:
        assert abs(after - found["before"]) < 0.05 * found["before"] + 8 * MIB


@linux
def test_a_model_that_is_dropped_after_detach_gives_all_its_memory_back() -> None:
    found = measure("""
        x = torch.randn(4, 2048)
        make(1, 2048)(x)
        before = status("VmRSS")
        model = viking.attach(make(18, 2048), "cpu", weights_budget=0, progress=False)
        with torch.no_grad():
            model(x)
        state = model.state_dict()
        viking.detach(model)
        held = status("VmRSS")
        del model
        gc.collect()
        kept = status("VmRSS")
        del state
        gc.collect()
        print(json.dumps({"before": before, "held": held, "kept": kept, "after": status("VmRSS")}))
    """)

    model = 18 * 2048 * 2048 * 4
    assert found["kept"] - found["before"] > 0.95 * model  # the state_dict views it
    assert found["after"] - found["before"] < 0.05 * model + 8 * MIB


# ---- children ----


def maps_address(address: int) -> bool:
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


class Probe(Dataset):
    """Each item is what `look` finds in the worker."""

    def __init__(self, look: Any) -> None:
        self.look = look

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.look()


def in_workers(look: Any) -> list[Any]:
    loader = DataLoader(Probe(look), num_workers=2, batch_size=None, multiprocessing_context="fork")
    return list(loader)


@linux
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_workers_forked_after_attach_do_not_have_the_weights() -> None:
    model, trained = build()
    attach(model)
    train(model, trained, 2)
    homes = [m.weight.data_ptr() for m in model.modules() if "_layer_memory_manager" in m.__dict__]
    assert all(maps_address(address) for address in homes)

    seen = in_workers(lambda: sum(maps_address(address) for address in homes))

    assert seen == [0, 0, 0, 0]
    fresh, its_trained = build()
    train(fresh, its_trained, 2)
    assert_same(train(model, trained, 2), train(fresh, its_trained, 2))
    assert in_workers(lambda: 7) == [7] * 4


@linux
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_that_uses_the_model_is_told_in_one_sentence() -> None:
    model, _ = build()
    attach(model)
    expected = model(inputs(0))

    def use(call: Any) -> Any:
        def look() -> str:
            try:
                call()
            except RuntimeError as error:
                return str(error)
            return "no error"

        return look

    calls = [lambda: model(inputs(0)), lambda: model.enter(inputs(0)), lambda: viking.stats(model),
             lambda: viking.refresh(model)]
    for call in calls:
        for sentence in in_workers(use(call)):
            assert sentence.startswith("this process was forked from one that streams weights: ")
            assert "do the model's work in the parent, or start workers with spawn" in sentence
    assert torch.equal(model(inputs(0)), expected)


@linux
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_after_detach_children_have_the_weights_again() -> None:
    model = Net()
    expected = model(inputs(0))
    attach(model)
    viking.detach(model)

    for y in in_workers(lambda: model(inputs(0))):
        assert torch.equal(y, expected)


# ---- pinned ----


@pytest.fixture
def pinning_engine() -> Iterator[list[int]]:
    """The host backend books pins as a device would. The list's number, if any, is the most that it pins."""
    limit: list[int] = []
    DeviceEngine.make_engine = lambda device: _engine.Engine("host", pin_limit_bytes=limit[0] if limit else 0)
    yield limit
    DeviceEngine.make_engine = None


def wide() -> tuple[nn.Module, list[nn.Parameter]]:
    return build(depth=2, hidden=256)


def step_wide(model: nn.Module, trained: list[nn.Parameter]) -> Any:
    return train(model, trained, 3, step_with=lambda m, x: one(m, x))


def one(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x.repeat(1, 1, 4)).square().mean()
    loss.backward()
    return loss.detach()


def managers(model: nn.Module) -> list[viking.LinearLayerMemoryManager]:
    return [m._layer_memory_manager for m in model.modules() if "_layer_memory_manager" in m.__dict__]


@pytest.mark.parametrize("budget", [0, "3MB", "40MB"])
def test_what_is_streamed_is_pinned_and_what_is_resident_is_not(pinning_engine: Any, budget: Any) -> None:
    model, trained = wide()
    attach(model, weights_budget=budget)
    step_wide(model, trained)

    stats = viking.stats(model)

    assert all(m.home.pinned == (m.path != "resident") for m in managers(model))
    assert stats.streamed_bytes <= stats.pinned_bytes <= 1.02 * stats.streamed_bytes
    assert stats.staged_bytes == 0


def test_pins_follow_when_another_model_changes_what_is_resident(pinning_engine: Any) -> None:
    first, second = wide()[0], wide()[0]
    attach(first, weights_budget="4MB")
    before = [m.path for m in managers(first)]

    attach(second, weights_budget="4MB")

    together = [*managers(first), *managers(second)]
    assert before != [m.path for m in managers(first)]
    assert all(m.home.pinned == (m.path != "resident") for m in together)
    viking.detach(second)
    assert all(m.home.pinned == (m.path != "resident") for m in managers(first))


@pytest.mark.parametrize(("pin", "limit"), [(False, 0), ("2MB", 2_000_000), (1_500_000, 1_500_000), (0, 0)])
def test_pin_limits_what_is_pinned_and_changes_no_number(pinning_engine: Any, pin: Any, limit: int) -> None:
    model, trained = wide()
    attach(model, pin=pin)

    mine = step_wide(model, trained)

    stats = viking.stats(model)
    assert stats.pinned_bytes <= limit * 1.02
    assert (stats.pinned_bytes > 0) == (limit > 0)
    window = DeviceEngine.of(torch.device("cpu")).engine.stats()["window_bytes"]
    assert stats.staged_bytes == pytest.approx(stats.streamed_bytes - (stats.pinned_bytes - window), rel=0.02)
    viking.detach(model)
    assert_same(mine, step_wide(*wide()))


def test_what_the_system_does_not_pin_is_streamed_from_pageable_memory_with_one_warning(pinning_engine: Any) -> None:
    pinning_engine.append(2 * MIB)
    model, trained = wide()

    message = r"pinned host memory \(not the device's\) is limited .* a small pinned window: the same numbers, slower"
    with pytest.warns(UserWarning, match=message) as caught:
        attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = step_wide(model, trained)

    assert len(caught) == 1
    stats = viking.stats(model)
    assert 0 < stats.pinned_bytes <= 2 * MIB
    assert stats.staged_bytes > 0
    assert_same(mine, step_wide(*wide()))


def test_after_a_refusal_smaller_weights_are_tried_and_then_the_system_is_left_alone(
    pinning_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinning_engine.append(96 << 10)
    sides = [256, 64, 256, 256, 64, 64]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, side), nn.Linear(side, 64)) for side in sides))
    model.requires_grad_(False)
    asked = []
    pin = _engine.Engine.pin
    monkeypatch.setattr(pinning, "REFUSALS", 2)

    class Spy:
        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        def pin(self, number: int) -> None:
            asked.append(number)
            pin(self.engine, number)

    apply = pinning.Pinning.apply
    monkeypatch.setattr(pinning.Pinning, "apply", lambda self, engine, *rest: apply(self, Spy(engine), *rest))
    with pytest.warns(UserWarning, match="pinned host memory .* is limited to"):
        attach(model)

    sizes = {m.weight: m.nbytes for m in managers(model)}
    assert len(sizes) == 12
    assert [sizes[number] for number in asked[:2]] == [max(sizes.values())] * 2  # the first fits, the second does not
    assert all(sizes[number] < sizes[asked[1]] for number in asked[2:])
    assert len(asked) < len(sizes)  # two were refused


def test_a_part_of_the_machine_stays_unpinned(pinning_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "memory_limit", lambda: 2_000_000)
    model, trained = wide()

    with pytest.warns(UserWarning, match=r"a 10th of the 2.00 MB that this process may use stays unpinned"):
        attach(model)
    mine = step_wide(model, trained)

    assert 0 < viking.stats(model).pinned_bytes <= 1_800_000 * 1.02
    assert_same(mine, step_wide(*wide()))


def test_an_interrupt_at_any_report_of_progress_leaves_nothing_pinned_and_the_model_as_it_was(
    pinning_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes: list[_engine.Home] = []
    make = storage.Home

    def home(nbytes: int) -> _engine.Home:
        homes.append(make(nbytes))
        return homes[-1]

    monkeypatch.setattr(storage, "Home", home)
    reports: list[str] = []
    model, _ = wide()
    viking.attach(model, "cpu", weights_budget=0, progress=lambda done, total, what: reports.append(what))
    viking.detach(model)
    assert {"moving weights to their homes", "pinning host memory"} == set(reports)
    expected = model(inputs(0).repeat(1, 1, 4))
    before = {name: id(p) for name, p in model.named_parameters()}

    for stop_at in range(len(reports)):
        left = [stop_at]

        def interrupt(done: int, total: int, what: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            viking.attach(model, "cpu", weights_budget=0, progress=interrupt)

        assert not any(home.pinned for home in homes)
        assert not any({"forward", "_memory_manager"} & vars(module).keys() for module in model.modules())
        assert {name: id(p) for name, p in model.named_parameters()} == before
        assert torch.equal(model(inputs(0).repeat(1, 1, 4)), expected)


def test_detach_unpins_everything(pinning_engine: Any) -> None:
    model, _ = wide()
    attach(model)
    homes = [m.home for m in managers(model)]
    assert all(home.pinned for home in homes)

    viking.detach(model)

    assert not any(home.pinned for home in homes)


@pytest.fixture(scope="module")
def fake_runtime() -> str:
    """A CUDA runtime made of the host backend."""
    library = CSRC / "build" / "none" / "libfake_cudart.so"
    if shutil.which("make") is None or shutil.which("cc") is None or not CSRC.is_dir():
        pytest.skip("needs make, a C compiler and the sources")
    subprocess.run(["make", "-s", "-C", str(CSRC), "build/none/libfake_cudart.so"], check=True, capture_output=True)
    return str(library)


def test_the_cuda_backend_locks_what_is_streamed_and_nothing_else(fake_runtime: str) -> None:
    engine = _engine.Engine("cuda", 0, None, runtime=fake_runtime)
    homes = [_engine.Home(MIB) for _ in range(12)]
    weights = [engine.add(home, MIB) for home in homes]
    slab = torch.empty(engine.layout(6 * MIB) + 256, dtype=torch.uint8)
    engine.use_layout(slab.data_ptr() + -slab.data_ptr() % 256)

    for weight in weights:
        engine.pin(weight)

    stats = engine.stats()
    assert stats["streamed_bytes"] + stats["resident_bytes"] == 12 * MIB
    assert stats["pinned_bytes"] == stats["streamed_bytes"] < 12 * MIB
    assert sum(home.pinned for home in homes) * MIB == stats["pinned_bytes"]
    for weight in weights:
        engine.unpin(weight)
    assert engine.stats()["pinned_bytes"] == 0
    engine.pin(next(w for w, home in zip(weights, homes, strict=True)))
    engine.close()
    assert not any(home.pinned for home in homes)


def test_a_limit_pins_what_is_fetched_most_and_the_same_each_time(pinning_engine: Any) -> None:
    chosen = []
    for _ in range(2):
        model, _ = wide()
        attach(model, pin="2MB")
        engine = DeviceEngine.of(torch.device("cpu")).engine
        fetches = engine.planned_fetches()
        worth = {m.weight: (fetches[m.weight], m.nbytes) for m in managers(model) if m.path != "resident"}
        pinned = {m.weight for m in managers(model) if m.home.pinned}
        for left in worth.keys() - pinned:  # it did not fit beside what is worth more
            before = sum(worth[w][1] for w in pinned if worth[w] >= worth[left])
            assert before + worth[left][1] > 2_000_000 - engine.stats()["window_bytes"] - 4096 * len(pinned)
        chosen.append(pinned)
        viking.detach(model)

    assert chosen[0] == chosen[1]
    assert 0 < len(chosen[0]) < len(worth)


def test_attach_without_room_for_a_weight_says_so_before_it_touches_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managing, "memory_available", lambda: 1000)
    model, trained = wide()
    before = [(p.data_ptr(), p._version) for p in model.parameters()]

    with pytest.raises(MemoryError, match=r"the weights need .* of host memory .* are free: close other programs"):
        attach(model)

    assert [(p.data_ptr(), p._version) for p in model.parameters()] == before
    assert not managers(model)
    assert_same(step_wide(model, trained), step_wide(*wide()))
