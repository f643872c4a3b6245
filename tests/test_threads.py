"""Several models, several threads, one engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.models import Net, build
from support.threads import together
from support.training import Outcome, assert_same, inputs, train
from viking import _engine
from viking.nn.budget import Budget
from viking.nn.device import DeviceEngine


def attach(model: nn.Module, budget: Any = 0) -> nn.Module:
    return viking.attach(model, "cpu", weights_budget=budget, progress=False)


@pytest.fixture(params=["fast copies", "slow copies"], autouse=True)
def copies(request: Any) -> None:
    if request.param == "slow copies":
        DeviceEngine.make_engine = lambda device: _engine.Engine(
            "host", bytes_per_second=400_000_000, delay_ns=100_000, seed=9)


def job(checkpointing: str, steps: int = 12, budget: Any = 0) -> tuple[nn.Module, Callable[[], Outcome]]:
    model, trained = build(checkpointing=checkpointing)
    attach(model, budget)
    return model, lambda: train(model, trained, steps)


def test_two_threads_train_two_models_on_one_device() -> None:
    (_, first), (_, second) = job("early stop"), job("reentrant")

    mine = together(first, second)

    assert_same(mine[0], train(*build(checkpointing="early stop"), 12))
    assert_same(mine[1], train(*build(checkpointing="reentrant"), 12))


def test_threads_sample_from_one_model_at_once() -> None:
    model = Net()
    expected = [model(inputs(i)) for i in range(6)]
    attach(model)

    def sample() -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(inputs(i)) for i in range(6)]

    for samples in together(sample, sample, sample):
        assert all(torch.equal(a, b) for a, b in zip(samples, expected, strict=True))


def test_models_come_and_go_while_another_one_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocating the slab takes its time, as on a device: uses of other threads have to wait for it."""
    allocate = DeviceEngine._allocate

    def slowly(self: DeviceEngine, nbytes: int) -> torch.Tensor:
        time.sleep(0.005)
        return allocate(self, nbytes)

    monkeypatch.setattr(DeviceEngine, "_allocate", slowly)
    model, trained = build(checkpointing="early stop")
    attach(model)
    done = threading.Event()

    def training() -> Outcome:
        try:
            return train(model, trained, 40)
        finally:
            done.set()

    def coming_and_going() -> int:
        rounds = 0
        while not done.is_set() or rounds < 3:
            other = Net(depth=1, seed=rounds)
            expected = other(inputs(rounds))
            attach(other)
            assert torch.equal(other(inputs(rounds)), expected)
            viking.detach(other)
            rounds += 1
        return rounds

    mine, rounds = together(training, coming_and_going)

    assert rounds >= 3
    assert_same(mine, train(*build(checkpointing="early stop"), 40))


class Failing:
    """An engine, one of whose methods fails: `before` or after it has done its work."""

    def __init__(self, engine: _engine.Engine, method: str, before: bool) -> None:
        self._engine, self._method, self._before = engine, method, before

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._engine, name)
        if name != self._method:
            return real
        self._method = ""  # once

        def fail(*args: Any) -> None:
            if not self._before:
                real(*args)
            raise KeyboardInterrupt

        return fail


@pytest.mark.parametrize(("method", "before"), [("drop_slab", True), ("drop_slab", False), ("use_layout", True),
                                                ("use_layout", False)])  # fmt: skip
def test_nobody_waits_for_a_slab_whose_relayout_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, method: str, before: bool
) -> None:
    model = attach(Net(depth=2))
    x = inputs(0)
    with torch.no_grad():
        for _ in range(3):
            expected = model(x)
        device = model._memory_manager.device
        device.share.asked = Budget(weights=1 << 30)  # another slab is needed
        with monkeypatch.context() as patch:
            patch.setattr(device, "engine", Failing(device.engine, method, before))
            with pytest.raises(KeyboardInterrupt):
                device.relayout()

        (result,) = together(lambda: torch.no_grad()(model)(x))

    assert torch.equal(result, expected)
    viking.detach(model)


def test_a_model_may_be_detached_in_the_middle_of_anothers_steps() -> None:
    (first, _), (second, second_job) = job("off"), job("reentrant", steps=20)
    started = threading.Event()
    second.blocks[0].register_forward_pre_hook(lambda m, args: started.set())

    def detaching() -> None:
        assert started.wait(60)
        viking.detach(first)

    mine = together(second_job, detaching)[0]

    assert_same(mine, train(*build(checkpointing="reentrant"), 20))
    assert "_memory_manager" not in first.__dict__


def test_detaching_inside_anothers_forward_in_one_thread() -> None:
    first, second = attach(Net()), attach(Net(seed=4))
    fresh = Net(seed=4)
    handle = second.blocks[1].register_forward_pre_hook(lambda m, args: viking.detach(first))

    y = second(inputs(0))
    handle.remove()

    assert torch.equal(y, fresh(inputs(0)))
    assert torch.equal(second(inputs(1)), fresh(inputs(1)))


def test_two_models_in_one_step_share_a_plan() -> None:
    def combined() -> tuple[nn.Module, nn.Module, list[nn.Parameter]]:
        encoder, (model, trained) = Net(seed=8), build()
        return encoder, model, trained

    outcomes = []
    for streamed in (True, False):
        encoder, model, trained = combined()
        if streamed:
            attach(encoder, 400_000)
            attach(model, 400_000)

        def step(m: nn.Module, x: torch.Tensor, encoder: nn.Module = encoder) -> torch.Tensor:
            with torch.no_grad():
                x = encoder(x)
            loss = m(x).square().mean()
            loss.backward()
            return loss.detach()

        outcomes.append(train(model, trained, 6, step_with=step))
        if streamed:
            learned = viking.stats(model).demand_fetches
            train(model, trained, 6, step_with=step)
            assert viking.stats(model).demand_fetches == learned

    assert_same(*outcomes)
