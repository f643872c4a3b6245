"""Which homes are pinned: what is streamed or trained, as far as the user, the machine and the system allow.

Where not all of it may be, what is fetched most often comes first, then what is used first: the same choice every time.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from viking.machine import memory_limit
from viking.nn.progress import Progress
from viking.units import format_bytes

if TYPE_CHECKING:
    from viking._engine import Engine, Home, LinearLayerMemoryManager


#: Of the host memory that this process may use, what stays unpinned: pinned pages cannot be swapped, and a machine that
#: has no others left ends processes without a word.
UNPINNED_PART = 10
#: After so many refusals the system is not asked again: each may take long, and smaller weights have had their try.
REFUSALS = 3


def is_trained(linear: LinearLayerMemoryManager) -> bool:
    """A parameter of the Linear requires a gradient: the host steps it between passes."""
    return any(p is not None and p.requires_grad for p in linear.module._parameters.values())


class Pinning:
    """The pinned host memory of one device's engine. `limit`: bytes that the user allows, None for no limit."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self._warned = False

    def apply(
        self, engine: Engine, linears: dict[int, list[LinearLayerMemoryManager]], progress: Progress | None
    ) -> None:
        """Pin what is streamed or trained, unpin other residents. What may not be pinned is copied as it is, slower."""
        sizes = {number: together[0].nbytes for number, together in linears.items()}
        residents = [
            number
            for number, together in linears.items()
            if together[0].path == "resident" and not any(is_trained(linear) for linear in together)
        ]
        for number in residents:
            engine.pin(number)  # which unpins a resident
        total = sum(sizes.values())
        done = sum(sizes[number] for number in residents)
        chosen = set(self._choose(engine, {n: nbytes for n, nbytes in sizes.items() if n not in residents}))
        refused, pinned = 0, 0
        for number in [n for n in sizes if n not in residents and n not in chosen]:
            engine.unpin(number)
            done += sizes[number]
        for number in self._in_order(engine, chosen):
            if refused < REFUSALS:
                try:
                    engine.pin(number)
                    pinned += sizes[number]
                except (RuntimeError, MemoryError) as error:
                    refused += 1
                    reason = str(error)
            done += sizes[number]
            if progress is not None:
                progress(done, total, "pinning host memory")
        if refused:
            self._warn(f"the system pins no more ({reason})", pinned)

    @staticmethod
    def _in_order(engine: Engine, numbers: set[int]) -> list[int]:
        fetches = engine.planned_fetches()
        return sorted(numbers, key=lambda number: (-fetches[number], number))

    def _limit(self, machine: int | None) -> int | None:
        """Bytes that may be pinned in all, on a machine of so many; None: no limit."""
        room = [] if machine is None else [machine - machine // UNPINNED_PART]
        return min([*room, *([] if self.limit is None else [self.limit])], default=None)

    def _choose(self, engine: Engine, sizes: dict[int, int]) -> Iterator[int]:
        """Those that the limits leave room for."""
        machine = memory_limit()
        limit = self._limit(machine)
        limited_by_machine = limit != self.limit
        taken = 0
        for number in self._in_order(engine, set(sizes)):
            if limit is None or taken + sizes[number] <= limit:
                taken += sizes[number]
                yield number
        if limited_by_machine and taken < sum(sizes.values()):
            assert machine is not None
            self._warn(
                f"a {UNPINNED_PART}th of the {format_bytes(machine)} that this process may use stays unpinned", taken
            )

    def pin_home(self, engine: Engine, home: Home) -> None:
        """Pin a gradient's memory, where the limits and the system allow; elsewhere its copy is slower."""
        limit = self._limit(memory_limit())
        if limit is None or engine.stats()["pinned_bytes"] + home.nbytes <= limit:
            with contextlib.suppress(RuntimeError, MemoryError):
                engine.pin_home(home)

    def _warn(self, reason: str, pinned: int) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"pinned host memory is limited to {format_bytes(pinned)} of weights: {reason}; "
            "the rest streams from pageable memory: the same numbers, slower",
            stacklevel=2,
        )
