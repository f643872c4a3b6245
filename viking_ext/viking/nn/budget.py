"""How much of a device the weights may use.

Two names: `vram` is what the whole process may use, as the driver reports it; `weights_budget` is the engine's slab
alone. With `vram`, the weights get what everything else leaves: before the first steps half of what is free, afterwards
the rest of the measured peak.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from viking.units import format_bytes, parse_bytes

#: Left free beside everything that was measured: near the allocator's limit retries cost 15 to 60 % of a step.
HEADROOM_BYTES = 768 << 20

Size = int | str | None


def parse_size(value: Size, name: str) -> int | None:
    """Bytes; None for None and "auto"."""
    return None if value is None or value == "auto" else parse_bytes(value, name)


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

    def weights_bytes(self, smallest: int, largest: int, limit: int, others: int) -> int:
        """The weights' share: between the `smallest` that works and the `largest` that makes a difference.

        limit: what the device can give this process; others: what everything but the weights takes of it. ValueError,
        naming the smallest that works, for a size that was asked for and is too small.
        """
        if self.is_fixed:
            return self._checked("weights_budget", self.weights or 0, 0, smallest, largest)
        if self.vram is None:
            return min(max(limit - others, smallest), largest)
        return self._checked("vram", min(self.vram, limit), others, smallest, largest)

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


def device_limit(device: torch.device, vram: int | None) -> int:
    """What this process may use on a CUDA device: `vram`, the card, or torch's own cap, whichever is least."""
    free, total = torch.cuda.mem_get_info(device)
    context = max(0, total - free - torch.cuda.memory_reserved(device))
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return min(total, context + int(fraction * total), total if vram is None else vram)


def device_others(device: torch.device, slab_bytes: int, limit: int, smallest: int, settled: bool) -> int:
    """What everything but a slab of `slab_bytes` takes on a CUDA device, with headroom.

    Not `settled`: the first steps are still to come. Half of what is free is taken to be theirs, unless the smallest
    slab needs more of it.
    """
    free, total = torch.cuda.mem_get_info(device)
    context = max(0, total - free - torch.cuda.memory_reserved(device))
    if settled:
        return context + torch.cuda.max_memory_allocated(device) - slab_bytes + HEADROOM_BYTES
    now = context + torch.cuda.memory_allocated(device) - slab_bytes + HEADROOM_BYTES
    return now + max(0, min((limit - now) // 2, limit - now - smallest))
