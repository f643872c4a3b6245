"""Training that returns everything it computed, to be compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from support.models import HIDDEN


@dataclass
class Outcome:
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)  # of every parameter in every step
    weights: list[torch.Tensor] = field(default_factory=list)  # at the end


def assert_same(mine: Outcome, theirs: Outcome) -> None:
    """Every bit of every number is the same."""
    for name in ("losses", "gradients", "weights"):
        a, b = getattr(mine, name), getattr(theirs, name)
        assert len(a) == len(b) > 0, name
        different = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not same_bits(x, y)]
        assert not different, f"{name} {different[:9]} of {len(a)} differ"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.isfinite(a).all()) and torch.equal(a, b)


def inputs(step: int, dtype: torch.dtype = torch.float32, shape: Sequence[int] = (2, 5, HIDDEN)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def one_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward; returns the loss."""
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach()


def train(
    model: nn.Module,
    trained: Sequence[nn.Parameter],
    steps: int = 4,
    dtype: torch.dtype = torch.float32,
    before_step: Callable[[int], None] = lambda step: None,
    step_with: Callable[[nn.Module, torch.Tensor], torch.Tensor] = one_step,
    accumulate: int = 1,
) -> Outcome:
    """AdamW over `steps` batches. `before_step` may change the model, sample from it, anything."""
    optimizer = torch.optim.AdamW(list(trained), lr=1e-2)
    outcome = Outcome()
    for step in range(steps):
        before_step(step)
        outcome.losses.extend(
            step_with(model, inputs(step * accumulate + part, dtype)) for part in range(accumulate)
        )
        outcome.gradients.extend(p.grad.clone() for p in trained if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    outcome.weights.extend(p.detach().clone() for p in trained)
    return outcome
