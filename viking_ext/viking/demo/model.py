"""A small diffusion transformer, built like the large ones, and the LoRA that is trained on top of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLASSES = 10
ANY_CLASS = CLASSES
"""The label that stands for no label at all, as classifier-free guidance needs it."""


class Block(nn.Module):
    """Attention and MLP, both scaled, shifted and gated by the condition (adaLN-zero)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(hidden, 6 * hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        qkv = self.qkv(normalise(x) * (1 + scale1) + shift1)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # Written out: 16 tokens need no fused kernel, and this is deterministic on every device.
        attention = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(dim=-1) @ v
        x = x + gate1 * self.proj(attention.transpose(1, 2).flatten(2))
        return x + gate2 * self.down(F.gelu(self.up(normalise(x) * (1 + scale2) + shift2)))


class DiT(nn.Module):
    """Predicts the velocity from image to noise: `(N, 3, 8, 8)` images, `(N,)` times in [0, 1], `(N,)` labels."""

    def __init__(self, hidden: int = 96, depth: int = 4, heads: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.patch, self.hidden = patch, hidden
        self.checkpointing = False
        """Keep only each block's input for the backward pass and compute the block again there."""
        self.embed = nn.Linear(3 * patch * patch, hidden)
        self.position = nn.Parameter(torch.randn(1, (8 // patch) ** 2, hidden) * 0.02)
        self.time = nn.Sequential(nn.Linear(64, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.label = nn.Embedding(CLASSES + 1, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(depth))
        self.head = nn.Linear(hidden, 3 * patch * patch)

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        n, p, side = len(images), self.patch, 8 // self.patch
        patches = images.unflatten(3, (side, p)).unflatten(2, (side, p)).permute(0, 2, 4, 1, 3, 5)
        x = self.embed(patches.reshape(n, side * side, -1)) + self.position
        condition = self.time(waves(times)) + self.label(labels)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, condition, use_reentrant=False)
            else:
                x = block(x, condition)
        out = self.head(normalise(x)).unflatten(2, (3, p, p)).unflatten(1, (side, side))
        return out.permute(0, 3, 1, 4, 2, 5).reshape(n, 3, 8, 8)


class LoRA(nn.Module):
    """A frozen Linear with a trainable product of two thin matrices beside it. It starts out as the Linear alone."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=1 / rank)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def add_lora(model: DiT, rank: int) -> list[Tensor]:
    """Freeze the model, put a LoRA around the Linears of its blocks, and return what is to be trained."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "proj", "up", "down"):
            setattr(block, name, LoRA(getattr(block, name), rank))
    return [parameter for lora in loras(model) for parameter in (lora.down.weight, lora.up.weight)]


def loras(model: nn.Module) -> Iterator[LoRA]:
    return (module for module in model.modules() if isinstance(module, LoRA))


def normalise(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def waves(times: Tensor) -> Tensor:
    """`(N,)` times as `(N, 64)` sines and cosines of geometrically spaced frequencies."""
    frequencies = torch.exp(-math.log(1000.0) * torch.arange(32, device=times.device) / 32)
    angles = 1000.0 * times[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
