"""How much of a device the weights may use.

Two names: `vram` is what the whole process may use, as the driver reports it; `weights_budget` is the engine's slab
alone. With `vram`, the weights get what everything else leaves: before the first steps half of what is free, afterwards
the rest of the measured peak, and less again when larger inputs raise that.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch

from viking.units import format_bytes, parse_bytes

#: Left free beside everything that was measured: near the allocator's limit retries cost 15 to 60 % of a step.
HEADROOM_BYTES = 768 << 20
#: A peak that has taken this much of the headroom is planned for.
GROWTH_BYTES = HEADROOM_BYTES // 2
#: Training steps after which everything but the weights is taken to have reached its peak.
SETTLING_STEPS = 2
#: What running out of memory costs the weights at least: one part in this many.
SHRINK_PART = 50

Size = int | str | None


def parse_size(value: Size, name: str) -> int | None:
    """Bytes; None for None and "auto"."""
    return None if value is None or value == "auto" else parse_bytes(value, name)


class Allocator(NamedTuple):
    """What torch's allocator says of a device: bytes now and at their peak, and how often it had to try again."""

    allocated: int
    peak: int
    reserved: int
    retries: int


class DeviceMemory:
    """The memory of one CUDA device, as torch and the driver report it. Nothing here waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def driver(self) -> tuple[int, int]:
        """(free, total) bytes of the card, whoever uses it."""
        return torch.cuda.mem_get_info(self.device)

    def allocator(self) -> Allocator:
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        allocated = stats["allocated_bytes"]["all"]
        reserved = stats["reserved_bytes"]["all"]["current"]
        return Allocator(allocated["current"], allocated["peak"], reserved, stats["num_alloc_retries"])

    def fraction(self) -> float:
        """Of the card, what torch may use: set_per_process_memory_fraction."""
        read = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.7 and later
        with contextlib.suppress(RuntimeError):  # not every allocator has one
            return 1.0 if read is None else read(self.device)
        return 1.0

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def give_back(self) -> None:
        """What the allocator holds free goes back to the driver."""
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Budget:
    """What the user asked for, in bytes; None is automatic, 0 the smallest that works."""

    vram: int | None = None
    weights: int | None = None

    @property
    def is_fixed(self) -> bool:
        """It does not depend on what else is on the device."""
        return self.weights is not None or self.vram == 0

    def __str__(self) -> str:
        if self.weights is not None:
            return f"weights_budget={format_bytes(self.weights)}"
        return f"vram={format_bytes(self.vram) if self.vram is not None else 'auto'}"

    def weights_bytes(self, smallest: int, largest: int, limit: int, others: int, strict: bool = True) -> int:
        """The weights' share: between the `smallest` that works and the `largest` that makes a difference.

        limit: what the device can give this process; others: what everything but the weights takes of it. ValueError,
        naming the smallest that works, for a size that was asked for and is too small; not `strict`: a `vram` that
        everything else has outgrown leaves the smallest.
        """
        if self.is_fixed:
            return self._checked("weights_budget", self.weights or 0, 0, smallest, largest)
        limit = limit if self.vram is None else min(self.vram, limit)
        if self.vram is None or not strict:
            return min(max(limit - others, smallest), largest)
        return self._checked("vram", limit, others, smallest, largest)

    @staticmethod
    def _checked(name: str, asked: int, others: int, smallest: int, largest: int) -> int:
        if asked == 0:
            return smallest
        if asked - others < smallest:
            beside = f" beside {format_bytes(others)} of everything else" if others else ""
            raise ValueError(
                f"{name}={format_bytes(asked)} is too small: the smallest that works is {smallest + others} bytes "
                f"({format_bytes(smallest + others)}: the model's two largest weights{beside}); 0 takes just that"
            )
        return min(asked - others, largest)


@dataclass
class Share:
    """The weights' share of one device: what was asked for, less what everything else was seen to take.

    It is learned anew after an attach or a detach. Between these it only falls: with a higher peak of everything else
    (larger inputs), and by `ceiling`, what running out of memory has left of it.
    """

    memory: DeviceMemory | None  # None: a device that nobody else uses
    asked: Budget = Budget()
    ceiling: int | None = None
    peak: int | None = None  # of everything else in the allocator, as planned for; None: not known yet
    seen: int = 0  # the same, as measured since the last attach or detach
    settles_at: int | None = SETTLING_STEPS  # training steps of the engine; None: settled
    room: int | None = None  # the least that was found since it settled

    def learn(self, steps: int, forget: bool) -> None:
        """A model came or went. `forget`: what everything else takes may be much more than before."""
        self.seen, self.room, self.settles_at = 0, None, steps + SETTLING_STEPS
        if forget:
            self.peak = None
        if self.memory is not None:
            self.memory.reset_peak()

    def observe(self, now: Allocator, slab_bytes: int) -> None:
        self.seen = max(self.seen, now.peak - slab_bytes)

    def settle(self, steps: int) -> None:
        """The peak that was measured is the one to plan for, if enough steps were measured."""
        if self.settles_at is not None and steps >= self.settles_at:
            self.settles_at, self.peak = None, self.seen
        elif self.has_grown:
            self.peak = self.seen

    @property
    def has_grown(self) -> bool:
        """Everything else takes clearly more than is planned for."""
        return self.peak is not None and self.seen > self.peak + GROWTH_BYTES

    def shrink(self, nbytes: int, budget: int, smallest: int) -> int:
        """`nbytes` were missing beside this budget: what is left of it from now on."""
        self.ceiling = max(smallest, budget - max(nbytes, budget // SHRINK_PART))
        return self.ceiling

    def weights_bytes(self, smallest: int, largest: int, slab_bytes: int, resident_bytes: int, strict: bool) -> int:
        """What the weights may use at present, beside `slab_bytes` that are theirs. See :meth:`Budget.weights_bytes`.

        resident_bytes: of what managers moved to a device that cannot be measured.
        """
        limit, others = sys.maxsize, resident_bytes
        if self.memory is not None and not self.asked.is_fixed:
            limit, others = self._measured(self.memory, slab_bytes, smallest)
        nbytes = self.asked.weights_bytes(smallest, largest, limit, others, strict)
        return nbytes if self.ceiling is None else min(nbytes, max(self.ceiling, smallest))

    def _measured(self, memory: DeviceMemory, slab_bytes: int, smallest: int) -> tuple[int, int]:
        """(what this process may use, what everything but the slab takes of it), headroom included."""
        free, total = memory.driver()
        now = memory.allocator()
        context = max(0, total - free - now.reserved)  # the driver's own, and other processes
        limit = min(total, context + int(memory.fraction() * total))
        if self.asked.vram is not None:
            limit = min(limit, self.asked.vram)
        others = context + now.allocated - slab_bytes + HEADROOM_BYTES
        if self.peak is not None:
            others = context + max(self.peak, now.allocated - slab_bytes) + HEADROOM_BYTES
        else:  # the first steps are still to come: half of what is free is theirs, but what the smallest slab needs
            others += max(0, min((limit - others) // 2, limit - others - smallest))
        if self.settles_at is None:
            self.room = limit - others if self.room is None else min(self.room, limit - others)
            others = limit - self.room
        return limit, others
