"""Which homes are pinned: what is streamed, as far as the user and the system allow."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from viking.nn.progress import Progress
from viking.units import format_bytes

if TYPE_CHECKING:
    from viking._engine import Engine, LinearLayerMemoryManager


class Pinning:
    """The pinned host memory of one device's engine. `limit`: bytes that the user allows, None for no limit."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self._warned = False

    def apply(
        self, engine: Engine, linears: dict[int, list[LinearLayerMemoryManager]], progress: Progress | None
    ) -> None:
        """Pin what is streamed and unpin what is resident. What the system refuses is streamed from pageable memory."""
        sizes = {w: together[0].nbytes for w, together in linears.items()}
        total, done, pinned = sum(sizes.values()), 0, 0
        for weight, nbytes in sizes.items():
            path = linears[weight][0].path
            if self.limit is not None and path != "resident" and pinned + nbytes > self.limit:
                engine.unpin(weight)
            else:
                try:
                    engine.pin(weight)
                    pinned += nbytes if path != "resident" else 0
                except (RuntimeError, MemoryError) as error:
                    self._warn(error, pinned)
                    return
            done += nbytes
            if progress is not None:
                progress(done, total, "pinning host memory")

    def _warn(self, error: Exception, pinned: int) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"host memory could be pinned for {format_bytes(pinned)} of weights only ({error}); the rest streams from "
            "pageable memory: the same numbers, slower",
            stacklevel=2,
        )
