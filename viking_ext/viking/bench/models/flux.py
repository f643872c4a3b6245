"""FLUX.1 and FLUX.2: sizes and order of the linears as in viking.shapes.flux."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from viking.bench.models.parts import Checkpointed, attend, normalized
from viking.shapes.flux import Size


def _qkv(x: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(batch, tokens, 3 hidden) -> three of (batch, heads, tokens, hidden / heads)."""
    q, k, v = x.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


def _activated(x: torch.Tensor, gated: bool) -> torch.Tensor:
    if not gated:
        return functional.gelu(x, approximate="tanh")
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def _modulated(x: torch.Tensor, change: list[torch.Tensor] | None) -> torch.Tensor:
    """Normalised; then shifted and scaled by the first two of (1, hidden)."""
    return normalized(x) if change is None else torch.addcmul(change[0], normalized(x), 1 + change[1])


def _added(x: torch.Tensor, y: torch.Tensor, change: list[torch.Tensor] | None) -> torch.Tensor:
    return x + y if change is None else torch.addcmul(x, change[2], y)


class Stream(nn.Module):
    """One of the two streams of a double block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.gated = size.heads, size.gated
        self.mod = nn.Linear(size.hidden, 6 * size.hidden, bias=size.bias) if size.modulated else None
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=size.bias)
        self.proj = nn.Linear(size.hidden, size.hidden, bias=size.bias)
        self.up = nn.Linear(size.hidden, size.up, bias=size.bias)
        self.down = nn.Linear(size.mlp, size.hidden, bias=size.bias)

    def changes(self, condition: torch.Tensor) -> list[list[torch.Tensor] | None]:
        """Shift, scale and gate, before attention and before the MLP; of `condition`, (1, hidden)."""
        if self.mod is None:
            return [None, None]
        parts = self.mod(condition).chunk(6, -1)
        return [list(parts[:3]), list(parts[3:])]

    def attention_inputs(
        self, x: torch.Tensor, change: list[torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _qkv(self.qkv(_modulated(x, change)), self.heads)

    def finish(self, x: torch.Tensor, attended: torch.Tensor, changes: list[list[torch.Tensor] | None]) -> torch.Tensor:
        x = _added(x, self.proj(attended), changes[0])
        return _added(x, self.down(_activated(self.up(_modulated(x, changes[1])), self.gated)), changes[1])


class DoubleBlock(Checkpointed):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.image_tokens = size.image_tokens
        self.image, self.text = Stream(size), Stream(size)

    def compute(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        streams = (self.image, self.text)
        sides = (x[:, : self.image_tokens], x[:, self.image_tokens :])
        changes = [stream.changes(condition) for stream in streams]
        parts = [s.attention_inputs(side, c[0]) for s, side, c in zip(streams, sides, changes, strict=True)]
        q, k, v = (torch.cat(pair, 2) for pair in zip(*parts, strict=True))
        joint = attend(q, k, v)
        attended = (joint[:, : self.image_tokens], joint[:, self.image_tokens :])
        ends = zip(streams, sides, attended, changes, strict=True)
        return torch.cat([stream.finish(side, part, change) for stream, side, part, change in ends], 1)


class SingleBlock(Checkpointed):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.gated = size.heads, size.gated
        self.widths = [3 * size.hidden, size.up]
        self.mod = nn.Linear(size.hidden, 3 * size.hidden, bias=size.bias) if size.modulated else None
        self.linear1 = nn.Linear(size.hidden, sum(self.widths), bias=size.bias)
        self.linear2 = nn.Linear(size.hidden + size.mlp, size.hidden, bias=size.bias)

    def compute(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        change = None if self.mod is None else list(self.mod(condition).chunk(3, -1))
        qkv, mlp = self.linear1(_modulated(x, change)).split(self.widths, -1)
        attended = attend(*_qkv(qkv, self.heads))
        return _added(x, self.linear2(torch.cat((attended, _activated(mlp, self.gated)), -1)), change)


class Flux(nn.Module):
    """(1, image + text tokens, hidden) -> the same shape."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [DoubleBlock(size) for _ in range(size.double_blocks)]
            + [SingleBlock(size) for _ in range(size.single_blocks)]
        )

    @staticmethod
    def input_shape(size: Size) -> tuple[int, int, int]:
        return (1, size.image_tokens + size.text_tokens, size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = x[:, :1].mean(1).detach()  # stands for the embedding of time and guidance
        for block in self.blocks:
            x = block(x, condition)
        return x
