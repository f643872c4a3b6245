"""Stochastic rounding of fp32 to bf16: the bits of csrc/core/round.h, on any device.

On the CPU the native kernel does it. Elsewhere the same arithmetic runs in torch's 32-bit integers, which wrap as C's
unsigned ones do and differ from them only in what a right shift brings in, hence the masks. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from viking import _engine

Key = tuple[int, int]

_MASK64 = (1 << 64) - 1


def _mix(value: int) -> int:
    """One round of a 64-bit finaliser (splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK64
    return value ^ value >> 31


def key_of(seed: int, parameter: int, step: int) -> Key:
    """The key of one rounding: of which weight (its index in the optimizer), in which step, under which seed."""
    mixed = _mix(_mix(_mix(seed & _MASK64) ^ parameter) ^ step)
    return mixed & 0xFFFFFFFF, mixed >> 32


def _signed(value: int) -> int:
    """The int32 that has the bits of a uint32."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    return (bits >> by).bitwise_and_((1 << 32 - by) - 1)


def _spread(values: Sequence[int], counts: Sequence[int], like: torch.Tensor) -> torch.Tensor | int:
    """One value per tensor to one per element; a plain int where there is but one tensor."""
    if len(values) == 1:
        return _signed(values[0])
    table = torch.tensor([[_signed(value) for value in values], list(counts)], device=like.device)
    return torch.repeat_interleave(table[0].to(torch.int32), table[1], output_size=like.numel())


def round_by_torch(source: torch.Tensor, counts: Sequence[int], keys: Sequence[Key]) -> torch.Tensor:
    """Round a flat fp32 tensor, the concatenation of tensors of `counts` elements with a key each, to bf16.

    Runs in torch operations on the tensor's device and takes about four times its memory meanwhile.
    """
    starts, at = [], 0
    for count in counts:
        starts.append(at)
        at += count
    offsets = [offset - start for (offset, _), start in zip(keys, starts, strict=True)]
    bits = torch.arange(source.numel(), dtype=torch.int32, device=source.device)
    bits += _spread(offsets, counts, source)
    bits ^= _shift(bits, 17)
    bits *= _signed(0xED5AD4BB)
    bits += _spread([inner for _, inner in keys], counts, source)
    bits ^= _shift(bits, 11)
    bits *= _signed(0xAC4C1B51)
    bits ^= _shift(bits, 15)
    bits *= 0x31848BAB
    bits = _shift(bits, 16)
    bits += source.view(torch.int32)
    bits >>= 16
    rounded = bits.to(torch.int16)
    rounded.masked_fill_(source.isnan(), 0x7FC0)
    return rounded.view(torch.bfloat16)


def round_(destinations: Sequence[torch.Tensor], source: torch.Tensor, keys: Sequence[Key]) -> None:
    """Round a flat fp32 tensor into bf16 tensors that it is the concatenation of, in row-major order each.

    Element i of destination k draws its bits from `keys[k]` and i, whatever the device, strides and company.
    """
    counts = [each.numel() for each in destinations]
    if source.device.type == "cpu":
        for destination, part, (offset, inner) in zip(destinations, source.split(counts), keys, strict=True):
            target = destination if destination.is_contiguous() else torch.empty_like(part, dtype=torch.bfloat16)
            _engine.round_to_bf16(target, part, offset, inner)
            if target is not destination:
                destination.copy_(target.view(destination.shape))
        return
    for destination, part in zip(destinations, round_by_torch(source, counts, keys).split(counts), strict=True):
        destination.copy_(part.view(destination.shape))
