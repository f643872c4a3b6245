"""The machine's memory, as this process may use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: A limit of a control group above this is none.
_UNLIMITED = 1 << 60


def text_of(path: str | Path) -> str:
    """A small file of the system, "" where it is not there or may not be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _control_groups() -> Iterator[tuple[Path, bool]]:
    """Folders of the control groups that this process is in, and whether they are of the second version."""
    for line in text_of("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
        group = base / path.lstrip("/")
        for place in (group, *group.parents):  # a parent's limit holds too; in a container the path may not be there
            yield place, not controllers
            if place == base:
                break


def _control_group_limits() -> Iterator[tuple[int, int | None]]:
    """(bytes that a control group allows, bytes of them that are free or can be freed; None: not known)"""
    for place, second in _control_groups():
        limit = text_of(place / ("memory.max" if second else "memory.limit_in_bytes"))
        if not limit.isdigit() or int(limit) >= _UNLIMITED:
            continue
        used = text_of(place / ("memory.current" if second else "memory.usage_in_bytes"))
        cache = 0
        for line in text_of(place / "memory.stat").splitlines():
            if line.startswith("inactive_file " if second else "total_inactive_file "):
                cache = int(line.split()[1])
        yield int(limit), max(0, int(limit) - int(used) + cache) if used.isdigit() else None


def control_group_limit() -> int | None:
    """The least memory that a control group of this process allows, in bytes; None where none does."""
    return min((limit for limit, _ in _control_group_limits()), default=None)


def host_memory() -> dict[str, int]:
    """What /proc/meminfo says, in bytes; empty on other systems."""
    known = {}
    for line in text_of("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            known[name] = int(number[0]) * 1024
    return known


def memory_limit() -> int | None:
    """Bytes of host memory that this process may use at most: the machine's, or less; None where it is not known."""
    known = [size for size in (host_memory().get("MemTotal"), control_group_limit()) if size is not None]
    return min(known, default=None)


def memory_available() -> int | None:
    """Bytes of host memory that this process can still have without swapping; None where it is not known."""
    known = [host_memory().get("MemAvailable"), *(left for _, left in _control_group_limits())]
    return min((size for size in known if size is not None), default=None)
