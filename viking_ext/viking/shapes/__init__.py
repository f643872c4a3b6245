"""Models as the planner sees them: which weights there are, and in which order a step uses them.

A :class:`Shape` is a model's linears, block by block, with the work that each is; a :class:`Trace` is one step over
them, in the form that the planner takes and that :func:`viking.plan.save` writes. No tensor is involved.

>>> shape = get("flux2")
>>> len(shape.layers), shape.lora_parameters(16)
(160, 97517568)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib import import_module
from typing import Any

#: Where the slab's alignment comes from: every weight starts at a multiple of this (csrc/core/map.h).
ALIGNMENT = 256

#: Bytes of an element, by the names that torch gives the types.
ELEMENT_BYTES = {"float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "bfloat16": 2}

#: Types with an fp32 scale for each output, as viking.quantize_ makes them.
SCALED = ("float8_e4m3fn", "int8")

MODES = ("checkpointed", "plain", "forward")

# What use_kind is in csrc/core/trace.h.
READ = 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layer:
    """One linear: ``inputs`` -> ``outputs`` over ``tokens`` rows a step.

    ``conditioned``: its input comes from outside of the model (text, time), needs no gradient, and so backward does not
    use the frozen weight. ``checkpointed``: it is computed again in backward, with its block.
    """

    name: str
    outputs: int
    inputs: int
    tokens: int
    block: int
    bias: bool = False
    conditioned: bool = False
    checkpointed: bool = True

    @property
    def parameters(self) -> int:
        """Of the matrix."""
        return self.outputs * self.inputs

    def nbytes(self, weights: str) -> int:
        """Bytes in the slab: a matrix of a type of :data:`ELEMENT_BYTES`, its scales, a bias of 16 bits."""
        scales = _aligned(4 * self.outputs) if weights in SCALED else 0
        bias = _aligned(2 * self.outputs) if self.bias else 0
        return _aligned(self.parameters * ELEMENT_BYTES[weights]) + scales + bias


@dataclass(frozen=True)
class Weight:
    """What a trace knows of a weight; ``block`` groups weights for people."""

    name: str
    nbytes: int
    block: int = 0


@dataclass(frozen=True)
class Use:
    """[begin, end] in ticks, as in csrc/core/trace.h; ``phase`` is "F", "R" (recompute), "B" or ""."""

    weight: int
    begin: int
    end: int
    compute_ns: int
    kind: int = READ
    phase: str = ""


@dataclass(frozen=True)
class Trace:
    """One period of something that repeats: the uses of a training step or of a sampling forward."""

    name: str
    weights: tuple[Weight, ...]
    uses: tuple[Use, ...]
    sweeps: tuple[int, ...] = field(default=())

    @property
    def total_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def find_sweeps(self) -> tuple[int, ...]:
        """Indices of uses at which a sweep begins: a run of uses that touches every weight that the trace uses.

        With at most B bytes on the device, each sweep moves at least total - B, whatever the plan. What is left after
        the last whole sweep counts to it.
        """
        everything = {use.weight for use in self.uses}
        sweeps, seen = [0], set[int]()
        for index, use in enumerate(self.uses):
            if seen == everything:
                sweeps.append(index)
                seen = set()
            seen.add(use.weight)
        if len(sweeps) > 1 and seen != everything:
            sweeps.pop()
        return tuple(sweeps)


@dataclass(frozen=True)
class Machine:
    """What compute times are derived from: sustained rates, not peaks."""

    flops_per_second: float = 600e12
    memory_bytes_per_second: float = 3.87e12


@dataclass(frozen=True)
class Shape:
    """A model: its linears in forward order, and what each block's attention costs."""

    name: str
    layers: tuple[Layer, ...]
    attention_flops: float

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    def lora_parameters(self, rank: int) -> int:
        """Trainable parameters of a LoRA on every layer."""
        return rank * sum(layer.inputs + layer.outputs for layer in self.layers)

    def blocks(self) -> list[list[int]]:
        """Indices of each block's layers, in forward order."""
        blocks: dict[int, list[int]] = {}
        for index, layer in enumerate(self.layers):
            blocks.setdefault(layer.block, []).append(index)
        return list(blocks.values())

    def order(self, mode: str = "checkpointed", *, early_stop: bool = False) -> Iterator[tuple[int, str, bool]]:
        """(layer, phase, whether the block's attention is computed with it), use by use.

        ``early_stop``: checkpointing ends a recompute once it has what backward needs, which can leave out the last
        linear of each block (it does where the LoRA branch comes before the base linear).
        """
        if mode not in MODES:
            raise ValueError(f"mode: {mode!r} is unknown; accepted are {', '.join(MODES)}")
        blocks = self.blocks()
        for block in blocks:
            yield from ((layer, "F", layer == block[0]) for layer in block)
        if mode == "forward":
            return
        for block in reversed(blocks):
            if mode == "checkpointed":
                recomputed = [layer for layer in block[: -1 if early_stop else None] if self.layers[layer].checkpointed]
                yield from ((layer, "R", layer == block[0]) for layer in recomputed)
            used = [layer for layer in reversed(block) if not self.layers[layer].conditioned]
            yield from ((layer, "B", layer == used[-1]) for layer in used)

    def trace(
        self,
        mode: str = "checkpointed",
        *,
        weights: str = "bfloat16",
        rank: int = 16,
        machine: Machine | None = None,
        early_stop: bool = False,
    ) -> Trace:
        """One step: ``mode`` is a training step with gradient checkpointing per block, one without, or a forward.

        Compute times are FLOPs at the machine's rate: 2 per parameter and token for a product, the same for its input
        gradient; a LoRA of ``rank`` adds its two products, and in backward their input and weight gradients; attention
        is 4 T^2 D forwards and 2.5 times that backwards. An 8-bit weight is read once and written as bf16 before each
        product, 3 bytes per parameter at the memory's rate.

        Raises ValueError for an unknown mode or type and a negative rank.
        """
        if weights not in ELEMENT_BYTES:
            raise ValueError(f"weights: {weights!r} is unknown; accepted are {', '.join(ELEMENT_BYTES)}")
        if rank < 0:
            raise ValueError(f"rank: {rank} is negative")
        machine = machine or Machine()
        uses = []
        for index, (layer_index, phase, attention) in enumerate(self.order(mode, early_stop=early_stop)):
            layer = self.layers[layer_index]
            lora = 2 * layer.tokens * rank * (layer.inputs + layer.outputs)
            flops: float = 2 * layer.tokens * layer.parameters + (2 * lora if phase == "B" else lora)
            if attention:
                flops += self.attention_flops * (2.5 if phase == "B" else 1.0)
            moved = 3 * layer.parameters if ELEMENT_BYTES[weights] == 1 else 0
            seconds = flops / machine.flops_per_second + moved / machine.memory_bytes_per_second
            uses.append(Use(layer_index, 2 * index, 2 * index + 1, round(seconds * 1e9), READ, phase))
        listed = tuple(Weight(layer.name, layer.nbytes(weights), layer.block) for layer in self.layers)
        trace = Trace(f"{self.name}, {mode}, rank {rank}, {weights}", listed, tuple(uses))
        return Trace(trace.name, listed, trace.uses, trace.find_sweeps())


def in_proportion(size: Any, hidden: int, **least: int) -> Any:
    """A transformer's size at another width: its `mlp` and the counts that are named follow, the latter down to a least
    number each."""
    scale = Fraction(hidden, size.hidden)
    counts = {name: max(number, int(getattr(size, name) * scale)) for name, number in least.items()}
    return replace(size, hidden=hidden, mlp=int(size.mlp * scale), **counts)


_MODULES = {
    "flux1": "viking.shapes.flux",
    "flux2": "viking.shapes.flux",
    "sdxl": "viking.shapes.sdxl",
    "wan14b": "viking.shapes.wan",
}


def names() -> list[str]:
    """The shapes that :func:`get` knows."""
    return sorted(_MODULES)


def get(name: str, depth: Fraction | int = 1) -> Shape:
    """A named shape, with ``depth`` of its blocks (rounded, one of each kind at least).

    Raises:
        ValueError: an unknown name, or a depth that is not above 0 and at most 1.
    """
    if name not in _MODULES:
        raise ValueError(f"shape: {name!r} is unknown; there are {', '.join(names())}")
    if not 0 < depth <= 1:
        raise ValueError(f"depth: {depth} is not above 0 and at most 1")
    make: Callable[[Fraction], Shape] = getattr(import_module(_MODULES[name]), name)
    shape = make(Fraction(depth))
    return shape if depth == 1 else replace(shape, name=f"{name} at {depth} of its depth")
