"""From 8-bit codes to the weight that a layer computes with.

out[o, i] = float32(code[o, i]) * scale[o], rounded once, to nearest. Every way gives the same bits, but those of a NaN.

torch's own cast reads and writes at a quarter of a GPU's memory bandwidth, so there are kernels for it: in Triton where
that is installed, else in CUDA C, compiled when it is first needed; on a CPU, in the engine's C.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from viking import _engine
from viking.quant.formats import BY_DTYPE

#: In the order of preference, by the type of the device. "torch" works everywhere.
WAYS = {"cpu": ("c", "torch"), "cuda": ("triton", "nvrtc", "torch")}
MOST_ELEMENTS = 1 << 31
ALIGNMENT = 16

_working: dict[torch.device, str] = {}


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, way: str | None = None
) -> torch.Tensor:
    """The (rows, columns) of `dtype` (fp32, bf16 or fp16) that the codes stand for, on their device.

    codes: (rows, columns) of an 8-bit format; scale: fp32, (rows,), or None for 1 throughout. `way` forces one of
    :data:`WAYS`; ValueError where it is none of this device's, and its own error where it does not work here.
    """
    ways = WAYS.get(codes.device.type, ("torch",))
    if way is not None and way not in ways:
        raise ValueError(f"there is no way {way!r} to dequantise on {codes.device}: there are {', '.join(ways)}")
    unusual = codes.numel() == 0 or codes.numel() > MOST_ELEMENTS or codes.data_ptr() % ALIGNMENT or not (
        codes.is_contiguous() and (scale is None or scale.is_contiguous())
    )
    if way == "torch" or unusual:
        return _by_torch(codes, scale, dtype)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if way is None:
        way = _working.get(codes.device)
    if way is None:
        return _by_the_first_that_works(ways, codes, scale, out)
    _FILLERS[way](codes, scale, out)
    return out


def _by_the_first_that_works(
    ways: tuple[str, ...], codes: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """What a compiler or a library says against a way is known only once it was tried."""
    failures = []
    for way in ways:
        try:
            _FILLERS[way](codes, scale, out)
        except Exception as error:
            failures.append(f"{way} ({type(error).__name__}: {error})")
            continue
        if way == "torch":
            warnings.warn(
                f"8-bit weights are dequantised by torch's cast on {codes.device}, which is slow; what did not work: "
                + "; ".join(failures),
                stacklevel=2,
            )
        _working[codes.device] = way
        return out
    raise RuntimeError(f"no way to dequantise works on {codes.device}: {'; '.join(failures)}")


# ---- the ways ----


def _by_torch(codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    wide = codes.to(torch.float32)
    return (wide if scale is None else wide.mul_(scale.unsqueeze(1))).to(dtype)


def _torch_into(codes: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    out.copy_(_by_torch(codes, scale, out.dtype))


def _c_into(codes: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    _engine.decode_8bit(codes.view(torch.uint8), scale, BY_DTYPE[codes.dtype].name, out)


def _triton_into(codes: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    from viking.quant import triton_kernel

    triton_kernel.dequantize_into(codes, scale, out)


def _nvrtc_into(codes: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    from viking.quant import nvrtc

    nvrtc.dequantize_into(codes, scale, out)


_FILLERS: dict[str, Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]] = {
    "c": _c_into, "torch": _torch_into, "triton": _triton_into, "nvrtc": _nvrtc_into,
}
