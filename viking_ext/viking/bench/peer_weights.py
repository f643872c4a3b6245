"""8-bit weights in the forms in which other trainers have them: their offloaders know nothing of ours.

Codes, scales and the kernel that dequantises are the same in all of them, so that what differs is the streaming.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from viking.bench.models.weights import dequantized_twice
from viking.quant.dequantize import dequantize
from viking.quant.weight import QuantizedWeight

_aten = torch.ops.aten


class CodesLinear(nn.Module):
    """The codes are a Parameter, which may be moved and replaced by others; the scales stay on the device."""

    def __init__(self, linear: nn.Linear, weight: QuantizedWeight, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.data, requires_grad=False)
        self.scale = None if weight.scale is None else weight.scale.to(device)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.to(device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, dequantize(self.weight, self.scale, x.dtype), self.bias)


class QuantizedTensor(torch.Tensor):
    """A tensor of the weight's dtype that holds codes and scales, which move with it and may be pinned one by one."""

    _codes: torch.Tensor
    _scale: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> QuantizedTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made._codes, made._scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["_codes"] if self._scale is None else ["_codes", "_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> QuantizedTensor:
        return QuantizedTensor(inner["_codes"], inner.get("_scale"), dtype)

    def dequantize(self) -> torch.Tensor:
        return dequantize(self._codes, self._scale, self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is _aten.detach.default:
            return args[0]._each(torch.Tensor.detach)
        if func is _aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            how = {name: kwargs[name] for name in ("device", "non_blocking") if name in kwargs}
            return args[0]._each(partial(torch.Tensor.to, **how))
        raise NotImplementedError(f"{func} of a quantised weight: dequantise it first")

    def _each(self, do: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
        return QuantizedTensor(do(self._codes), None if self._scale is None else do(self._scale), self.dtype)


class Linear(nn.Linear):
    """Where it is not offloaded, it dequantises at each use, as ours do."""

    def __init__(self, linear: nn.Linear, weight: QuantizedWeight) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes = QuantizedTensor(weight.data, weight.scale, weight.dtype)
        self.weight, self.bias = nn.Parameter(codes, requires_grad=False), linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dequantized_twice(self, x)


def replace(model: nn.Module, make: Callable[[nn.Linear, QuantizedWeight], nn.Module]) -> None:
    """Each 8-bit Linear by what `make` makes of it."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and isinstance(child.weight, QuantizedWeight):
                setattr(module, name, make(child, child.weight))
