"""The frozen weights of the models that are measured: random, in 16, 32 or 8 bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from viking.quant.formats import FORMATS, Format
from viking.quant.linear import Linear
from viking.quant.weight import QuantizedWeight

FLOATS = ("bfloat16", "float16", "float32")
#: The largest code of each 8-bit format.
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


@dataclass(frozen=True)
class Weights:
    """In which form: a dtype's name, or an 8-bit format's; these compute in bf16."""

    name: str

    @property
    def format(self) -> Format | None:
        return FORMATS.get(self.name)

    @property
    def computes_in(self) -> torch.dtype:
        return torch.bfloat16 if self.format else getattr(torch, self.name)

    @property
    def bytes_per_element(self) -> int:
        return 1 if self.format else self.computes_in.itemsize

    def fill(self, modules: list[nn.Linear], device: torch.device, where: torch.device) -> None:
        """Make each module's parameters on `device`, in this form, and keep them on `where`."""
        generator = torch.Generator(device).manual_seed(0)
        with _Way(device, where) as way:
            for module in modules:
                for name, parameter in list(module.named_parameters()):
                    fresh = torch.empty(parameter.shape, dtype=self.computes_in, device=device)
                    fresh.normal_(0, 0.02, generator=generator)
                    if self.format is None or name != "weight":
                        setattr(module, name, nn.Parameter(way.bring(fresh), requires_grad=False))
                        continue
                    codes, scale = _encode(fresh, self.format)
                    module._parameters[name] = QuantizedWeight(
                        way.bring(codes), None if scale is None else way.bring(scale), self.computes_in
                    )
                    Linear.take_over(module)


def _encode(weight: torch.Tensor, to: Format) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(rows, columns) -> codes, and a scale for each row where the format has them; on the weight's device.

    Bit for bit as :func:`viking.quantize_`."""
    wide, most = weight.float(), _LARGEST[to.dtype]
    scale = None
    if to.scaled:
        scale = wide.abs().amax(1)
        scale.div_(torch.full_like(scale, most))  # by a number, a GPU multiplies with its inverse
        wide.div_(scale.unsqueeze(1))
    wide.clamp_(-most, most)
    return (wide.round_() if to.dtype == torch.int8 else wide).to(to.dtype), scale


class _Way:
    """From the device to where the weights stay. To the host through a pinned buffer: a copy into fresh memory, which
    the driver makes page by page, takes several times as long."""

    def __init__(self, device: torch.device, where: torch.device) -> None:
        self.through_buffer = device.type == "cuda" and where.type == "cpu"
        self.where = where
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> _Way:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        if self.through_buffer:
            torch._C._host_emptyCache()

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.through_buffer:
            return tensor.to(self.where)
        if self.buffer.numel() < tensor.nbytes:
            self.buffer = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        landed = self.buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        landed.copy_(tensor)
        return torch.empty_like(landed, pin_memory=False).copy_(landed)


class _TwiceDequantized(torch.autograd.Function):
    """y = x W^T + b with a frozen 8-bit W, which backward dequantises again instead of keeping 16 bits of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Linear) -> torch.Tensor:
        ctx.weight = module.weight
        return functional.linear(x, module.weight.dequantize(), module.bias)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> Any:
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        return rows.mm(ctx.weight.dequantize()).reshape(*grad_y.shape[:-1], -1), None


def dequantized_twice(module: nn.Linear, x: torch.Tensor) -> Any:
    """The forward of a Linear whose weight has a `dequantize()`, and the backward that follows from it."""
    return _TwiceDequantized.apply(x, module)


def dequantize_at_each_use(model: nn.Module) -> None:
    """What is resident computes as what is streamed does. For models whose weights are not managed."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.forward = partial(dequantized_twice, module)  # type: ignore[method-assign]
