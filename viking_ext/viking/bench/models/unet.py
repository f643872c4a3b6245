"""The transformer blocks of SDXL's U-Net: sizes and order of the linears as in viking.shapes.sdxl.

Between two resolutions stands a fixed resampling without weights, in the place of the convolutions.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from viking.bench.models.parts import Checkpointed, attend, normalized, split_heads
from viking.shapes.sdxl import Size


class Attention(nn.Module):
    """Of x, (batch, tokens, width), to `to`, (batch, tokens, text width)."""

    def __init__(self, width: int, to_width: int, head: int) -> None:
        super().__init__()
        self.heads = width // head
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(to_width, width, bias=False)
        self.v = nn.Linear(to_width, width, bias=False)
        self.o = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return self.o(attend(*(split_heads(each, self.heads) for each in (self.q(x), self.k(to), self.v(to)))))


class Block(Checkpointed):
    def __init__(self, width: int, size: Size) -> None:
        super().__init__()
        self.to_self = Attention(width, width, size.head)
        self.to_text = Attention(width, size.text_width, size.head)
        self.up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(4 * width, width)

    def compute(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        y = normalized(x)
        x = x + self.to_self(y, y)
        x = x + self.to_text(normalized(x), text)
        up, gate = self.up(normalized(x)).chunk(2, -1)
        return x + self.down(up * functional.gelu(gate))


class Transformer(nn.Module):
    """One projection in, the blocks, one projection out; all added to what came in."""

    def __init__(self, width: int, depth: int, size: Size) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width, size) for _ in range(depth)])
        self.leave = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        y = self.enter(normalized(x))
        for block in self.blocks:
            y = block(y, text)
        return x + self.leave(y)


def _coarser(x: torch.Tensor) -> torch.Tensor:
    """(1, 4 n, width) -> (1, n, 2 width): two of four tokens side by side."""
    return x.unflatten(1, (-1, 4))[:, :, :2].flatten(2)


def _finer(x: torch.Tensor) -> torch.Tensor:
    """(1, n, 2 width) -> (1, 4 n, width): each half of a token twice."""
    halves = x.unflatten(2, (2, -1))
    return torch.cat((halves, halves), 2).flatten(1, 2)


class Unet(nn.Module):
    """(1, tokens, width) of the first stage -> that of the last one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.text_shape = (1, size.text_tokens, size.text_width)
        of_stage = [stage for stage in size.stages for _ in range(stage.transformers)]
        self.widths = [stage.width for stage in of_stage]
        self.transformers = nn.ModuleList([Transformer(stage.width, stage.depth, size) for stage in of_stage])

    @staticmethod
    def input_shape(size: Size) -> tuple[int, int, int]:
        return (1, size.stages[0].tokens, size.stages[0].width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        text = torch.linspace(-1, 1, self.text_shape[1] * self.text_shape[2], dtype=torch.float32, device=x.device)
        text = text.reshape(self.text_shape).to(x.dtype)
        for width, transformer in zip(self.widths, self.transformers, strict=True):
            if x.shape[2] != width:
                x = _coarser(x) if x.shape[2] < width else _finer(x)
            x = transformer(x, text)
        return x
