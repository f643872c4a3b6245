"""The device kernel in Triton. Imported where Triton is installed, and only there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NARROWEST = 16  # that a matrix unit multiplies; zeros fill up smaller ranks


@triton.jit  # type: ignore[untyped-decorator]
def _add_product(  # type: ignore[no-untyped-def]
    y, h, weight, rows, columns, rank, factor0, factor1,
    FACTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):
    # Neighbouring programs take neighbouring columns: they read the same rows of h, and whole lines of y.
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, RANK)
    left = tl.load(h + row[:, None] * rank + k[None, :], mask=(row < rows)[:, None] & (k < rank)[None, :], other=0)
    right = tl.load(
        weight + column[None, :] * rank + k[:, None], mask=(column < columns)[None, :] & (k < rank)[:, None], other=0
    )
    at = y + row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    base = tl.load(at, mask=inside, other=0)
    kind = y.dtype.element_ty
    product = tl.dot(left, right).to(kind)
    if FACTORS > 0:
        product = (product.to(tl.float32) * factor0).to(kind)
    if FACTORS > 1:
        product = (product.to(tl.float32) * factor1).to(kind)
    tl.store(at, (base.to(tl.float32) + product.to(tl.float32)).to(kind), mask=inside)


def tiles(rank: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program."""
    return (64, 128, 4) if rank <= 64 else (128, 128, 8)


def add_product_(y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, factors: tuple[float, ...]) -> None:
    """Queue y += h weight^T on the current stream of y's device; all contiguous, at most two factors."""
    columns, rank = weight.shape
    rows = y.numel() // columns
    height, width, warps = tiles(rank)
    first, second = (*factors, 1.0, 1.0)[:2]
    grid = (triton.cdiv(columns, width), triton.cdiv(rows, height))
    # The launcher takes the current device's stream.
    with torch.cuda.device(y.device):
        _add_product[grid](
            y, h, weight, rows, columns, rank, float(first), float(second),
            FACTORS=len(factors), ROWS=height, COLUMNS=width, RANK=max(NARROWEST, triton.next_power_of_2(rank)),
            num_warps=warps,
        )
