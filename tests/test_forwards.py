"""Whoever replaces a Linear's forward, before attach or after it, still reaches the streamed weight."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.state import Snapshot
from support.training import inputs

Forward = Callable[..., torch.Tensor]


def attach(model: nn.Module) -> nn.Module:
    return viking.attach(model, "cpu", weights_budget=0, progress=False)


def closure(linear: nn.Linear) -> None:
    original = linear.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return original(x) * 2

    linear.forward = forward


def closure_with_an_empty_cell(linear: nn.Linear) -> None:
    original = linear.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return original(x) * 2 if x is not None else later

    if linear is None:
        later = 3
    linear.forward = forward


def wrapped_closure(linear: nn.Linear) -> None:
    original = linear.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return original(*args, **kwargs) * 2

    linear.forward = forward


def closure_in_a_closure(linear: nn.Linear) -> None:
    closure(linear)
    closure(linear)


class Owner:
    def __init__(self, linear: nn.Linear) -> None:
        self.org_forward = linear.forward
        linear.forward = self.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.org_forward(x) * 2


class SlottedOwner:
    __slots__ = ("org_forward",)

    def __init__(self, linear: nn.Linear) -> None:
        self.org_forward = linear.forward
        linear.forward = self.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.org_forward(x) * 2


def owner(linear: nn.Linear) -> None:
    Owner(linear)


def owner_of_an_owner(linear: nn.Linear) -> None:
    Owner(linear)
    Owner(linear)


def with_slots(linear: nn.Linear) -> None:
    SlottedOwner(linear)


def like_accelerate(linear: nn.Linear) -> None:
    """Its add_hook_to_module: the original at the module, the replacement a partial over the module."""
    linear._old_forward = linear.forward

    def new_forward(module: nn.Linear, *args: Any, **kwargs: Any) -> torch.Tensor:
        return module._old_forward(*args, **kwargs) * 2

    linear.forward = functools.update_wrapper(functools.partial(new_forward, linear), linear._old_forward)


def method_type(linear: nn.Linear) -> None:
    original = linear.forward

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return original(x) * 2

    linear.forward = types.MethodType(forward, linear)


def own_forward_written_out(linear: nn.Linear) -> None:
    linear.forward = linear.forward


REPLACEMENTS = [closure, closure_with_an_empty_cell, wrapped_closure, closure_in_a_closure, owner, owner_of_an_owner,
                like_accelerate, method_type, own_forward_written_out]


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_a_forward_replaced_before_attach_reaches_the_streamed_weight(replace: Callable[[nn.Linear], None]) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    replace(model[0])
    x = inputs(0)
    expected = model(x)
    before = Snapshot(model)

    attach(model)

    assert torch.equal(model(x), expected)
    assert model[0]._layer_memory_manager.uses == 1
    viking.detach(model)
    before.assert_unchanged()
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("replace", [*REPLACEMENTS, with_slots])
def test_a_forward_replaced_after_attach_reaches_the_streamed_weight(replace: Callable[[nn.Linear], None]) -> None:
    model, plain = (nn.Sequential(nn.Linear(64, 64)).requires_grad_(False) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    replace(plain[0])
    x = inputs(0)
    attach(model)
    replace(model[0])

    assert torch.equal(model(x), plain(x))
    assert model[0]._layer_memory_manager.uses == 1
    viking.detach(model)
    assert torch.equal(model(x), plain(x))
    attach(model)
    assert torch.equal(model(x), plain(x))
    viking.detach(model)
    assert torch.equal(model(x), plain(x))


def test_a_forward_that_hides_the_original_is_left_alone_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    with_slots(model[0])
    x = inputs(0)
    expected = model(x)

    attach(model)

    assert "_layer_memory_manager" not in model[0].__dict__
    assert viking.stats(model).weights[0].reason == "its forward was replaced by one that hides the original"
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("replace", [closure, owner, like_accelerate])
def test_a_replacement_that_is_taken_back_while_attached_stays_taken_back(replace: Callable[[nn.Linear], None]) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    x = inputs(0)
    expected = model(x)
    replace(model[0])
    attach(model)

    del model[0].forward
    model[0].__dict__.pop("_old_forward", None)

    assert torch.equal(model(x), expected)
    viking.detach(model)
    assert torch.equal(model(x), expected)
    assert "forward" not in model[0].__dict__
