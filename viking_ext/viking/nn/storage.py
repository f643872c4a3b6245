"""From tensors to weights: what is used together, or shares bytes, travels together.

A weight is a run of bytes. Tensors of one module belong to one weight, and so do tensors of different modules whose
bytes overlap (a tied parameter, views of one storage). Bytes that overlap are copied once, as one segment, so that they
overlap in the home and on the device as they did before.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from viking._engine import Home
from viking.quant.weight import QuantizedWeight, codes_of

ALIGNMENT = 256


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the tensor's first element to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """Its elements fill the span exactly: contiguous up to a permutation of the dimensions."""
    return span_bytes(tensor) == tensor.numel() * tensor.element_size()


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """What a Linear's forward uses: weight, the scale of an 8-bit weight, and bias, where there are such."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    scale = weight.scale if isinstance(weight, QuantizedWeight) else None
    return [tensor for tensor in (weight, scale, bias) if tensor is not None]


def move(parameter: torch.Tensor, target: torch.Tensor) -> None:
    """From now on its data is `target`; a gradient that it has moves along to the device."""
    gradient = parameter.grad
    parameter.data = target
    if gradient is not None and gradient.device != target.device:
        parameter.grad = gradient.to(target.device)


@dataclass
class Segment:
    """A run of bytes as it was found, and its place in the home."""

    begin: int
    end: int
    device: torch.device
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass
class Place:
    """A parameter's place in its weight."""

    parameter: torch.Tensor  # or the scale of one
    segment: Segment
    offset: int  # bytes from the segment's start
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def address_in(self, home: Home) -> int:
        """Of the tensor, when it lives there."""
        return (self.segment.begin if home.borrowed else home.address + self.segment.offset) + self.offset

    def over(self, base: torch.Tensor, base_offset: int) -> torch.Tensor:
        """The tensor over the bytes of `base` (uint8, 1-d), where the weight starts at `base_offset`."""
        start = base.storage_offset() + base_offset + self.segment.offset + self.offset
        with torch.inference_mode(False):
            view = torch.empty(0, dtype=self.dtype, device=base.device)
            return view.set_(base.untyped_storage(), start // self.dtype.itemsize, self.shape, self.stride)


@dataclass
class Weight:
    """What streams as one: the modules that use it, the parameters, the segments of its bytes."""

    modules: list[nn.Module]
    segments: list[Segment]
    places: dict[int, Place] = field(default_factory=dict)  # by id of the Parameter
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # graph nodes that give it gradients

    @property
    def nbytes(self) -> int:
        """Size in the home: each segment at a multiple of ALIGNMENT."""
        return self.segments[-1].offset + self.segments[-1].nbytes

    def is_mapped(self, files: list[tuple[int, int]]) -> bool:
        """It is frozen, and all of its bytes lie in memory that is mapped from files: address ranges in order."""
        return not any(place.parameter.requires_grad for place in self.places.values()) and all(
            s.device.type == "cpu" and _covers(files, s.begin, s.end) for s in self.segments
        )

    def home(self, files: list[tuple[int, int]]) -> Home:
        """A new home: over the mapping it lies in, which then stays alive, else memory of its own."""
        if not self.is_mapped(files):
            return Home(self.nbytes)
        storages = [codes_of(place.parameter).untyped_storage() for place in self.places.values()]
        return Home.over([(s.offset, s.begin, s.nbytes) for s in self.segments], self.nbytes, storages)

    def lives_in(self, home: Home) -> bool:
        """The tensors of its modules are those that it was made of, in that home."""
        tensors = [t for module in self.modules for t in tensors_of(module)]
        return {id(t) for t in tensors} == self.places.keys() and all(
            t.data_ptr() == self.places[id(t)].address_in(home) for t in tensors
        )

    def send_back(self, base: torch.Tensor, segment: Segment, device: torch.device) -> None:
        """Move a segment out of the home, whose bytes `base` holds, to `device`: one storage, as it was."""
        there: torch.Tensor | None = None
        for place in self.places.values():
            if place.segment is not segment:
                continue
            if place.parameter.data_ptr() != base.data_ptr() + segment.offset + place.offset:
                place.parameter.data = place.parameter.data.to(device)  # was replaced and not used since
                continue
            if there is None:
                there = base[segment.offset : segment.offset + segment.nbytes].to(device, copy=True)
            move(place.parameter, place.over(there, -segment.offset))


def _covers(ranges: list[tuple[int, int]], begin: int, end: int) -> bool:
    i = bisect.bisect_right(ranges, begin, key=lambda r: r[0]) - 1
    return i >= 0 and end <= ranges[i][1]


def spans_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Address ranges [begin, end) of tensors that have memory."""
    plain = (t for t in tensors if type(t.data) is torch.Tensor and t.layout == torch.strided and not t.is_meta)
    return [(t.data_ptr(), t.data_ptr() + span_bytes(t)) for t in plain]


def overlap(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    return any(begin < end_b and begin_b < end for begin, end in spans for begin_b, end_b in others)


def _merge(tensors: Iterable[torch.Tensor]) -> list[Segment]:
    spans = sorted(
        (t.device.type, t.device.index or 0, t.data_ptr(), t.data_ptr() + span_bytes(t), t.device) for t in tensors
    )
    segments: list[Segment] = []
    for *_, begin, end, device in spans:
        if segments and segments[-1].device == device and begin < segments[-1].end:
            segments[-1].end = max(segments[-1].end, end)
        else:
            segments.append(Segment(begin, end, device))
    return segments


def _segment_of(tensor: torch.Tensor, segments: list[Segment]) -> Segment:
    pointer = tensor.data_ptr()
    return next(s for s in segments if s.device == tensor.device and s.begin <= pointer < s.end)


def _make_weight(modules: list[nn.Module]) -> Weight:
    parameters = {id(p): p for module in modules for p in tensors_of(module)}
    segments = _merge(parameters.values())
    # In the order of use, not of addresses: these are the allocator's whim, and the layout must not depend on it.
    weight = Weight(modules, list({id(s): s for s in (_segment_of(p, segments) for p in parameters.values())}.values()))
    offset = 0
    for segment in weight.segments:
        segment.offset = offset
        offset += -(-segment.nbytes // ALIGNMENT) * ALIGNMENT
    for key, p in parameters.items():
        segment = _segment_of(p, weight.segments)
        weight.places[key] = Place(p, segment, p.data_ptr() - segment.begin, codes_of(p).dtype, p.shape, p.stride())
    return weight


def group(modules: list[nn.Module]) -> list[Weight]:
    """The weights of these modules, in their order. Every tensor must be dense and not empty."""
    segments = sorted(_merge(p for module in modules for p in tensors_of(module)), key=lambda s: s.begin)
    leader = list(range(len(modules)))

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    first_user: dict[tuple[int, torch.device], int] = {}
    for i, module in enumerate(modules):
        for p in tensors_of(module):
            segment = _segment_in(segments, p)
            owner = first_user.setdefault((segment.begin, segment.device), i)
            a, b = find(owner), find(i)
            leader[max(a, b)] = min(a, b)
    members: dict[int, list[nn.Module]] = {}
    for i, module in enumerate(modules):
        members.setdefault(find(i), []).append(module)
    return [_make_weight(together) for together in members.values()]


def _segment_in(segments: list[Segment], tensor: torch.Tensor) -> Segment:
    """As _segment_of, in segments sorted by address."""
    low, high = 0, len(segments)
    pointer = tensor.data_ptr()
    while low < high:
        middle = (low + high) // 2
        if segments[middle].begin <= pointer:
            low = middle + 1
        else:
            high = middle
    for segment in reversed(segments[:low]):
        if segment.device == tensor.device and segment.begin <= pointer < segment.end:
            return segment
    raise LookupError("a tensor lies in none of the segments")
