"""Exceptions at any point: the next step equals a fresh model's, bit for bit, and no use is left open."""

from __future__ import annotations

import contextlib
import gc
import itertools
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import viking
from support.models import build
from support.state import Snapshot
from support.training import inputs, one_step
from viking.nn import pressure
from viking.nn.device import DeviceEngine, is_held

CPU = torch.device("cpu")
SOURCES = str(Path(viking.__file__).parent / "nn")


class Failure(Exception):
    pass


KINDS: tuple[Callable[[], BaseException], ...] = (
    Failure,
    KeyboardInterrupt,
    lambda: torch.cuda.OutOfMemoryError("CUDA out of memory"),
)
RAISED = (Failure, KeyboardInterrupt, torch.cuda.OutOfMemoryError)


class AtOperation(TorchDispatchMode):
    """Raises at the n-th operation that torch carries out, forward, backward or in between."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.count = n, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.n:
            raise KINDS[self.n % len(KINDS)]()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def at_line(n: int) -> Iterator[list[int]]:
    """Raises KeyboardInterrupt at the n-th line of viking.nn that this thread runs; yields how many it has run."""
    count = [0]
    entered: set[tuple[int, int]] = set()

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if event == "line" and not leaves_a_with(frame):
            count[0] += 1
            if count[0] == n:
                raise KeyboardInterrupt
        return trace

    def leaves_a_with(frame: types.FrameType) -> bool:
        """Nothing comes between the end of a block and a lock's release: Python looks for signals elsewhere."""
        key = (id(frame), frame.f_lineno)
        if not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            return False
        again = key in entered
        entered.symmetric_difference_update({key})
        return again

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def each_point(work_raising_at: Callable[[int], int], check: Callable[[int], None], step: int = 1) -> int:
    """Do the work once for each point at which it may raise, and `check` after each time; how many points there are."""
    for n in itertools.count(1, step):
        try:
            points = work_raising_at(n)
        except RAISED:
            check(n)
        else:
            assert points < n, f"what was raised at {n} was lost"
            return points
    raise AssertionError


class Twins:
    """An attached model, and what each of its steps must give."""

    def __init__(self, checkpointing: str, budget: Any = 150_000) -> None:
        self.model, self.trained = build(checkpointing=checkpointing, depth=1)
        fresh, its_trained = build(checkpointing=checkpointing, depth=1)
        self.expected = self.step_of(fresh, its_trained)
        viking.attach(self.model, "cpu", weights_budget=budget, progress=False)

    @staticmethod
    def step_of(model: nn.Module, trained: list[nn.Parameter]) -> list[torch.Tensor]:
        for p in trained:
            p.grad = None
        x = inputs(0).requires_grad_()
        loss = one_step(model, x)
        return [loss, *(p.grad for p in [x, *trained])]

    def step(self) -> list[torch.Tensor]:
        return self.step_of(self.model, self.trained)

    def check(self, where: object) -> None:
        engine = DeviceEngine.of(CPU).engine
        assert engine.stats()["uses"] == 0, where
        for mine, theirs in zip(self.step(), self.expected, strict=True):
            assert torch.equal(mine, theirs), where
        assert engine.stats()["uses"] == 0, where


MODES = ["off", "reentrant", "early stop"]


@pytest.mark.parametrize("checkpointing", MODES)
def test_an_exception_at_any_operation_of_a_step(checkpointing: str) -> None:
    twins = Twins(checkpointing)
    state = torch.get_rng_state()

    def step_raising_at(n: int) -> int:
        with AtOperation(n) as mode:
            twins.step()
        return mode.count

    assert each_point(step_raising_at, twins.check, step=2) > 60
    assert torch.equal(torch.get_rng_state(), state)
    viking.detach(twins.model)  # refuses while a use is open


@pytest.mark.parametrize("checkpointing", MODES)
def test_an_interrupt_at_any_line_of_a_step(checkpointing: str) -> None:
    twins = Twins(checkpointing)

    def step_raising_at(n: int) -> int:
        with at_line(n) as count:
            twins.step()
        return count[0]

    assert each_point(step_raising_at, twins.check) > 40
    viking.detach(twins.model)


@pytest.mark.filterwarnings("ignore:an allocation of")
def test_an_interrupt_at_any_line_of_a_step_that_lays_out_anew() -> None:
    twins = Twins("early stop", 160_000)

    def step_raising_at(n: int) -> int:
        device = DeviceEngine.of(CPU)
        device.share.ceiling = None
        device.relayout()
        pressure.out_of_memory(CPU, 40_000)
        with at_line(n) as count:
            twins.step()
        assert viking.stats(twins.model).weights_budget_bytes == 120_000
        return count[0]

    assert each_point(step_raising_at, twins.check, step=3) > 100
    assert not is_held(DeviceEngine.lock)
    viking.detach(twins.model)


def test_an_interrupt_at_any_line_of_attach_leaves_the_model_as_it_was() -> None:
    model, trained = build(depth=1)
    expected = Twins.step_of(*build(depth=1))
    before = Snapshot(model)

    def attach_raising_at(n: int) -> int:
        with at_line(n) as count:
            viking.attach(model, "cpu", weights_budget=150_000, progress=False)
        return count[0]

    def check(n: int) -> None:
        before.assert_unchanged()
        assert not is_held(DeviceEngine.lock), n

    points = each_point(attach_raising_at, check, step=29)
    assert points > 500
    viking.detach(model)
    for n in range(points - 20, points + 1):  # each of the last ones: all is done by then, and is to be undone
        try:
            attach_raising_at(n)
        except KeyboardInterrupt:
            check(n)
        else:
            viking.detach(model)
    viking.attach(model, "cpu", weights_budget=150_000, progress=False)
    for mine, theirs in zip(Twins.step_of(model, trained), expected, strict=True):
        assert torch.equal(mine, theirs)
    viking.detach(model)


def tie(m: nn.Module) -> None:
    m[2].weight = m[0].weight


def replace(m: nn.Module) -> None:
    m[1].weight = nn.Parameter(torch.eye(64), requires_grad=False)


def make_unstreamable(m: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(m[1])


def take_out(m: nn.Module) -> None:
    m[1] = nn.Identity()


def assign_all(m: nn.Module) -> None:
    m.load_state_dict({name: t * 2 for name, t in m.state_dict().items()}, assign=True)


@pytest.mark.parametrize("edit", [tie, replace, make_unstreamable, take_out, assign_all])
def test_an_edit_that_is_interrupted_at_any_line_is_seen_by_the_next_use(edit: Callable[[nn.Module], None]) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).requires_grad_(False)

    plain, model, taken = net(), net(), nn.Module()
    edit(plain)

    def use_raising_at(n: int) -> int:
        nonlocal model, taken
        viking.detach(model)
        model = viking.attach(net(), "cpu", weights_budget=0, progress=False)
        model(inputs(0))
        taken = model[1]
        edit(model)
        with at_line(n) as count:
            model(inputs(1))
        return count[0]

    def check(n: int) -> None:
        assert not is_held(DeviceEngine.lock), n
        for x in (inputs(1), inputs(2)):
            assert torch.equal(model(x), plain(x)), n
        if edit is take_out:
            assert torch.equal(taken(inputs(1)), net()[1](inputs(1)))
        viking.detach(model)
        assert not any("viking" in type(v).__module__ for m in (*model.modules(), taken) for v in vars(m).values()), n
        assert not DeviceEngine._open, n

    assert each_point(use_raising_at, check, step=11) > 60
    viking.detach(model)


PLACES: dict[str, Callable[[nn.Module, Callable[..., Any]], Any]] = {
    "a hook of the root before ours": lambda m, fail: m.register_forward_pre_hook(fail, prepend=True),
    "a hook of the root after ours": lambda m, fail: m.register_forward_pre_hook(fail),
    "a forward hook of the root": lambda m, fail: m.register_forward_hook(fail),
    "a hook before a streamed Linear": lambda m, fail: m.blocks[0].up.base_layer.register_forward_pre_hook(fail),
    "a hook after a streamed Linear": lambda m, fail: m.blocks[0].up.base_layer.register_forward_hook(fail),
    "a hook before a streamed Linear's backward":
        lambda m, fail: m.blocks[0].up.base_layer.register_full_backward_pre_hook(fail),
    "a hook after a streamed Linear's backward":
        lambda m, fail: m.blocks[0].up.base_layer.register_full_backward_hook(fail),
    "a hook of the root's backward": lambda m, fail: m.register_full_backward_hook(fail),
    "a hook of a gradient": lambda m, fail: m.blocks[0].up.down.weight.register_hook(fail),
    "a hook after a gradient was accumulated":
        lambda m, fail: m.blocks[0].down.rise.weight.register_post_accumulate_grad_hook(fail),
}


@pytest.mark.parametrize("checkpointing", MODES)
@pytest.mark.parametrize("when", ["before attach", "after attach"])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_in_a_hook(place: str, when: str, checkpointing: str) -> None:
    model, trained = build(checkpointing=checkpointing, depth=1)
    fresh = build(checkpointing=checkpointing, depth=1)
    calls: list[int] = []
    due = False

    def fail(*args: Any) -> None:
        calls.append(1)
        if due:
            raise KINDS[len(calls) % len(KINDS)]()

    def attach() -> None:
        viking.attach(model, "cpu", weights_budget=150_000, progress=False)

    if when == "after attach":
        attach()
    handles = [PLACES[place](m, fail) for m in (model, fresh[0])]
    if when == "before attach":
        attach()
    expected = Twins.step_of(*fresh)

    for _ in range(3):
        due = True
        with pytest.raises(RAISED):
            Twins.step_of(model, trained)
        due = False
        assert DeviceEngine.of(CPU).engine.stats()["uses"] == 0
        for mine, theirs in zip(Twins.step_of(model, trained), expected, strict=True):
            assert torch.equal(mine, theirs)
    for handle in handles:
        handle.remove()
    viking.detach(model)


def test_failed_steps_keep_nothing_alive() -> None:
    twins = Twins("early stop")
    engine = DeviceEngine.of(CPU).engine
    for n in range(1, 60, 3):
        with pytest.raises(RAISED), AtOperation(n):
            twins.step()
    open_before = {k: engine.stats()[k] for k in ("streams", "events", "pins", "weights", "uses", "paths", "readers")}

    for n in range(2, 60, 3):  # in forward: after one in backward, torch itself keeps the graph
        with pytest.raises(RAISED), AtOperation(n):
            twins.step()

    assert {k: engine.stats()[k] for k in open_before} == open_before
    gone = weakref.ref(twins.model)
    del twins
    gc.collect()
    assert gone() is None
    assert not DeviceEngine._open
