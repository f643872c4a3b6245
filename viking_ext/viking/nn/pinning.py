"""Which homes are pinned: what is streamed or trained, as far as the user, the machine and the system allow.

A pinned byte is worth what it saves per step: its weight's fetches. So what is fetched most is pinned first, and larger
before smaller where that is equal; the same choice every time. What stays pageable is copied through a small pinned
window, without making anybody wait; where there is no window either, straight from its home, which makes the caller
wait.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from viking.machine import memory_available, memory_limit
from viking.nn.progress import Progress
from viking.units import format_bytes

if TYPE_CHECKING:
    from viking._engine import Engine, Home, LinearLayerMemoryManager

Linears = Mapping[int, "list[LinearLayerMemoryManager]"]

#: Of the window; less where less may be pinned.
WINDOW_BYTES = 64 << 20
#: Of the host memory that this process may use, what stays unpinned: pinned pages cannot be swapped, and a machine that
#: has no others left ends processes without a word. As much stays free when mapped weights are copied.
UNPINNED_PART = 10
#: After a refusal smaller weights are tried, until there were so many: each may take long.
REFUSALS = 3
_PAGE = 4096

#: Gives a weight that lies in a file's mapping a home of its own; an exception inside gives it back.
Move = Callable[[int], AbstractContextManager[None]]


def is_trained(linear: LinearLayerMemoryManager) -> bool:
    """A parameter of the Linear requires a gradient: the host steps it between passes."""
    return any(p is not None and p.requires_grad for p in linear.module._parameters.values())


def _travels(together: list[LinearLayerMemoryManager]) -> bool:
    """A resident that is trained is fetched again after every step."""
    return together[0].path != "resident" or any(is_trained(linear) for linear in together)


def _locked(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class Pinning:
    """The pinned host memory of one device's engine. `limit`: bytes that the user allows, None for no limit."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self._warned = False

    def apply(self, engine: Engine, linears: Linears, progress: Progress | None, moves: Mapping[int, Move]) -> None:
        """Pin what travels, unpin other residents. What lies in a file's mapping is pinned only where `moves` says how
        it gets a home of its own."""
        machine = memory_limit()
        room = self._limit(machine)
        spare = memory_available()
        if spare is not None:
            spare = max(0, spare - (machine or spare) // UNPINNED_PART)
        streamed = self._by_benefit(engine, linears)
        chosen, window = self._choose(streamed, linears, room, spare, moves), 0
        if len(chosen) < len(streamed) and room != 0:
            window = WINDOW_BYTES if room is None else min(WINDOW_BYTES, room // 8 // _PAGE * _PAGE)
            chosen = self._choose(streamed, linears, None if room is None else room - window, spare, moves)
        for number, together in linears.items():
            home = together[0].home
            if home is not None and home.pinned and number not in chosen:
                engine.unpin(number)
        refusal = self._use_window(engine, window)
        refused = self._pin(engine, chosen, linears, moves, progress)
        if refused is not None and not engine.stats()["window_bytes"]:
            self._make_room_for_window(engine, chosen, linears)
        needed = sum(_locked(linears[number][0].nbytes) for number in streamed)
        if refused is not None or refusal is not None:
            self._warn(engine, str(refused or refusal))
        elif machine is not None and room != self.limit and room is not None and needed > room:
            part = f"a {UNPINNED_PART}th of the {format_bytes(machine)} that this process may use"
            self._warn(engine, f"{part} stays unpinned")

    def _limit(self, machine: int | None) -> int | None:
        """Bytes that may be pinned in all, on a machine of so many; None: no limit."""
        room = [] if machine is None else [machine - machine // UNPINNED_PART]
        return min([*room, *([] if self.limit is None else [self.limit])], default=None)

    def _by_benefit(self, engine: Engine, linears: Linears) -> list[int]:
        fetches = engine.planned_fetches()
        streamed = [number for number, together in linears.items() if _travels(together)]
        return sorted(streamed, key=lambda n: (-max(1, fetches[n]), -linears[n][0].nbytes, n))

    @staticmethod
    def _choose(
        streamed: list[int], linears: Linears, room: int | None, spare: int | None, moves: Mapping[int, Move]
    ) -> dict[int, None]:
        """What is to be pinned, the most useful first: what fits, one by one."""
        chosen: dict[int, None] = {}
        for number in streamed:
            home, nbytes = linears[number][0].home, _locked(linears[number][0].nbytes)
            is_copied = home is not None and home.borrowed
            if home is None or (is_copied and number not in moves) or (room is not None and nbytes > room):
                continue
            if is_copied and spare is not None:
                if nbytes > spare:
                    continue
                spare -= nbytes
            room = None if room is None else room - nbytes
            chosen[number] = None
        return chosen

    @staticmethod
    def _use_window(engine: Engine, nbytes: int) -> Exception | None:
        present = engine.stats()["window_bytes"]
        if (nbytes == 0) == (present == 0) and present <= max(nbytes, _PAGE):
            return None
        try:
            engine.use_window(nbytes)
        except (RuntimeError, MemoryError, ValueError) as error:
            return error
        return None

    @staticmethod
    def _pin(
        engine: Engine,
        chosen: dict[int, None],
        linears: Linears,
        moves: Mapping[int, Move],
        progress: Progress | None,
    ) -> Exception | None:
        """Pin these, in this order; the first refusal of the system."""
        total, done, refusals = sum(linears[number][0].nbytes for number in chosen), 0, 0
        first: Exception | None = None
        smallest_refused: int | None = None
        for number in chosen:
            manager = linears[number][0]
            home, nbytes = manager.home, manager.nbytes
            if home is not None and (home.pinned or smallest_refused is None or nbytes < smallest_refused):
                try:
                    with moves[number](number) if home.borrowed else nullcontext():
                        engine.pin(number)
                except (RuntimeError, MemoryError) as error:
                    first, refusals, smallest_refused = first or error, refusals + 1, nbytes
                    if refusals == REFUSALS:
                        break
            done += nbytes
            if progress is not None:
                progress(done, total, "pinning host memory")
        return first

    def _make_room_for_window(self, engine: Engine, chosen: dict[int, None], linears: Linears) -> None:
        """The system has no more to give: the least useful of what is pinned leaves its place to a window."""
        freed = 0
        for number in reversed(chosen):
            home = linears[number][0].home
            if home is None or not home.pinned:
                continue
            engine.unpin(number)
            freed += _locked(linears[number][0].nbytes)
            if self._use_window(engine, min(WINDOW_BYTES, freed)) is None:
                return

    def pin_home(self, engine: Engine, home: Home) -> None:
        """Pin a gradient's memory, where the limits and the system allow; elsewhere its copy is slower."""
        limit = self._limit(memory_limit())
        if limit is None or engine.stats()["pinned_bytes"] + home.nbytes <= limit:
            with contextlib.suppress(RuntimeError, MemoryError):
                engine.pin_home(home)

    def _warn(self, engine: Engine, reason: str) -> None:
        if self._warned:
            return
        self._warned = True
        stats = engine.stats()
        how = "through a small pinned window" if stats["window_bytes"] else "from pageable memory"
        warnings.warn(
            f"pinned host memory (not the device's) is limited to {format_bytes(stats['pinned_bytes'])}: {reason}; "
            f"{format_bytes(stats['staged_bytes'])} of weights are copied {how}: the same numbers, slower",
            stacklevel=2,
        )
