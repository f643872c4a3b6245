"""Two devices in one process: each has its engine, its slab and its budget, and nothing of one reaches the other.

"cpu:1" is a host engine beside that of "cpu"; copies take their time, so that what is mixed up is torn.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.models import Net, build
from support.threads import together
from support.training import Outcome, assert_same, inputs, one_step, train
from viking import _engine
from viking.nn import pressure
from viking.nn.device import DeviceEngine

FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 1)


@pytest.fixture(autouse=True)
def slow_copies() -> None:
    DeviceEngine.make_engine = lambda device: _engine.Engine(
        "host", bytes_per_second=400_000_000, delay_ns=50_000, seed=3 + (device.index or 0)
    )


def attach(model: nn.Module, device: torch.device, budget: Any) -> nn.Module:
    return viking.attach(model, device, weights_budget=budget, progress=False)


def engines() -> list[_engine.Engine]:
    return [DeviceEngine.of(device).engine for device in (FIRST, SECOND)]


def test_two_models_take_turns_each_under_the_budget_of_its_device() -> None:
    (a, a_trained), (b, b_trained) = build(checkpointing="early stop"), build(checkpointing="reentrant")
    attach(a, FIRST, 0)
    attach(b, SECOND, 250_000)

    mine: list[list[Outcome]] = [[], []]
    for _ in range(3):
        mine[0].append(train(a, a_trained, 2))
        mine[1].append(train(b, b_trained, 2))

    for outcomes, checkpointing in zip(mine, ("early stop", "reentrant"), strict=True):
        fresh, trained = build(checkpointing=checkpointing)
        for outcome in outcomes:
            assert_same(outcome, train(fresh, trained, 2))
    assert viking.stats(b).weights_budget_bytes == 250_000 > viking.stats(a).weights_budget_bytes
    assert [e.stats()["steps"] for e in engines()] == [5, 5]
    slabs = [DeviceEngine.of(device).slab for device in (FIRST, SECOND)]
    starts = sorted((s.data_ptr(), s.data_ptr() + s.numel()) for s in slabs if s is not None)
    assert len(starts) == 2
    assert starts[0][1] <= starts[1][0]


def test_two_threads_train_on_two_devices() -> None:
    (a, a_trained), (b, b_trained) = build(checkpointing="off"), build(checkpointing="early stop")
    attach(a, FIRST, 0)
    attach(b, SECOND, 0)

    mine = together(lambda: train(a, a_trained, 12), lambda: train(b, b_trained, 12))

    assert_same(mine[0], train(*build(checkpointing="off"), 12))
    assert_same(mine[1], train(*build(checkpointing="early stop"), 12))


def test_one_step_may_go_through_both_devices() -> None:
    model, trained = build(depth=4, checkpointing="early stop")
    attach(model.blocks[0], FIRST, 0)
    attach(model.blocks[1], SECOND, 0)
    attach(model.blocks[2], FIRST, 0)
    attach(model.blocks[3], SECOND, 0)

    assert_same(train(model, trained, 6), train(*build(depth=4, checkpointing="early stop"), 6))

    for block in model.blocks:
        viking.detach(block)
    assert not DeviceEngine._open


def test_a_detach_and_a_new_model_on_one_device_leave_the_other_as_it_is() -> None:
    (a, a_trained), b = build(), Net(seed=4)
    attach(a, FIRST, 0)
    attach(b, SECOND, 0)
    layouts = viking.stats(a).replans

    def coming_and_going() -> None:
        for seed in range(6):
            other = Net(depth=1, seed=seed)
            expected = other(inputs(seed))
            attach(other, SECOND, 0)
            assert torch.equal(other(inputs(seed)), expected)
            viking.detach(other)
        viking.detach(b)

    mine, _ = together(lambda: train(a, a_trained, 20), coming_and_going)

    assert_same(mine, train(*build(), 20))
    assert viking.stats(a).replans == layouts + 1  # of its own, once its path was known
    assert list(DeviceEngine._open) == [FIRST]


def test_a_device_that_ran_short_shrinks_alone() -> None:
    a, b = build()[0], build()[0]
    attach(a, FIRST, 260_000)
    attach(b, SECOND, 260_000)

    pressure.out_of_memory(SECOND, 50_000)
    one_step(a, inputs(0))
    with pytest.warns(UserWarning, match="50.0 kB failed on cpu:1: the weights budget is now 210 kB"):
        one_step(b, inputs(0))

    assert viking.stats(a).weights_budget_bytes == 260_000
    assert viking.stats(b).weights_budget_bytes == 210_000


def test_a_dropped_model_closes_its_own_engine_only() -> None:
    a, b = attach(build()[0], FIRST, 0), attach(build()[0], SECOND, 0)
    expected = build()[0](inputs(1))
    a(inputs(0))
    b(inputs(0))

    del b
    gc.collect()

    assert list(DeviceEngine._open) == [FIRST]
    assert torch.equal(a(inputs(1)), expected)


def test_a_model_is_on_one_device() -> None:
    model = attach(build()[0], FIRST, 0)

    with pytest.raises(ValueError, match="attached already, with other arguments"):
        attach(model, SECOND, 0)

    assert viking.MemoryManager.process_device.fget(model._memory_manager) == torch.device("cpu")


@pytest.mark.parametrize("first", ["child", "parent"])
def test_nested_models_share_the_budget_of_their_device(first: str) -> None:
    model, trained = build(checkpointing="early stop")
    child = model.blocks[1]
    for part in (child, model) if first == "child" else (model, child):
        attach(part, FIRST, 200_000)

    mine = train(model, trained, 4)

    assert_same(mine, train(*build(checkpointing="early stop"), 4))
    assert viking.stats(model).weights_budget_bytes == 200_000
    assert viking.stats(model).slab_bytes <= 200_000
    viking.detach(child)
    viking.detach(model)
    assert not DeviceEngine._open
