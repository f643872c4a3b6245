"""Which homes are pinned: what is streamed, as far as the user, the machine and the system allow.

Where not all of it may be, what is fetched most often comes first, then what is used first: the same choice every time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from viking.machine import memory_limit
from viking.nn.progress import Progress
from viking.units import format_bytes

if TYPE_CHECKING:
    from viking._engine import Engine, LinearLayerMemoryManager

#: Of the host memory that this process may use, what stays unpinned: pinned pages cannot be swapped, and a machine that
#: has no others left ends processes without a word.
UNPINNED_PART = 10
#: After so many refusals the system is not asked again: each may take long, and smaller weights have had their try.
REFUSALS = 3


class Pinning:
    """The pinned host memory of one device's engine. `limit`: bytes that the user allows, None for no limit."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self._warned = False

    def apply(
        self, engine: Engine, linears: dict[int, list[LinearLayerMemoryManager]], progress: Progress | None
    ) -> None:
        """Pin what is streamed and unpin what is resident. What may not be pinned is streamed from pageable memory."""
        sizes = {number: together[0].nbytes for number, together in linears.items()}
        residents = [number for number in sizes if linears[number][0].path == "resident"]
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

    def _choose(self, engine: Engine, sizes: dict[int, int]) -> Iterator[int]:
        """Those that the limits leave room for."""
        machine = memory_limit()
        room = None if machine is None else machine - machine // UNPINNED_PART
        limited_by_machine = room is not None and (self.limit is None or room < self.limit)
        limit = room if limited_by_machine else self.limit
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

    def _warn(self, reason: str, pinned: int) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"pinned host memory is limited to {format_bytes(pinned)} of weights: {reason}; "
            "the rest streams from pageable memory: the same numbers, slower",
            stacklevel=2,
        )
