"""Wan 14B: 40 blocks of width 5120, each self-attention, cross-attention to the text, and an MLP.

The sequence is that of 17 frames of 832 x 480 at batch 1: 5 latent frames of 1560 tokens. Embedders, head, and the
modulation, which is a bare parameter per block, stay on the device and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from . import Layer, Shape, in_proportion


@dataclass(frozen=True)
class Size:
    """Of the transformer. `hidden` is a multiple of `heads`."""

    name: str = "wan14b"
    hidden: int = 5120
    heads: int = 40
    mlp: int = 13824
    blocks: int = 40
    video_tokens: int = 7800
    text_tokens: int = 512

    def at_depth(self, depth: Fraction) -> Size:
        """The same width, with this fraction of the blocks (rounded, one at least)."""
        return replace(self, blocks=max(1, round(self.blocks * depth)))

    def at_width(self, hidden: int) -> Size:
        """The same depth and number of heads, with everything else in proportion."""
        return in_proportion(self, hidden, video_tokens=8, text_tokens=4)


WAN14B = Size()


def _block(size: Size, block: int) -> list[Layer]:
    hidden, video, text = size.hidden, size.video_tokens, size.text_tokens
    rows = [("self.q", video), ("self.k", video), ("self.v", video), ("self.o", video)]
    rows += [("cross.q", video), ("cross.k", text), ("cross.v", text), ("cross.o", video)]
    of_text = {"cross.k", "cross.v"}
    return [Layer(f"{block}.{name}", hidden, hidden, tokens, block, True, name in of_text) for name, tokens in rows] + [
        Layer(f"{block}.up", size.mlp, hidden, video, block, True),
        Layer(f"{block}.down", hidden, size.mlp, video, block, True),
    ]


def shape_of(size: Size) -> Shape:
    """The shape of a transformer of this size."""
    layers = [layer for block in range(size.blocks) for layer in _block(size, block)]
    per_row = 4.0 * size.hidden * size.video_tokens
    return Shape(size.name, tuple(layers), attention_flops=per_row * (size.video_tokens + size.text_tokens))


def wan14b(depth: Fraction = Fraction(1)) -> Shape:
    """Wan 14B."""
    return shape_of(WAN14B.at_depth(depth))
