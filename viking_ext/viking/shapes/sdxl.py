"""SDXL's U-Net as what streams of it: 70 transformer blocks at two resolutions, 722 linears, most of them small.

1024 px at batch 1: 4096 tokens of width 640 and 1024 tokens of width 1280, text of 77 tokens of width 2048. The
convolutions and the linears of the time embedding (0.5 of 2.6 billion parameters) stay on the device and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from . import Layer, Shape


@dataclass(frozen=True)
class Stage:
    """`transformers` of `depth` blocks each, one after the other, at one resolution."""

    width: int
    tokens: int
    transformers: int
    depth: int


@dataclass(frozen=True)
class Size:
    """Of the U-Net: its stages in forward order. Heads are 64 wide, the MLP is gated and four times as wide."""

    name: str = "sdxl"
    stages: tuple[Stage, ...] = (
        Stage(640, 4096, 2, 2),
        Stage(1280, 1024, 2, 10),
        Stage(1280, 1024, 1, 10),
        Stage(1280, 1024, 3, 10),
        Stage(640, 4096, 3, 2),
    )
    text_tokens: int = 77
    text_width: int = 2048
    head: int = 64

    def at_depth(self, depth: Fraction) -> Size:
        """The same widths, with this fraction of each transformer's blocks (rounded, one at least)."""
        stages = (replace(stage, depth=max(1, round(stage.depth * depth))) for stage in self.stages)
        return replace(self, stages=tuple(stages))

    def at_width(self, hidden: int) -> Size:
        """The same depth, with everything else in proportion to a first width of `hidden`, a multiple of `head`."""
        scale = Fraction(hidden, self.stages[0].width)
        least = min(stage.tokens for stage in self.stages)
        tokens = max(1, int(least * scale))
        stages = (
            replace(stage, width=int(stage.width * scale), tokens=stage.tokens // least * tokens)
            for stage in self.stages
        )
        return replace(self, stages=tuple(stages), text_width=max(8, int(self.text_width * scale)))


SDXL = Size()


def _block(name: str, width: int, tokens: int, size: Size, block: int) -> list[Layer]:
    square = (width, width, tokens)
    parts = [("self.q", square), ("self.k", square), ("self.v", square), ("self.o", square), ("cross.q", square)]
    parts += [(f"cross.{part}", (width, size.text_width, size.text_tokens)) for part in "kv"]
    parts += [("cross.o", square), ("up", (8 * width, width, tokens)), ("down", (width, 4 * width, tokens))]
    biased = {"self.o", "cross.o", "up", "down"}
    of_text = {"cross.k", "cross.v"}
    return [Layer(f"{name}.{part}", *sizes, block, part in biased, part in of_text) for part, sizes in parts]


def shape_of(size: Size) -> Shape:
    """The shape of a U-Net of this size. Each transformer projects in before its blocks and out after them."""
    layers: list[Layer] = []
    block = 0
    for number, stage in enumerate(size.stages):
        for transformer in range(stage.transformers):
            name, width = f"{number}.{transformer}", stage.width
            edge = {"bias": True, "checkpointed": False}
            layers.append(Layer(f"{name}.in", width, width, stage.tokens, block, **edge))
            for depth in range(stage.depth):
                layers += _block(f"{name}.{depth}", width, stage.tokens, size, block + 1 + depth)
            block += stage.depth + 2
            layers.append(Layer(f"{name}.out", width, width, stage.tokens, block - 1, **edge))
    blocks = sum(stage.transformers * stage.depth for stage in size.stages)
    flops = sum(
        4.0 * stage.width * stage.tokens * (stage.tokens + size.text_tokens) * stage.transformers * stage.depth
        for stage in size.stages
    )
    return Shape(size.name, tuple(layers), attention_flops=flops / blocks)


def sdxl(depth: Fraction = Fraction(1)) -> Shape:
    """SDXL's transformer blocks."""
    return shape_of(SDXL.at_depth(depth))
