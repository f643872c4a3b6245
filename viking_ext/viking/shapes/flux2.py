"""FLUX.2-dev's transformer: 8 double-stream and 48 single-stream blocks of width 6144.

Checked by its LoRA: 6,094,848 trainable parameters per unit of rank. Sequence lengths are those of 512 px at batch 1.
Embedders, modulation and head (0.8 of 32.2 billion parameters) are left out: they stay on the device.
"""

from __future__ import annotations

from fractions import Fraction

from . import Layer, Shape

DOUBLE_BLOCKS = 8
SINGLE_BLOCKS = 48
HIDDEN = 6144
IMAGE_TOKENS = 1024
TEXT_TOKENS = 512


def _double_block(block: int, hidden: int) -> list[Layer]:
    """Image and text have weights of their own: both project first, for the attention over both together."""
    mlp = 3 * hidden
    sizes = {"qkv": (3 * hidden, hidden), "proj": (hidden, hidden), "up": (2 * mlp, hidden), "down": (hidden, mlp)}
    tokens = {"img": IMAGE_TOKENS, "txt": TEXT_TOKENS}
    order = [("img", "qkv"), ("txt", "qkv")]
    order += [(stream, part) for stream in ("img", "txt") for part in ("proj", "up", "down")]
    return [Layer(f"double.{block}.{stream}.{part}", *sizes[part], tokens[stream], block) for stream, part in order]


def _single_block(number: int, block: int, hidden: int) -> list[Layer]:
    """One fused projection to q, k, v and the gated MLP, and one back."""
    mlp, tokens = 3 * hidden, IMAGE_TOKENS + TEXT_TOKENS
    return [
        Layer(f"single.{number}.lin1", 3 * hidden + 2 * mlp, hidden, tokens, block),
        Layer(f"single.{number}.lin2", hidden, hidden + mlp, tokens, block),
    ]


def shape(depth: Fraction = Fraction(1), hidden: int = HIDDEN) -> Shape:
    """The shape with ``depth`` of both kinds of blocks (rounded, one at least), at another width if wanted."""
    doubles = max(1, round(DOUBLE_BLOCKS * depth))
    singles = max(1, round(SINGLE_BLOCKS * depth))
    layers: list[Layer] = []
    for block in range(doubles):
        layers += _double_block(block, hidden)
    for number in range(singles):
        layers += _single_block(number, doubles + number, hidden)
    sequence = IMAGE_TOKENS + TEXT_TOKENS
    name = "flux2" if depth == 1 else f"flux2 at {depth} of its depth"
    return Shape(name, tuple(layers), attention_flops=4.0 * sequence * sequence * hidden)
