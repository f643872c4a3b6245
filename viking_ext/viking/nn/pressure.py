"""Device memory that ran short: noticed where torch says so, acted upon at the next root entry.

torch calls its observers from whichever thread failed to allocate, just before it raises, so nothing may move then:
the request is only written down.
"""

from __future__ import annotations

import contextlib

import torch

from viking.nn.budget import Allocator

#: Root entries between two shrinks because of retries.
RETRY_INTERVAL = 16

_missing: dict[torch.device, int] = {}  # the largest request that failed, until somebody takes it
_watching = False


def watch() -> None:
    """Hear of every out-of-memory error of torch's CUDA allocator, which has been initialised; once per process."""
    global _watching
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if _watching or attach is None:
        return
    _watching = True
    with contextlib.suppress(RuntimeError):  # cudaMallocAsync has no observers
        attach(lambda device, nbytes, total, free: out_of_memory(torch.device("cuda", device), nbytes))


def out_of_memory(device: torch.device, nbytes: int) -> None:
    """An allocation of `nbytes` has failed on the device."""
    _missing[device] = max(_missing.get(device, 0), nbytes)


def is_short(device: torch.device) -> bool:
    """An allocation has failed since the last :func:`take`."""
    return device in _missing


def take(device: torch.device) -> int | None:
    """The largest request that has failed since the last call, None if none has."""
    return _missing.pop(device, None)


class Retries:
    """Allocations that succeeded at the second attempt only, once the allocator had given its cache back."""

    def __init__(self) -> None:
        self._seen = 0
        self._entries = 0  # since the last shrink

    def reset(self, now: Allocator) -> None:
        """Those up to now are accounted for, or are the engine's own."""
        self._seen, self._entries = now.retries, 0

    def are_due(self, now: Allocator) -> bool:
        """At a root entry: there were some, and the last layout is long ago."""
        self._entries += 1
        return self.take(now)

    def take(self, now: Allocator) -> bool:
        """The same, asked once more."""
        return now.retries > self._seen and self._entries > RETRY_INTERVAL
