"""A Parameter whose storage is 8-bit and which is otherwise the weight that it stands for.

What describes the memory (`data`, `element_size()`, `data_ptr()`, `untyped_storage()`) is that of the codes, so that
whoever moves, counts or saves bytes sees what there is. All else is the weight's: `dtype` is the type that it computes
in, and every function of torch that reads it gets `dequantize()`: `x @ w.T`, `w.norm()`, `w.float()`,
`nn.functional.linear(x, w)`. It cannot be written by parts, nor trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from viking.quant.dequantize import dequantize
from viking.quant.formats import BY_DTYPE, Format

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Functions that ask about the memory and not about the numbers in it.
_OF_THE_MEMORY = frozenset((
    "size", "stride", "storage_offset", "data_ptr", "numel", "nelement", "element_size", "dim", "ndimension",
    "untyped_storage", "is_contiguous", "is_inference", "is_pinned", "is_shared", "share_memory_", "detach_",
    "get_device", "is_complex", "__len__", "_is_view",
))
#: Attributes that are computed from the numbers.
_OF_THE_NUMBERS = frozenset(("T", "mT", "H", "mH", "real", "imag"))
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITES = frozenset(("__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)))


class QuantizedWeight(nn.Parameter):
    """(out_features, in_features) codes, with a scale for each row or none. Made by :func:`viking.quantize_`."""

    scale: torch.Tensor | None  # fp32, (out_features,)
    _computes_in: torch.dtype

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> QuantizedWeight:
        weight: QuantizedWeight = torch.Tensor._make_subclass(cls, codes, False)
        weight.scale, weight._computes_in = scale, dtype
        return weight

    @staticmethod
    def take_over(parameter: nn.Parameter, codes: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Make a Parameter one of this class, over these codes: whoever holds it, holds the 8-bit weight."""
        dtype = parameter.dtype
        parameter.data = codes
        parameter.__class__ = QuantizedWeight
        assert isinstance(parameter, QuantizedWeight)
        parameter.scale, parameter._computes_in = scale, dtype

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Of the numbers, not of the codes (which is `data.dtype`)."""
        return self._computes_in

    @property
    def format(self) -> Format:
        return BY_DTYPE[self.data.dtype]

    def dequantize(self) -> torch.Tensor:
        """The weight in its `dtype`: each code times its row's scale, rounded once."""
        return self.dequantize_from(self.data, self.scale)

    def dequantize_from(self, codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """The same from copies of codes and scale, on any device."""
        return dequantize(codes, scale, self._computes_in)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Dequantise to this dtype from now on. TypeError where it is none to compute in."""
        if dtype not in COMPUTE_DTYPES:
            raise TypeError(f"an 8-bit weight computes in float32, bfloat16 or float16, not in {dtype}")
        self._computes_in = dtype

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        scaled = "a scale for each row" if self.scale is not None else "no scales"
        return f"QuantizedWeight({tuple(self.shape)}, {self.format.name}, {scaled}, computes in {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        if id(self) not in memo:
            scale = copy.deepcopy(self.scale, memo)
            memo[id(self)] = QuantizedWeight(self.data.clone(), scale, self._computes_in)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As bytes: pickle cannot read back torch's own 8-bit floats.
        return _rebuild, (self.data.view(torch.uint8), self.data.dtype, self.scale, self._computes_in)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__":
                if func.__self__.__name__ not in _OF_THE_NUMBERS:
                    return func(*args, **kwargs)
            elif name in _OF_THE_MEMORY:
                return func(*args, **kwargs)
            elif isinstance(args[0] if args else None, cls) and _writes(name):
                return _write(func, name, *args, **kwargs)
            elif isinstance(kwargs.get("out"), cls):
                raise _refusal(name)
            return func(*_numbers(args), **_numbers(kwargs))


def _rebuild(
    codes: torch.Tensor, codes_dtype: torch.dtype, scale: torch.Tensor | None, dtype: torch.dtype
) -> QuantizedWeight:
    return QuantizedWeight(codes.view(codes_dtype), scale, dtype)


def codes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it lies in memory: the codes of a quantised weight, any other as it is."""
    return tensor.data if isinstance(tensor, QuantizedWeight) else tensor


def _numbers(value: Any) -> Any:
    if isinstance(value, QuantizedWeight):
        return value.dequantize()
    if type(value) in (tuple, list):
        return type(value)(_numbers(item) for item in value)
    if type(value) is dict:
        return {key: _numbers(item) for key, item in value.items()}
    return value


def _writes(name: str) -> bool:
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _write(func: Callable[..., Any], name: str, weight: QuantizedWeight, *args: Any, **kwargs: Any) -> Any:
    """The writes that make sense: other codes of the same format, and no gradient."""
    target = func.__self__.__name__ if name == "__set__" else name  # type: ignore[attr-defined]
    value = args[0] if args else kwargs.get("requires_grad", True)
    if target in ("data", "copy_"):
        value = codes_of(value)
        if value.dtype != weight.data.dtype:
            raise TypeError(
                f"an 8-bit weight holds codes of {weight.data.dtype} and cannot take a tensor of {value.dtype}: "
                "assign a new nn.Parameter to the module, or change the weight before viking.quantize_"
            )
        return func(weight, value, *args[1:], **kwargs)
    if target in ("requires_grad", "requires_grad_"):
        if value:
            raise RuntimeError("an 8-bit weight cannot be trained: leave the layer out of viking.quantize_ by ignore=")
        return func(weight, *args, **kwargs)
    if name == "__set__":
        return func(weight, *args, **kwargs)
    raise _refusal(name)


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(
        f"an 8-bit weight cannot be changed in place ({name}): assign a new nn.Parameter to the module, or change the "
        "weight before viking.quantize_"
    )
