"""Stochastic rounding of fp32 to bf16: the bits of csrc/core/round.h, on any device.

On the CPU the native kernel does it. Elsewhere the same arithmetic runs in torch's 32-bit integers, which wrap as C's
unsigned ones do and differ from them only in what a right shift brings in, hence the masks. Both give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from viking import _engine

Key = tuple[int, int]

_MASK64 = (1 << 64) - 1
PIECE_ELEMENTS = 1 << 23


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


def _per_element(
    counts: Sequence[int], keys: Sequence[Key], source: torch.Tensor
) -> tuple[torch.Tensor | int, torch.Tensor | int]:
    """Both halves of each element's key, less the index of its tensor's first element; plain ints for one tensor."""
    if len(counts) == 1:
        return _signed(keys[0][0]), _signed(keys[0][1])
    starts = itertools.accumulate(counts, initial=0)
    offsets = [_signed(offset - start) for (offset, _), start in zip(keys, starts, strict=False)]
    table = torch.tensor([offsets, [_signed(inner) for _, inner in keys], list(counts)], dtype=torch.int32)
    if source.is_cuda:  # from pinned memory the host does not wait for the device
        table = table.pin_memory().to(source.device, non_blocking=True)
    owner = torch.repeat_interleave(table[2], output_size=source.numel())
    return table[0].index_select(0, owner), table[1].index_select(0, owner)


def round_by_torch(source: torch.Tensor, counts: Sequence[int], keys: Sequence[Key]) -> torch.Tensor:
    """Round a flat fp32 tensor, the concatenation of tensors of `counts` elements with a key each, to bf16.

    Runs in torch operations on the tensor's device and takes about five times its memory meanwhile.
    """
    offset, inner = _per_element(counts, keys, source)
    bits = torch.arange(source.numel(), dtype=torch.int32, device=source.device)
    bits += offset
    bits ^= _shift(bits, 17)
    bits *= _signed(0xED5AD4BB)
    bits += inner
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


def _round_large_(destination: torch.Tensor, source: torch.Tensor, key: Key) -> None:
    """One tensor in pieces, so that the integers of a large weight do not need several times its memory."""
    flat = destination.view(-1) if destination.is_contiguous() else torch.empty_like(source, dtype=torch.bfloat16)
    for start in range(0, source.numel(), PIECE_ELEMENTS):
        part = source[start : start + PIECE_ELEMENTS]
        flat[start : start + PIECE_ELEMENTS] = round_by_torch(part, [part.numel()], [(key[0] + start, key[1])])
    if not destination.is_contiguous():
        destination.copy_(flat.view(destination.shape))


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
    elif len(destinations) == 1:
        _round_large_(destinations[0], source, keys[0])
    else:
        rounded = round_by_torch(source, counts, keys).split(counts)
        # As integers: a copy of bf16 on a GPU rewrites the bits of a NaN.
        torch._foreach_copy_(
            [d.view(torch.int16) for d in destinations],
            [part.view(torch.int16).view(d.shape) for part, d in zip(rounded, destinations, strict=True)],
        )
