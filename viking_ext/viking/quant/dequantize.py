"""From 8-bit codes to the weight that a layer computes with.

out[o, i] = float32(code[o, i]) * scale[o], rounded once, to nearest. Every way gives the same bits, but those of a NaN.
"""

from __future__ import annotations

import torch

from viking import _engine
from viking.quant.formats import BY_DTYPE

#: In the order of preference, by the type of the device.
WAYS = {"cpu": ("c", "torch"), "cuda": ("torch",)}


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, way: str | None = None
) -> torch.Tensor:
    """The (rows, columns) of `dtype` (fp32, bf16 or fp16) that the codes stand for, on their device.

    codes: (rows, columns) of an 8-bit format; scale: fp32, (rows,), or None for 1 throughout. `way` forces one of
    :data:`WAYS`; ValueError where it is none of this device's.
    """
    if way is None:
        way = WAYS.get(codes.device.type, ("torch",))[0] if codes.is_contiguous() else "torch"
    if way == "c" and codes.device.type == "cpu":
        out = torch.empty(codes.shape, dtype=dtype)
        _engine.decode_8bit(codes.view(torch.uint8), scale, BY_DTYPE[codes.dtype].name, out)
        return out
    if way != "torch":
        raise ValueError(f"there is no way {way!r} to dequantise on {codes.device}")
    wide = codes.to(torch.float32)
    return (wide if scale is None else wide.mul_(scale.unsqueeze(1))).to(dtype)
