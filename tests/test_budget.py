"""The weights' share of a device: what was asked for, what everything else takes, and what running short leaves.

On a device whose memory is scripted: the numbers are those of a card, the engine is the host's.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.models import Net, build
from support.state import Snapshot
from support.training import Outcome, assert_same, inputs, one_step, train
from viking.nn import pressure
from viking.nn.budget import GROWTH_BYTES, HEADROOM_BYTES, Allocator, Budget, DeviceMemory
from viking.nn.device import DeviceEngine

CPU = torch.device("cpu")
MIB = 1 << 20


class Card(DeviceMemory):
    """A card of which everything but the weights takes `others` bytes, and took more in a step."""

    def __init__(self, total: int) -> None:
        super().__init__(CPU)
        self.total, self.context, self.others, self.top, self.tries = total, 300 * MIB, 100 * MIB, 0, 0

    def _slab(self) -> int:
        engine = DeviceEngine._open.get(CPU)
        return 0 if engine is None or engine.slab is None else engine.slab.numel()

    def step_takes(self, nbytes: int) -> None:
        """Everything but the weights has a peak of `nbytes`."""
        self.top = max(self.top, nbytes + self._slab())

    def driver(self) -> tuple[int, int]:
        return self.total - self.context - self.others - self._slab(), self.total

    def allocator(self) -> Allocator:
        now = self.others + self._slab()
        return Allocator(now, max(self.top, now), now, self.tries)

    def fraction(self) -> float:
        return 1.0

    def reset_peak(self) -> None:
        self.top = 0

    def give_back(self) -> None:
        pass


@pytest.fixture
def card() -> Card:
    """With 300 kB for the weights, once a step has taken 500 MiB beside them."""
    made = Card(300 * MIB + 500 * MIB + HEADROOM_BYTES + 300_000)
    DeviceEngine.make_memory = lambda device: made
    return made


def attach(model: nn.Module, **arguments: Any) -> nn.Module:
    return viking.attach(model, "cpu", progress=False, **arguments)


def budget(model: nn.Module) -> int:
    return viking.stats(model).weights_budget_bytes


def smallest_and_largest() -> tuple[int, int]:
    return DeviceEngine.of(CPU).engine.budget_range()


def run(model: nn.Module, card: Card, peak: int, steps: int = 1) -> None:
    for step in range(steps):
        one_step(model, inputs(step))
        card.step_takes(peak)
        model.zero_grad()


# ---- automatic ----


@pytest.mark.parametrize("asked", [{}, {"vram": "auto"}, {"vram": 1 << 40}], ids=str)
def test_the_weights_get_what_the_peak_of_the_first_steps_leaves(card: Card, asked: dict[str, Any]) -> None:
    model, _ = build(depth=6)
    attach(model, **asked)

    run(model, card, 500 * MIB, 4)

    assert budget(model) == 300_000
    assert viking.stats(model).slab_bytes <= 300_000


def test_a_larger_input_makes_the_share_smaller_and_it_does_not_come_back(card: Card) -> None:
    card.total += 2 * GROWTH_BYTES
    model, trained = build(depth=6)
    fresh, its_trained = build(depth=6)
    attach(model)
    before = train(model, trained, 2)
    run(model, card, 500 * MIB, 4)
    assert budget(model) == smallest_and_largest()[1]

    run(model, card, 500 * MIB + 2 * GROWTH_BYTES, 2)
    assert budget(model) == 300_000
    replans = viking.stats(model).replans
    run(model, card, 500 * MIB, 40)

    assert (budget(model), viking.stats(model).replans) == (300_000, replans)
    theirs = train(fresh, its_trained, 2)
    assert_same(before, theirs)
    assert_same(train(model, trained, 3), train(fresh, its_trained, 3))


def test_memory_that_others_give_back_does_not_make_the_share_grow_by_itself(card: Card) -> None:
    model, _ = build(depth=6)
    attach(model)
    run(model, card, 500 * MIB, 4)

    card.total += 2 * GROWTH_BYTES  # as much as if others had left the card
    run(model, card, 501 * MIB + GROWTH_BYTES, 2)  # a larger input: the share is worked out again

    assert budget(model) == 300_000


def test_a_peak_that_the_headroom_holds_changes_nothing(card: Card) -> None:
    model, _ = build(depth=6)
    attach(model)
    run(model, card, 500 * MIB, 4)
    replans = viking.stats(model).replans

    run(model, card, 500 * MIB + GROWTH_BYTES, 4)

    assert viking.stats(model).replans == replans


def test_where_every_weight_has_room_a_larger_input_moves_nothing(card: Card) -> None:
    card.total += 10 * HEADROOM_BYTES
    model, _ = build(depth=6)
    attach(model)
    run(model, card, 500 * MIB, 4)
    replans = viking.stats(model).replans

    run(model, card, 500 * MIB + 5 * HEADROOM_BYTES, 4)

    assert viking.stats(model).replans == replans


def test_everything_else_may_outgrow_the_vram_that_was_asked_for(card: Card) -> None:
    model, _ = build(depth=6)
    attach(model, vram=card.total)
    run(model, card, 500 * MIB, 4)

    run(model, card, 5 * card.total, 2)

    assert budget(model) == smallest_and_largest()[0]


def test_a_detach_lets_the_share_grow_again(card: Card) -> None:
    model, _ = build(depth=6)
    other = Net(depth=1)
    attach(model)
    attach(other)
    run(model, card, 500 * MIB, 4)
    run(model, card, 500 * MIB + 2 * GROWTH_BYTES, 2)
    assert budget(model) < 300_000

    viking.detach(other)
    run(model, card, 500 * MIB, 4)

    assert budget(model) == 300_000


def test_vram_that_leaves_too_little_is_refused_with_the_smallest_that_works(card: Card) -> None:
    model = Net()
    before = Snapshot(model)

    with pytest.raises(ValueError, match=r"vram=1\.00 GB is too small: the smallest that works is .* of everything"):
        attach(model, vram="1GB")

    before.assert_unchanged(pointers=True)


# ---- monotonic, and the same every time ----


@pytest.mark.parametrize("checkpointing", ["off", "early stop"])
def test_more_budget_is_never_less(checkpointing: str) -> None:
    def plan(asked: int) -> tuple[Any, ...]:
        model, _ = build(depth=4, checkpointing=checkpointing)
        attach(model, weights_budget=asked)
        for step in range(3):
            one_step(model, inputs(step))
        stats = viking.stats(model)
        path = tuple(w.path for w in stats.weights)
        viking.detach(model)
        return stats.slab_bytes, stats.weights_budget_bytes, stats.resident_bytes, path

    model, _ = build(depth=4)
    attach(model)
    smallest, largest = smallest_and_largest()
    viking.detach(model)
    sweep = [plan(smallest + (largest - smallest) * i // 24) for i in range(25)]

    assert sweep == [plan(smallest + (largest - smallest) * i // 24) for i in range(25)]
    for less, more in itertools.pairwise(sweep):
        assert less[0] <= more[0]
        assert less[1] <= more[1]
    assert sweep[-1][2] == largest


@pytest.mark.parametrize("asked", [0, "0", "200kB", 200_000, 1 << 50, "1TB"])
def test_what_was_asked_for_is_between_the_smallest_and_all(asked: Any) -> None:
    model, _ = build()
    attach(model, weights_budget=asked)

    smallest, largest = smallest_and_largest()
    assert budget(model) == {"0": smallest, "2": 200_000, "1": largest}[str(asked)[0]]


def test_a_later_explicit_budget_is_the_devices_and_says_so() -> None:
    first, second = Net(), Net(seed=3)
    attach(first, weights_budget=200_000)

    with pytest.warns(UserWarning, match="the budget of cpu is now weights_budget=150 kB instead of weights_budget=2"):
        attach(second, weights_budget="150kB")

    assert budget(first) == budget(second) == 150_000
    viking.detach(second)
    assert budget(first) == 150_000


# ---- memory runs short ----


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fail: Callable[[], None]) -> torch.Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.fail()
        return grad, None


def runs_short(model: nn.Module, where: str, nbytes: int) -> None:
    """One step that fails for want of `nbytes` in the middle of the model."""

    def fail() -> None:
        pressure.out_of_memory(CPU, nbytes)
        raise torch.cuda.OutOfMemoryError(f"tried to allocate {nbytes} bytes")

    def hook(module: nn.Module, args: Any) -> Any:
        return (Raises.apply(args[0], fail), *args[1:]) if where == "backward" else fail()

    handle = model.blocks[1].up.register_forward_pre_hook(hook)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        one_step(model, inputs(77))
    handle.remove()
    model.zero_grad()


@pytest.mark.parametrize("asked", [{"weights_budget": 260_000}, {"vram": 1 << 40}], ids=str)
@pytest.mark.parametrize("checkpointing", ["off", "reentrant", "early stop"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_out_of_memory_error_the_weights_leave_some_room_and_training_goes_on(
    where: str, checkpointing: str, asked: dict[str, Any]
) -> None:
    model, trained = build(checkpointing=checkpointing)
    fresh, its_trained = build(checkpointing=checkpointing)
    attach(model, **asked)
    assert_same(train(model, trained, 2), train(fresh, its_trained, 2))
    before = budget(model)
    state = torch.get_rng_state()

    runs_short(model, where, 20_000)
    with pytest.warns(UserWarning, match=f"20.0 kB failed on cpu: .* budget is now .*.{before - 20_000} bytes"):
        mine = train(model, trained, 3)

    assert_same(mine, train(fresh, its_trained, 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert budget(model) == before - 20_000
    assert viking.stats(model).slab_bytes <= before - 20_000
    viking.detach(model)  # refuses while a use is open


def test_a_small_request_costs_a_fiftieth_and_a_huge_one_all_but_the_smallest() -> None:
    model, _ = build()
    attach(model, weights_budget=260_000)

    for nbytes, left in ((1, 260_000 - 5200), (1 << 40, smallest_and_largest()[0])):
        runs_short(model, "forward", nbytes)
        with pytest.warns(UserWarning, match="the weights budget is now"):
            one_step(model, inputs(0))
        assert budget(model) == left

    runs_short(model, "forward", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left to give
        one_step(model, inputs(0))
    assert budget(model) == left


def test_a_warning_that_is_an_error_does_not_keep_the_weights_from_leaving_room() -> None:
    model, _ = build()
    attach(model, weights_budget=260_000)
    runs_short(model, "forward", 60_000)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="is now 200 kB"):
            one_step(model, inputs(0))
        one_step(model, inputs(0))

    assert budget(model) == 200_000


def test_several_errors_in_one_step_shrink_once_and_another_device_is_left_alone() -> None:
    model, _ = build()
    attach(model, weights_budget=260_000)
    for nbytes in (9_000, 30_000, 10_000):
        pressure.out_of_memory(CPU, nbytes)
    pressure.out_of_memory(torch.device("cuda", 7), 1 << 30)

    with pytest.warns(UserWarning, match="is now") as said:
        one_step(model, inputs(0))

    assert len(said) == 1
    assert budget(model) == 230_000
    assert pressure.take(torch.device("cuda", 7)) == 1 << 30


def test_a_new_explicit_budget_forgets_what_was_missing() -> None:
    model, other = build()[0], Net(depth=1)
    attach(model, weights_budget=260_000)
    runs_short(model, "forward", 60_000)
    with pytest.warns(UserWarning, match="is now 200 kB"):
        one_step(model, inputs(0))

    attach(other)
    assert budget(model) == 200_000
    viking.detach(other)
    with pytest.warns(UserWarning, match="the budget of cpu is now"):
        attach(other, weights_budget=270_000)

    assert budget(model) == 270_000


def test_an_error_from_before_attach_costs_nothing() -> None:
    pressure.out_of_memory(CPU, 100_000)
    model = attach(build()[0])

    one_step(model, inputs(0))

    assert budget(model) == smallest_and_largest()[1]


def test_retries_of_the_allocator_shrink_the_share_now_and_then(card: Card) -> None:
    model, _ = build()
    attach(model, weights_budget=260_000)
    seen = []

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(2 * pressure.RETRY_INTERVAL + 6):
            card.tries += 1
            one_step(model, inputs(step))
            seen.append(budget(model))

    assert sorted(set(seen), reverse=True) == [260_000, 254_800, 254_800 - 254_800 // 50]
    assert seen.count(254_800) > pressure.RETRY_INTERVAL


def test_the_slabs_own_retries_are_not_counted(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = DeviceEngine._allocate

    def at_the_second_try(self: DeviceEngine, nbytes: int) -> torch.Tensor:
        card.tries += 1
        return allocate(self, nbytes)

    monkeypatch.setattr(DeviceEngine, "_allocate", at_the_second_try)
    model, _ = build()
    attach(model, weights_budget=260_000)

    run(model, card, 0, pressure.RETRY_INTERVAL + 3)

    assert budget(model) == 260_000


# ---- the slab itself ----


def no_room_above(monkeypatch: pytest.MonkeyPatch, limit: Callable[[], int]) -> list[int]:
    allocate, tried = DeviceEngine._allocate, []

    def fail(self: DeviceEngine, nbytes: int) -> torch.Tensor:
        tried.append(nbytes)
        if nbytes > limit():
            pressure.out_of_memory(CPU, nbytes)
            raise torch.cuda.OutOfMemoryError("out of memory")
        return allocate(self, nbytes)

    monkeypatch.setattr(DeviceEngine, "_allocate", fail)
    return tried


def test_a_slab_that_cannot_be_allocated_is_tried_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = no_room_above(monkeypatch, lambda: 200_000)
    model, trained = build()

    with pytest.warns(UserWarning, match="260 kB for the weights could not be allocated on cpu: .* is now") as said:
        attach(model, weights_budget=260_000)

    assert len(said) == 1
    assert tried == sorted(tried, reverse=True)
    assert 150_000 < budget(model) <= 200_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(train(model, trained), train(*build()))


def test_where_not_even_the_smallest_slab_can_be_allocated_the_model_is_untouched(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room_above(monkeypatch, lambda: 0)
    model, trained = build()
    before = Snapshot(model)

    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"the smallest slab .* on cpu, of which .* are free"):
        attach(model, weights_budget=260_000)

    before.assert_unchanged()
    assert not DeviceEngine._open
    monkeypatch.undo()
    attach(model, weights_budget=260_000)
    assert budget(model) == 260_000
    assert_same(train(model, trained), train(*build()))


def test_a_second_model_that_finds_no_room_leaves_the_first_one_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, trained = build()
    attach(model, weights_budget=260_000)
    first = train(model, trained, 2)
    limit = 260_000
    no_room_above(monkeypatch, lambda: limit)
    second = Net(depth=1)
    before = Snapshot(second)
    limit = 50_000

    with (
        pytest.warns(UserWarning, match="the budget of cpu is now"),
        pytest.raises(torch.cuda.OutOfMemoryError, match="the smallest slab"),
    ):
        attach(second, weights_budget=300_000)

    before.assert_unchanged()
    limit = 260_000
    fresh, its_trained = build()
    assert_same(first, train(fresh, its_trained, 2))
    assert_same(train(model, trained, 2), train(fresh, its_trained, 2))
    assert budget(model) == 260_000


@pytest.mark.filterwarnings("ignore:an allocation of")
def test_without_room_for_the_slab_in_a_step_the_next_step_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, trained = build()
    fresh, its_trained = build()
    attach(model, weights_budget=260_000)
    first: Outcome = train(model, trained, 2)
    limit = 0
    no_room_above(monkeypatch, lambda: limit)
    pressure.out_of_memory(CPU, 10_000)

    for _ in range(2):
        with pytest.raises(torch.cuda.OutOfMemoryError, match="the smallest slab"):
            one_step(model, inputs(0))
    limit = 1 << 30

    assert_same(first, train(fresh, its_trained, 2))
    assert_same(train(model, trained, 2), train(fresh, its_trained, 2))


def test_a_budget_reads_as_it_was_written() -> None:
    assert str(Budget(weights=200_000)) == "weights_budget=200 kB"
    assert str(Budget()) == "vram=auto"
