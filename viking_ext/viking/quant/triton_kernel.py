"""The device kernel in Triton. Imported where Triton is installed, and only there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Of those tried on an H200 (blocks of 1024 to 8192, 1 to 16 warps, a block or a row per program), the fastest: 0.87 of
#: what a copy reaches.
WIDEST_BLOCK = 4096
WARPS = 4
STAGES = 3
_FORMATS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.int8: 2}


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize(  # type: ignore[no-untyped-def]
    codes, scales, out, columns, FORMAT: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    # An 8-bit float, shifted into the place of an fp32, is that number but for the exponent's bias, which a product
    # mends: exactly, and for subnormal codes too.
    row = tl.program_id(0).to(tl.int64)
    if SCALED:
        scale = tl.load(scales + row)
    for begin in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        at = row * columns + column
        code = tl.load(codes + at, mask=inside, other=0)
        if FORMAT == 2:
            value = code.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            wide = code.to(tl.int32)
            magnitude = wide & 0x7F
            sign = (wide & 0x80) << 24
            if FORMAT == 0:
                value = (sign | (magnitude << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
                value = tl.where(magnitude == 0x7F, float("nan"), value)
            else:
                value = (sign | (magnitude << 21)).to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^112
                special = (sign | 0x7F800000 | ((magnitude & 3) << 21)).to(tl.float32, bitcast=True)
                value = tl.where(magnitude < 0x7C, value, special)
        if SCALED:
            value = value * scale
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def dequantize_into(codes: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    """Queue the conversion on the current stream of the tensors' device. codes, out: (rows, columns), contiguous."""
    rows, columns = codes.shape
    block = min(WIDEST_BLOCK, triton.next_power_of_2(columns))
    # The launcher takes the current device's stream.
    with torch.cuda.device(codes.device):
        _dequantize[(rows,)](
            codes.view(torch.uint8), out if scale is None else scale, out, columns,
            FORMAT=_FORMATS[codes.dtype], SCALED=scale is not None, BLOCK=block, STAGES=STAGES, num_warps=WARPS,
        )
