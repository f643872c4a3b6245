"""Progress of the few things that take seconds: filling homes, pinning memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[int, int, str], None]


@contextlib.contextmanager
def make_progress(progress: bool | Progress) -> Iterator[Progress]:
    """True: a bar on stderr where that is a terminal and tqdm is installed; a callable: that one; False: nothing."""
    if callable(progress):
        yield progress
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        tqdm = None
    if not progress or tqdm is None or not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    bars: dict[str, tqdm] = {}

    def report(done: int, total: int, what: str) -> None:
        if what not in bars:
            bars[what] = tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False)
        bars[what].update(done - bars[what].n)

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()
