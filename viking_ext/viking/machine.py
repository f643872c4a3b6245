"""The machine's memory, as this process may use it."""

from __future__ import annotations

from pathlib import Path

#: A limit of a control group above this is none.
_UNLIMITED = 1 << 60


def text_of(path: str | Path) -> str:
    """A small file of the system, "" where it is not there or may not be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def control_group_limit() -> int | None:
    """The least memory that a control group of this process allows, in bytes; None where none does."""
    limits = []
    for line in text_of("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            base, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for place in (group, *group.parents):  # a parent's limit holds too; in a container the path may not be there
            text = text_of(place / name)
            if text.isdigit() and int(text) < _UNLIMITED:
                limits.append(int(text))
            if place == base:
                break
    return min(limits, default=None)


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
