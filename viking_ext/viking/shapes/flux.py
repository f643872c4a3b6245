"""The FLUX transformers: double-stream blocks, where image and text have weights of their own, then single-stream ones.

FLUX.2-dev is checked by its LoRA: 6,094,848 trainable parameters per unit of rank. Sequence lengths are those of 512 px
at batch 1. Embedders and head stay on the device and are left out, and so is FLUX.2's modulation, which all blocks
share (0.8 of 32.2 billion parameters); FLUX.1-dev has one modulation per block and stream, over a single row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from . import Layer, Shape, in_proportion


@dataclass(frozen=True)
class Size:
    """Of a transformer. `hidden` is a multiple of `heads`; `gated`: the MLP's input projection is twice as wide."""

    name: str
    hidden: int
    heads: int
    mlp: int
    double_blocks: int
    single_blocks: int
    gated: bool
    bias: bool
    modulated: bool
    image_tokens: int = 1024
    text_tokens: int = 512

    @property
    def up(self) -> int:
        """Outputs of the MLP's input projection."""
        return 2 * self.mlp if self.gated else self.mlp

    def at_depth(self, depth: Fraction) -> Size:
        """The same width, with this fraction of both kinds of blocks (rounded, one at least)."""
        doubles, singles = (max(1, round(n * depth)) for n in (self.double_blocks, self.single_blocks))
        return replace(self, double_blocks=doubles, single_blocks=singles)

    def at_width(self, hidden: int) -> Size:
        """The same depth and number of heads, with everything else in proportion."""
        return in_proportion(self, hidden, image_tokens=8, text_tokens=4)


FLUX1 = Size("flux1", 3072, 24, 12288, double_blocks=19, single_blocks=38, gated=False, bias=True, modulated=True)
FLUX2 = Size("flux2", 6144, 48, 18432, double_blocks=8, single_blocks=48, gated=True, bias=False, modulated=False)


def _double_block(size: Size, block: int) -> list[Layer]:
    """Image and text both project first, for the attention over both together."""
    hidden = size.hidden
    sizes = {"qkv": (3 * hidden, hidden), "proj": (hidden, hidden), "up": (size.up, hidden), "down": (hidden, size.mlp)}
    tokens = {"img": size.image_tokens, "txt": size.text_tokens}
    modulation = [Layer(f"double.{block}.{s}.mod", 6 * hidden, hidden, 1, block, size.bias, True) for s in tokens]
    order = [("img", "qkv"), ("txt", "qkv")]
    order += [(stream, part) for stream in ("img", "txt") for part in ("proj", "up", "down")]
    layers = [Layer(f"double.{block}.{s}.{part}", *sizes[part], tokens[s], block, size.bias) for s, part in order]
    return (modulation if size.modulated else []) + layers


def _single_block(size: Size, number: int, block: int) -> list[Layer]:
    """One fused projection to q, k, v and the MLP, and one back."""
    hidden, tokens = size.hidden, size.image_tokens + size.text_tokens
    modulation = [Layer(f"single.{number}.mod", 3 * hidden, hidden, 1, block, size.bias, True)]
    return (modulation if size.modulated else []) + [
        Layer(f"single.{number}.lin1", 3 * hidden + size.up, hidden, tokens, block, size.bias),
        Layer(f"single.{number}.lin2", hidden, hidden + size.mlp, tokens, block, size.bias),
    ]


def shape_of(size: Size) -> Shape:
    """The shape of a transformer of this size."""
    layers: list[Layer] = []
    for block in range(size.double_blocks):
        layers += _double_block(size, block)
    for number in range(size.single_blocks):
        layers += _single_block(size, number, size.double_blocks + number)
    sequence = size.image_tokens + size.text_tokens
    return Shape(size.name, tuple(layers), attention_flops=4.0 * sequence * sequence * size.hidden)


def flux1(depth: Fraction = Fraction(1)) -> Shape:
    """FLUX.1-dev: 19 double-stream and 38 single-stream blocks of width 3072, 11.8 billion parameters."""
    return shape_of(FLUX1.at_depth(depth))


def flux2(depth: Fraction = Fraction(1)) -> Shape:
    """FLUX.2-dev: 8 double-stream and 48 single-stream blocks of width 6144, 31.4 billion parameters."""
    return shape_of(FLUX2.at_depth(depth))
