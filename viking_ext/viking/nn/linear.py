"""The arithmetic of a streamed Linear: one autograd Function around the uses of its weight.

Autograd never holds the weight: what a use gets is a view of the slab, which other weights overwrite after it.
Backward is a use of its own. `x` is kept only where the weight wants a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from viking.nn import forwards, refusals
from viking.quant.weight import QuantizedWeight

if TYPE_CHECKING:
    from viking._engine import LinearLayerMemoryManager


class StreamedLinear(torch.autograd.Function):
    """y = x W^T + b with W and b on the device only while they are used.

    x: (*, in_features); y: (*, out_features). `weight` and `bias` are the host Parameters where these require a
    gradient, else None; the gradients that they get are host tensors of their own dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        manager: LinearLayerMemoryManager,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        y = with_weight(manager, partial(functional.linear, x))
        if any(ctx.needs_input_grad):
            ctx.manager = manager
            ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
            ctx.column_major = not x.is_contiguous() and _is_column_major(x)
            ctx.targets = (weight, bias)
            ctx.used = manager.module._parameters["weight"]
            ctx.version = ctx.used._version
            if weight is not None:
                ctx.save_for_backward(x)
        return y

    @staticmethod
    @refusals.once
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x = grad_weight = grad_bias = None
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        weight, bias = ctx.targets
        if ctx.needs_input_grad[0]:
            grad_x = with_weight(ctx.manager, partial(_input_gradient, ctx, rows))
            grad_x = grad_x.reshape(ctx.x_shape).to(ctx.x_dtype)
        if weight is not None and ctx.needs_input_grad[2]:
            (x,) = ctx.saved_tensors
            grad_weight = rows.t().mm(x.reshape(-1, x.shape[-1]).to(grad_y.dtype)).to(weight.device, weight.dtype)
        if bias is not None and ctx.needs_input_grad[3]:
            grad_bias = rows.sum(0).to(bias.device, bias.dtype)
        return grad_x, None, grad_weight, grad_bias

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(refusals.FORWARD_MODE)


def apply(
    x: torch.Tensor, manager: LinearLayerMemoryManager, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """The forward of a managed Linear."""
    refusals.refuse_transforms()
    return StreamedLinear.apply(x, manager, weight, bias)


def with_weight(manager: LinearLayerMemoryManager, compute: Callable[..., torch.Tensor]) -> torch.Tensor:
    """compute(weight, bias). The span of an 8-bit weight is free again as soon as its dequantising was queued."""
    if isinstance(manager.module._parameters["weight"], QuantizedWeight):
        return compute(*manager.use(_off_the_span))
    return manager.use(compute)


def _off_the_span(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight.dequantize(), None if bias is None else bias.clone()


def _check_version(ctx: Any) -> None:
    """The input's gradient is that of the weight which forward used: another one would be silently wrong."""
    if ctx.manager.module._parameters["weight"] is not ctx.used or ctx.used._version != ctx.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: the "
            f"weight of shape {tuple(ctx.used.shape)} of a streamed Linear was edited or replaced between forward and "
            "backward"
        )


def _is_column_major(x: torch.Tensor) -> bool:
    rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    return rows.stride(0) == 1 and rows.stride(1) == rows.shape[0]


def _input_gradient(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """grad_y W, (rows, out) x (out, in), with the operands in the order in which torch's own backward has them."""
    _check_version(ctx)
    weight = weight.to(rows.dtype)
    return weight.t().mm(rows.t()).t() if ctx.column_major else rows.mm(weight)


def make_views(manager: LinearLayerMemoryManager, address: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The module's weight and bias over the device memory at `address`; called once per layout."""
    return manager.manager.device_views(manager, address)


def repair(manager: LinearLayerMemoryManager) -> None:
    """The module's weight or bias is no longer the tensor that lives in the home: bring the new one home.

    What cannot be streamed is not managed any more after this.
    """
    if forwards.are_lent(manager.module):
        raise RuntimeError(
            "backward found a streamed Linear with tensors that torch.func.functional_call lends it: run backward "
            "after that call"
        )
    manager.manager.rehome(manager)


def replaced(manager: LinearLayerMemoryManager, x: torch.Tensor) -> Any:
    """The forward of a managed Linear that has other tensors or another class than it was bound with.

    Tensors that are lent for one call are used as they are. NotImplemented: those that it has now were brought home, or
    it is not managed any more.
    """
    if forwards.are_lent(manager.module):
        weight, bias = (manager.module._parameters[name] for name in ("weight", "bias"))
        assert weight is not None
        return functional.linear(x, weight.to(x.device), None if bias is None else bias.to(x.device))
    repair(manager)
    return NotImplemented
