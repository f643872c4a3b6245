"""What torch can do with a Linear and a streamed Linear cannot: one sentence each, instead of a wrong number.

Its weight is on the device only while it is used, so whoever wants to keep it for later, as derivatives of derivatives
and traces do, would find other bytes there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

TRANSFORMED = (
    "a streamed Linear cannot be transformed by torch.func (grad, vmap, jvp, jacrev ...): use torch.autograd, "
    "give its tensors to torch.func.functional_call, or call viking.detach(model) first"
)
TRACED = (
    "a streamed Linear cannot be compiled by torch.jit: a trace would keep device memory that other weights overwrite; "
    "call viking.detach(model) first"
)
FORWARD_MODE = (
    "a streamed Linear has no forward-mode derivative: use torch.autograd.grad, or call viking.detach(model) first"
)
TWICE = (
    "a streamed Linear cannot be differentiated twice: call viking.detach(model) before a step that needs "
    "create_graph=True for second derivatives"
)


def refuse_transforms() -> None:
    """RuntimeError inside torch.func's transforms and torch.jit.trace. Called at every forward."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(TRANSFORMED)
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError(TRACED)


def refuse_scripting() -> None:
    """Stands as `__prepare_scriptable__` on a managed Linear, which torch.jit.script calls first."""
    raise RuntimeError(TRACED)


_kept_out: list[Any] = []


def keep_out_of_compiled_code() -> None:
    """torch.compile breaks its graph at a streamed Linear, and compiles nothing of this package.

    torch loads its compiler late, with the first optimizer at the latest: called at attach and at every root entry.
    """
    dynamo = sys.modules.get("torch._dynamo.trace_rules")
    if dynamo is not None and not _kept_out:
        _kept_out.append(dynamo)
        dynamo.add("viking")


class _Last(torch.autograd.Function):
    """Gradients as they are, but in the graph: a derivative of them is refused and not taken for zero."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(TWICE)


def once(backward: Callable[..., tuple[torch.Tensor | None, ...]]) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """Makes a Function's backward one whose result has no derivative: RuntimeError for whoever asks for it.

    torch's `once_differentiable` leaves its inputs out of the graph: torch.autograd.functional.hvp then gives zeros.
    """

    @functools.wraps(backward)
    def outer(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        depends_on = [t for t in (*grads, *ctx.saved_tensors, *ctx.targets) if t is not None and t.requires_grad]
        tensors = [t for t in results if t is not None]
        if not depends_on or not tensors:
            return results
        marked = iter(_Last.apply(len(tensors), *tensors, *depends_on))
        return tuple(None if t is None else next(marked) for t in results)

    return outer
