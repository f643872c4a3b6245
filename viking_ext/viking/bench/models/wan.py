"""Wan 14B: sizes and order of the linears as in viking.shapes.wan."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from viking.bench.models.parts import Checkpointed, attend, normalized, split_heads
from viking.shapes.wan import Size


class Attention(nn.Module):
    """Of x to `to`: (batch, tokens, hidden) each."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.q, self.k, self.v, self.o = (nn.Linear(size.hidden, size.hidden) for _ in range(4))

    def forward(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        q, k, v = normalized(self.q(x)), normalized(self.k(to)), self.v(to)
        return self.o(attend(*(split_heads(each, self.heads) for each in (q, k, v))))


class Block(Checkpointed):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.to_self, self.to_text = Attention(size), Attention(size)
        self.up = nn.Linear(size.hidden, size.mlp)
        self.down = nn.Linear(size.mlp, size.hidden)

    def compute(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        y = normalized(x)
        x = x + self.to_self(y, y)
        x = x + self.to_text(normalized(x), text)
        return x + self.down(functional.gelu(self.up(normalized(x)), approximate="tanh"))


class Wan(nn.Module):
    """(1, video tokens + text tokens, hidden) -> (1, video tokens, hidden)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.video_tokens = size.video_tokens
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.blocks)])

    @staticmethod
    def input_shape(size: Size) -> tuple[int, int, int]:
        return (1, size.video_tokens + size.text_tokens, size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, text = x[:, : self.video_tokens], x[:, self.video_tokens :].detach()
        for block in self.blocks:
            x = block(x, text)
        return x
