"""y += h B^T, with every rounding of a matrix product, of the multiplications by numbers, and of an addition.

One kernel does it in a single pass over y. Whether it gives the bits of cuBLAS depends on the device and the shape, so
each shape is tried once, on random numbers: where one bit differs, torch's own product and sum serve that shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

#: From here on a matrix product of cuBLAS's and a sum are faster.
LARGEST_RANK = 128
#: Below, a launch costs more than the pass over y that it saves.
SMALLEST_ELEMENTS = 1 << 16
ALIGNMENT = 16
MOST_FACTORS = 2


@dataclass(frozen=True)
class FusedShape:
    """How products of one shape are added, and why not by the kernel where they are not."""

    rows: int
    columns: int
    rank: int
    dtype: torch.dtype
    device: torch.device
    is_fused: bool
    reason: str = ""

    def __str__(self) -> str:
        how = "fused" if self.is_fused else f"torch: {self.reason}"
        return f"({self.rows}, {self.rank}) x ({self.rank}, {self.columns}) {self.dtype} on {self.device}: {how}"


_shapes: dict[tuple[int, int, int, torch.dtype, torch.device], FusedShape] = {}


def shapes() -> list[FusedShape]:
    """Those that were met in this process."""
    return list(_shapes.values())


def add_product_(
    y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, factors: tuple[float, ...] = ()
) -> torch.Tensor:
    """y += h weight^T * factors[0] * factors[1] ..., each rounded to the dtype. Returns y.

    y: (*, columns), h: (*, rank), weight: (columns, rank), of one dtype and device, h and weight contiguous. On the
    current stream; the host waits once for each new shape on a GPU.
    """
    factors = tuple(factor for factor in factors if factor != 1)
    if y.is_cuda and len(factors) <= MOST_FACTORS and _is_fused(y, h, weight):
        from viking.lora import triton_kernel

        triton_kernel.add_product_(y, h, weight, factors)
        return y
    return _by_torch_(y, h, weight, factors)


def _by_torch_(y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, factors: tuple[float, ...]) -> torch.Tensor:
    product = functional.linear(h, weight)
    for factor in factors:
        product *= factor
    return y.add_(product)


def _is_fused(y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor) -> bool:
    if not y.is_contiguous() or any(t.data_ptr() % ALIGNMENT for t in (y, h, weight)):
        return False  # cuBLAS chooses by alignment: what was found for aligned ones need not hold
    columns, rank = weight.shape
    key = (y.numel() // max(1, columns), columns, rank, y.dtype, y.device)
    shape = _shapes.get(key)
    if shape is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        reason = _why_not(*key)
        shape = _shapes[key] = FusedShape(*key, not reason, reason)
    return shape.is_fused


def _why_not(rows: int, columns: int, rank: int, dtype: torch.dtype, device: torch.device) -> str:
    """The reason against the kernel, which may be its result; "" if there is none."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel is for bf16 and fp16, not {dtype}"
    if rank > LARGEST_RANK:
        return f"a rank above {LARGEST_RANK} is faster so"
    if rows * columns < SMALLEST_ELEMENTS:
        return "it is small"
    try:
        from viking.lora import triton_kernel
    except ImportError:
        return "Triton is not installed"
    generator = torch.Generator(device).manual_seed(rows + columns + rank)  # nobody else's random numbers change

    def random(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

    with torch.inference_mode(False), torch.no_grad():
        h, weight = random(rows, rank), random(columns, rank)
        product = functional.linear(h, weight)
        mine = torch.zeros_like(product)
        try:
            triton_kernel.add_product_(mine, h, weight, ())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what a compiler says is known only once it was asked
            return f"Triton fails here ({type(error).__name__}: {error})"
        return "" if torch.equal(mine, product) else "the kernel's bits are not those of cuBLAS"
