"""Jobs that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run the jobs in threads of their own; their results, or the first exception."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = jobs[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
    return results
