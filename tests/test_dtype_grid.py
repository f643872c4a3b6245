"""Every dtype of input and weight, autocast, mode and shape: what nn.Linear gives, bit for bit, or its exception."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import viking

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
INPUTS = {
    "one dimension": lambda n: n(64),
    "rows": lambda n: n(5, 64),
    "one row": lambda n: n(1, 64),
    "a batch": lambda n: n(2, 5, 64),
    "column-major": lambda n: n(64, 7).t(),
    "a transposed batch": lambda n: n(5, 2, 64).transpose(0, 1),
    "every second column": lambda n: n(4, 128)[:, ::2],
    "an expanded row": lambda n: n(1, 64).expand(6, 64),
    "an expanded batch": lambda n: n(1, 5, 64).expand(3, 5, 64),
    "no rows": lambda n: n(0, 64),
    "a batch of no rows": lambda n: n(2, 0, 64),
    "too few columns": lambda n: n(3, 63),
}


class Linears(nn.ModuleDict):
    """One of each weight dtype, with bias and without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for dtype in DTYPES:
            for bias in (True, False):
                self[f"{dtype}{' and bias' if bias else ''}".replace(".", " ")] = nn.Linear(64, 48, bias=bias).to(dtype)
        self.requires_grad_(False)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def results(linear: nn.Linear, kind: str, dtype: torch.dtype, cast: torch.dtype | None, mode: str) -> Iterator[Any]:
    """What torch gives: the output, then all gradients; or the type of the exception."""
    with MODES[mode]():
        x = INPUTS[kind](lambda *shape: noise(*shape).to(dtype))
        if mode == "train":
            x = x.detach().requires_grad_(True)
        try:
            with autocast(cast):
                y = linear(x)
        except Exception as error:
            yield type(error)
            return
        yield from (y.dtype, y.shape, y.stride(), y.requires_grad, y.is_inference(), y.detach().clone())
    if mode != "train":
        return
    wanted = [t for t in (x, linear.weight, linear.bias) if t is not None and t.requires_grad]
    for gradient in torch.autograd.grad(y, wanted, noise(*y.shape).to(y.dtype)):
        yield from (gradient.dtype, gradient.shape, gradient)


def differs(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return not (torch.isfinite(a).all() and torch.equal(a, b))
    return bool(a != b)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16], ids=["as it is", "to bf16", "to fp16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_streamed_linears_do_what_linears_do(dtype: torch.dtype, cast: torch.dtype | None, mode: str,
                                             trained: bool) -> None:  # fmt: skip
    plain, streamed = Linears(), Linears()
    viking.attach(streamed, "cpu", weights_budget=0, progress=False)
    for model in (plain, streamed):
        model.requires_grad_(trained)
    computed = raised = 0
    for name, linear in plain.items():
        assert "_layer_memory_manager" in streamed[name].__dict__
        for kind in INPUTS:
            theirs = list(results(linear, kind, dtype, cast, mode))
            mine = list(results(streamed[name], kind, dtype, cast, mode))

            assert len(mine) == len(theirs), (name, kind, mine, theirs)
            assert not any(differs(a, b) for a, b in zip(mine, theirs, strict=True)), (name, kind, mine, theirs)
            computed, raised = computed + (len(theirs) > 1), raised + (len(theirs) == 1)
    matching = 6 if cast is not None else 2  # of the Linears, whose weight has the input's dtype then
    assert (computed, raised) == (matching * 11, 72 - matching * 11)
    viking.detach(streamed)  # refuses while a use is open
