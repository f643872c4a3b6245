"""The two ends of a fused branch in autograd: what backward needs is saved before the Linear computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from viking.lora.adding import add_product_

if TYPE_CHECKING:
    from viking.lora.deferred import Product


class _Saved(torch.autograd.Function):
    """(h, B) -> a placeholder of the product's shape, without memory, that gets the product's gradient."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor, product: Product) -> torch.Tensor:
        needs_h, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(h if needs_weight else None, weight if needs_h else None)
        ctx.factors, ctx.h_shape = product.factors, h.shape
        return h.new_empty(1).expand(product.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The products of torch's own backward, operands in its order.
        h, weight = ctx.saved_tensors
        for factor in reversed(ctx.factors):
            grad = grad * factor
        rows = grad.reshape(-1, grad.shape[-1])
        grad_h = grad_weight = None
        if weight is not None:
            grad_h = rows.mm(weight).reshape(ctx.h_shape)
        if h is not None:
            grad_weight = rows.t().mm(h.reshape(-1, h.shape[-1]))
        return grad_h, grad_weight, None


class _Added(torch.autograd.Function):
    """base + product, over the memory of base; saves nothing."""

    @staticmethod
    def forward(ctx: Any, base: torch.Tensor, placeholder: torch.Tensor | None, product: Product) -> torch.Tensor:
        return add_product_(base.data, product.h.detach(), product.weight.detach(), product.factors)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, grad if ctx.needs_input_grad[1] else None, None


def saved(product: Product) -> torch.Tensor | None:
    """Saves what the product's backward needs and returns its placeholder; None where there will be no backward."""
    h, weight = product.h, product.weight
    if not torch.is_grad_enabled() or not (h.requires_grad or weight.requires_grad):
        return None
    placeholder: torch.Tensor = _Saved.apply(h, weight, product)
    return placeholder


def added(base: torch.Tensor, placeholder: torch.Tensor | None, product: Product) -> torch.Tensor:
    """base + product. base: as its Linear made it, seen by nobody else; it is overwritten."""
    if placeholder is None and not (torch.is_grad_enabled() and base.requires_grad):
        return add_product_(base, product.h, product.weight, product.factors)
    total: torch.Tensor = _Added.apply(base, placeholder, product)
    return total
