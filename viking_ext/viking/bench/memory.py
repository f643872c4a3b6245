"""What a process uses, and how much it may."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from viking.machine import text_of


def candidate_bytes(model: nn.Module) -> int:
    """Of everything that is frozen, scales included."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return sum(t.numel() * t.element_size() for t in (*frozen, *model.buffers()))


@contextlib.contextmanager
def capped(device: torch.device, nbytes: int | None) -> Iterator[None]:
    """torch may take `nbytes` of the device, the CUDA context included: a smaller card, to torch."""
    if device.type != "cuda" or nbytes is None:
        yield
        return
    total = torch.cuda.mem_get_info(device)[1]
    fraction = (nbytes - context_bytes(device)) / total
    torch.cuda.set_per_process_memory_fraction(max(0.0, min(1.0, fraction)), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def context_bytes(device: torch.device) -> int:
    """Of the device, what torch's allocator does not hold: the CUDA context, other processes."""
    return device_in_use(device) - (torch.cuda.memory_reserved(device) if device.type == "cuda" else 0)


def device_in_use(device: torch.device) -> int:
    """As the driver reports it: of all processes, this one's context and caches included."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def device_free(device: torch.device) -> int | None:
    """None where there is no limit to speak of."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def torch_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def host_in_use() -> int:
    """Resident set of this process; 0 where the system does not tell."""
    lines = text_of("/proc/self/status").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def host_peak() -> int:
    """Of this process, so far; 0 where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
