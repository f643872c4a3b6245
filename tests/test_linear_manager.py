"""viking.LinearLayerMemoryManager: one Linear under a MemoryManager."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.models import Net
from support.state import Snapshot
from support.training import inputs
from viking import LinearLayerMemoryManager, _engine
from viking.nn.device import DeviceEngine


def attach(model: nn.Module, budget: Any = 0) -> nn.Module:
    return viking.attach(model, "cpu", weights_budget=budget, progress=False)


@pytest.fixture
def model() -> nn.Module:
    return attach(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False)).requires_grad_(False))


def test_it_is_found_at_the_module_and_names_what_it_stands_between(model: nn.Module) -> None:
    manager = model[0]._layer_memory_manager

    assert type(manager) is LinearLayerMemoryManager
    assert manager.module is model[0]
    assert manager.manager is model._memory_manager
    assert isinstance(manager.manager, viking.MemoryManager)
    assert manager.nbytes >= 64 * 65 * 4
    assert manager.path in ("resident", "streamed", "demand")
    assert manager.home_ptr == model[0].weight.data_ptr()
    assert (manager.device_ptr, manager.uses, manager.fetches) == (0, 0, 0)


def test_uses_and_fetches_are_counted_and_the_bytes_are_at_the_device_address(model: nn.Module) -> None:
    manager = model[0]._layer_memory_manager
    for _ in range(3):
        model(inputs(0))

    assert manager.uses == 3
    assert 1 <= manager.fetches <= 3
    weight, bias, ticket = manager.acquire()
    assert weight.data_ptr() == manager.device_ptr != manager.home_ptr
    assert torch.equal(weight, model[0].weight)
    assert torch.equal(bias, model[0].bias)
    assert not weight.requires_grad
    manager.release(ticket)


def test_tensors_over_the_slab_are_made_once(model: nn.Module) -> None:
    manager = model[0]._layer_memory_manager
    seen = set()
    for _ in range(3):
        weight, _, ticket = manager.acquire()
        seen.add(id(weight))
        manager.release(ticket)
        kept = weight

    assert seen == {id(kept)}


def test_one_that_was_not_made_by_attach_manages_nothing(model: nn.Module) -> None:
    model(inputs(0))
    unbound = LinearLayerMemoryManager(nn.Linear(4, 4), None, model._memory_manager.device.engine)

    for look in (lambda: unbound.device_ptr, lambda: unbound.uses, lambda: unbound.path, unbound.acquire):
        with pytest.raises(RuntimeError, match="manages nothing yet"):
            look()


def test_a_number_that_no_weight_can_have_is_refused(model: nn.Module) -> None:
    engine = model._memory_manager.device.engine

    for number in (1 << 32, 1 << 40):
        with pytest.raises(RuntimeError, match=f"weight {number} is not managed"):
            engine.invalidate(number)
    with pytest.raises(OverflowError):
        engine.remove(-1)


def test_a_use_lasts_for_one_call_and_gives_its_result(model: nn.Module) -> None:
    manager = model[0]._layer_memory_manager

    same = manager.use(lambda weight, bias: torch.equal(weight, model[0].weight) and torch.equal(bias, model[0].bias))

    assert same
    assert manager.uses == 1
    manager.detach()  # refuses while a use is open


def test_a_use_ends_with_the_exception_of_its_call(model: nn.Module) -> None:
    manager = model[0]._layer_memory_manager

    with pytest.raises(ZeroDivisionError):
        manager.use(lambda weight, bias: 1 / 0)

    manager.detach()


def test_an_interrupt_while_bytes_are_awaited_leaves_no_use_open() -> None:
    DeviceEngine.make_engine = lambda device: _engine.Engine("host", bytes_per_second=8_000_000)  # 0.08 s a weight
    model = attach(nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(4))).requires_grad_(False))
    x = torch.ones(1, 400)
    with torch.no_grad():
        for _ in range(3):  # until the views are made
            expected = model(x)

        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            model(x)

        assert torch.equal(model(x), expected)
    viking.detach(model)


def test_one_use_may_lie_in_another(model: nn.Module) -> None:
    outer, inner = model[0]._layer_memory_manager, model[1]._layer_memory_manager
    weight, _, first = outer.acquire()
    again, _, second = outer.acquire()
    other, bias, third = inner.acquire()

    assert torch.equal(weight, model[0].weight)
    assert torch.equal(again, model[0].weight)
    assert torch.equal(other, model[1].weight)
    assert bias is None
    for manager, ticket in ((outer, first), (inner, third), (outer, second)):
        manager.release(ticket)


def test_a_use_cannot_be_ended_twice(model: nn.Module) -> None:
    manager = model[0]._layer_memory_manager
    _, _, ticket = manager.acquire()
    manager.release(ticket)

    with pytest.raises(RuntimeError):
        manager.release(ticket)
    with pytest.raises(TypeError):
        manager.release("ticket")


def test_detach_is_refused_in_the_middle_of_a_use(model: nn.Module) -> None:
    manager = model[0]._layer_memory_manager
    _, _, ticket = manager.acquire()
    x = inputs(0)

    with pytest.raises(RuntimeError, match="in use"):
        viking.detach(model)

    manager.release(ticket)
    expected = nn.functional.linear(nn.functional.linear(x, model[0].weight, model[0].bias), model[1].weight)
    assert torch.equal(model(x), expected)
    viking.detach(model)
    assert torch.equal(model(x), expected)


def test_a_refused_detach_is_done_by_the_next_one() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    before = Snapshot(model)
    attach(model)
    model(inputs(0))
    held = model[2]._layer_memory_manager
    _, _, ticket = held.acquire()
    with pytest.raises(RuntimeError, match="in use"):
        viking.detach(model)
    held.release(ticket)

    viking.detach(model)

    before.assert_unchanged()
    assert DeviceEngine._open == {}


def test_one_linear_can_be_detached_and_attached_alone(model: nn.Module) -> None:
    linear, owner = model[0], model._memory_manager
    x = inputs(0)
    expected = model(x)
    manager = linear._layer_memory_manager

    manager.detach()
    manager.detach()

    assert "_layer_memory_manager" not in linear.__dict__
    assert "forward" not in linear.__dict__
    assert torch.equal(nn.Sequential.forward(model, x), expected)
    again = LinearLayerMemoryManager.attach(linear, owner)
    assert again is linear._layer_memory_manager
    assert LinearLayerMemoryManager.attach(linear, owner) is again
    assert torch.equal(model(x), expected)


def test_a_linear_outside_the_model_can_come_under_its_manager_however_small(model: nn.Module) -> None:
    small = nn.Linear(8, 8).requires_grad_(False)
    before = Snapshot(small)
    x = torch.randn(2, 8)
    expected = small(x)

    manager = LinearLayerMemoryManager.attach(small, model._memory_manager)

    assert torch.equal(small(x), expected)
    assert manager.uses == 1
    viking.detach(model)
    before.assert_unchanged()


@pytest.mark.parametrize(
    ("thing", "sentence"),
    [(lambda: nn.Linear(64, 64).double(), "this Linear cannot be streamed: its dtype is torch.float64"),
     (lambda: nn.Linear(64, 64, device="meta"), "is on the meta device")])
def test_what_cannot_be_streamed_is_refused_with_its_reason(model: nn.Module, thing: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LinearLayerMemoryManager.attach(thing(), model._memory_manager)


@pytest.mark.parametrize("thing", [nn.Conv1d(4, 4, 1), nn.Sequential(nn.Linear(64, 64))], ids=["conv", "sequential"])
def test_what_is_no_linear_is_refused(model: nn.Module, thing: nn.Module) -> None:
    with pytest.raises(ValueError, match="cannot be streamed: it is no Linear"):
        LinearLayerMemoryManager.attach(thing, model._memory_manager)


def test_after_detach_it_says_so_and_its_forward_is_the_modules_own(model: nn.Module) -> None:
    manager = model[0]._layer_memory_manager
    x = inputs(0)
    expected = model[0](x)
    viking.detach(model)

    assert torch.equal(manager.forward(x), expected)
    assert manager.home is None
    for name in ("path", "device_ptr", "uses", "fetches"):
        with pytest.raises(RuntimeError, match="was detached from Viking"):
            getattr(manager, name)
    with pytest.raises(RuntimeError, match="was detached from Viking"):
        manager.acquire()


def test_it_cannot_be_made_from_other_things() -> None:
    with pytest.raises(TypeError):
        LinearLayerMemoryManager()
    with pytest.raises(TypeError, match="Engine"):
        LinearLayerMemoryManager(nn.Linear(2, 2), None, object())
    with pytest.raises((TypeError, AttributeError)):
        LinearLayerMemoryManager(object(), None, object())


def test_nothing_keeps_a_detached_model_alive() -> None:
    model = attach(Net())
    model(inputs(0))
    manager = model.enter._layer_memory_manager
    home = weakref.ref(model)
    viking.detach(model)
    del model, manager
    gc.collect()

    assert home() is None
