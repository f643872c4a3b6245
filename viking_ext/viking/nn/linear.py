"""The arithmetic of a streamed Linear: one autograd Function around the uses of its weight.

Autograd never holds the weight: what a use gets is a view of the slab, which other weights overwrite after it.
Backward is a use of its own. `x` is kept only where the weight wants a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function

from viking.nn import forwards, refusals
from viking.quant.weight import QuantizedWeight

if TYPE_CHECKING:
    from viking._engine import LinearLayerMemoryManager


class StreamedLinear(torch.autograd.Function):
    """y = x W^T + b with W and b on the device only while they are used.

    x: (*, in_features); y: (*, out_features). `weight` and `bias` are the host Parameters where these require a
    gradient, else None; the gradients that they get are host tensors of their own dtype, there by the end of the
    backward pass, or at once where someone could look earlier: see :func:`_way_of`.
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
            if weight is not None or bias is not None:
                ctx.users = manager.manager.users_of(manager)
                ctx.users.add(ctx)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.creates_graph = torch.is_grad_enabled()
        return _backward(ctx, grad_y)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(refusals.FORWARD_MODE)


@refusals.once
def _backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad_x = grad_weight = grad_bias = None
    ctx.has_sent = False
    rows = _rows(grad_y)
    weight, bias = ctx.targets
    if ctx.needs_input_grad[0]:
        grad_x = with_weight(ctx.manager, partial(_input_gradient, ctx, rows))
        if rows is not grad_y:
            grad_x = grad_x.reshape(ctx.x_shape)
        grad_x = _as(grad_x, ctx.x_dtype)
    if weight is not None:
        (x,) = ctx.saved_tensors
        grad_weight = _deliver(ctx, weight, 1, partial(_weight_gradient, rows, x, weight.dtype))
    if bias is not None:
        grad_bias = _deliver(ctx, bias, 1 if weight is None else 2, partial(_bias_gradient, rows, bias.dtype))
    if ctx.has_sent:
        ctx.manager.manager.device.gradients.sent(ctx)
    return grad_x, None, grad_weight, grad_bias


def apply(
    x: torch.Tensor, manager: LinearLayerMemoryManager, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """The forward of a managed Linear; as a function of torch's, it can be taken by modes."""
    if torch._C._is_torch_function_mode_enabled():
        return handle_torch_function(apply, (), x, manager, weight, bias)
    refusals.refuse_transforms()
    return _apply(torch._C._functorch.unwrap_if_dead(x), manager, weight, bias)


#: Function.apply does first what :func:`apply` does at less cost.
_apply = super(torch.autograd.Function, StreamedLinear).apply


def with_weight(manager: LinearLayerMemoryManager, compute: Callable[..., torch.Tensor]) -> torch.Tensor:
    """compute(weight, bias). The span of an 8-bit weight is free again as soon as its dequantising was queued."""
    if type(manager.module._parameters["weight"]) is QuantizedWeight:  # isinstance asks torch's Parameter, in Python
        return compute(*manager.use(_off_the_span))
    return manager.use(compute)


def _off_the_span(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight.dequantize(), None if bias is None else bias.clone()


# In Python, a call that changes nothing costs as much as the engine's part of a use.


def _rows(t: torch.Tensor) -> torch.Tensor:
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1])


def _as(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return t if t.dtype == dtype else t.to(dtype)


def _weight_gradient(rows: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _as(rows.t().mm(_as(_rows(x), rows.dtype)), dtype)


def _bias_gradient(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _as(rows.sum(0), dtype)


def _deliver(ctx: Any, parameter: torch.Tensor, edge: int, make: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """A parameter's gradient, made by `make` on the device: returned for torch to deliver, or sent to arrive by the end
    of the pass."""
    way = _way_of(ctx, parameter, edge)
    if way == "unwanted":
        return None
    gradients, number = ctx.manager.manager.device.gradients, ctx.manager.weight
    if way == "at once":
        gradients.expect_steps({number})
        return make().to(parameter.device)
    gradients.send(parameter, number, ctx.users, make)
    ctx.has_sent = True
    return None


def _way_of(ctx: Any, parameter: torch.Tensor, edge: int) -> str:
    """How the gradient reaches its parameter: "joined" at the end of the pass; "at once", through torch, where a hook
    sees it before that or autograd.grad returns it, where it is to be differentiated again or checked, and where the
    parameter is computed from others; "unwanted" by a backward that names its inputs."""
    if ctx.next_functions[edge][0] is None:
        return "unwanted"
    is_held = _references(ctx.next_functions[edge][0]) > _ALONE  # by someone who may have given it hooks
    node = ctx.next_functions[edge][0]
    try:
        if not torch._C._will_engine_execute_node(node):
            return "unwanted"
    except RuntimeError:  # autograd.grad asks for a leaf's
        return "at once"
    at_once = (
        is_held
        or node.name() != "torch::autograd::AccumulateGrad"
        or ctx.creates_graph
        or torch.is_anomaly_enabled()
        or parameter._backward_hooks
        or parameter._post_accumulate_grad_hooks
    )
    return "at once" if at_once else "joined"


def _references(node: object) -> int:
    return sys.getrefcount(node)


def _references_of_an_unused() -> int:
    with torch.inference_mode(False), torch.enable_grad():
        product = torch.empty(0, requires_grad=True) * 1
    return _references(product.grad_fn.next_functions[0][0])  # type: ignore[union-attr]


_ALONE = _references_of_an_unused()


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
    weight = _as(weight, rows.dtype)
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


def retrain(manager: LinearLayerMemoryManager) -> None:
    """The module's parameters began to require a gradient, or none of them does any more."""
    manager.manager.retrain(manager)
