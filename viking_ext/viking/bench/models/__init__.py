"""The models that are measured: the shapes of viking.shapes with random weights and a LoRA on every linear.

Each checkpoints its blocks (non-reentrant) and takes one input, (1, tokens, hidden). The order in which a step uses the
linears is that of the shape of the same name.

Attention never runs on cuDNN here: where the gradient of its output is a slice of a wider tensor, as in FLUX's single
blocks, cuDNN's backward (torch 2.11, found by compute-sanitizer) reads outside its inputs, which ends in an illegal
access where the memory beside them was given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from viking.bench.models.flux import Flux
from viking.bench.models.unet import Unet
from viking.bench.models.wan import Wan
from viking.bench.models.weights import Weights
from viking.shapes import Shape, flux, sdxl, wan


@dataclass(frozen=True)
class _Kind:
    size: Any
    make: Callable[[Any], nn.Module]
    shape_of: Callable[[Any], Shape]
    heads: int  # widths are multiples of it, times 2


_KINDS = {
    "flux1": _Kind(flux.FLUX1, Flux, flux.shape_of, 24),
    "flux2": _Kind(flux.FLUX2, Flux, flux.shape_of, 48),
    "sdxl": _Kind(sdxl.SDXL, Unet, sdxl.shape_of, 64),
    "wan14b": _Kind(wan.WAN14B, Wan, wan.shape_of, 40),
}


def names() -> list[str]:
    return sorted(_KINDS)


class LoraFactor(nn.Linear):
    """Not called Linear: trainers that offload by class name leave it where it is."""


class Lora(nn.Module):
    """y = linear(x) + up(down(x)), in front of one Linear."""

    def __init__(self, linear: nn.Linear, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = linear
        self.down = LoraFactor(linear.in_features, rank, bias=False, device=device, dtype=dtype)
        self.up = LoraFactor(rank, linear.out_features, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.down.weight, std=linear.in_features**-0.5)
        nn.init.normal_(self.up.weight, std=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(x))


def avoid_cudnn_attention() -> None:
    """For this process; see above."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass(frozen=True)
class Model:
    """Which one: a name, the fraction of its blocks, and its width (None: its own)."""

    name: str
    depth: Fraction = Fraction(1)
    width: int | None = None

    @property
    def title(self) -> str:
        depth = "" if self.depth == 1 else f" depth {self.depth}"
        return self.name + depth + ("" if self.width is None else f" width {self.width}")

    @property
    def size(self) -> Any:
        """ValueError for a depth or width that makes no model."""
        kind = _KINDS[self.name]
        if not 0 < self.depth <= 1:
            raise ValueError(f"--depth: {self.depth} is not above 0 and at most 1")
        size = kind.size.at_depth(self.depth)
        if self.width is None:
            return size
        if self.width <= 0 or self.width % (2 * kind.heads) != 0:
            raise ValueError(f"--width: of {self.name} it is a multiple of {2 * kind.heads}, not {self.width}")
        return size.at_width(self.width)

    @property
    def shape(self) -> Shape:
        return _KINDS[self.name].shape_of(self.size)

    def build(self, rank: int, weights: Weights, weights_on: torch.device, device: torch.device) -> nn.Module:
        """Random weights made on `device` one by one and kept on `weights_on`: never twice in memory.

        LoRA on `device`.
        """
        dtype = weights.computes_in
        with torch.device("meta"):
            model = _KINDS[self.name].make(self.size).to(dtype)
        model.requires_grad_(False)
        weights.fill([m for m in model.modules() if isinstance(m, nn.Linear)], device, weights_on)
        torch.manual_seed(1)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Lora(child, rank, device, dtype))
        return model

    def make_input(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """(1, tokens, hidden)"""
        generator = torch.Generator(device).manual_seed(3)
        shape = _KINDS[self.name].make.input_shape(self.size)  # type: ignore[attr-defined]
        return torch.randn(shape, dtype=dtype, device=device, generator=generator).requires_grad_()
