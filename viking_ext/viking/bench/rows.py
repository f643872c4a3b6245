"""One measured setting: what it was, how long a step took, and what it took to get there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from viking.units import format_bytes


@dataclass
class Row:
    """Times in seconds, sizes in bytes; None: not measured, or without meaning for this engine."""

    model: str
    engine: str
    setting: str = ""  # of a peer: how much it offloads; of ours: what is not the default
    budget: int | None = None  # for weights
    vram: int | None = None  # the cap, for the whole process
    weight_bytes: int | None = None  # of all candidates for streaming
    step_s: float | None = None  # median
    fastest_s: float | None = None
    slowest_s: float | None = None
    forward_s: float | None = None
    host_s: float | None = None  # until the host had queued a step
    floor_s: float | None = None  # T1
    time_ratio: float | None = None  # step / T1
    predicted_s: float | None = None  # by the planner, from the same bandwidth and compute
    sample_s: float | None = None  # a forward without gradients
    sample_ratio: float | None = None  # to its floor
    fetched: int | None = None
    bytes_ratio: float | None = None  # fetched / least possible
    written: int | None = None
    stall_s: float | None = None
    late_fetches: int | None = None  # on demand, after two steps
    identical: bool | None = None  # output and gradients, to the resident run's, bit for bit
    attach_s: float | None = None
    learning_s: float | None = None  # the first two steps
    resident: int | None = None
    streamed: int | None = None
    pinned: int | None = None
    device_in_use: int | None = None  # as the driver reports it, after the steps
    torch_peak: int | None = None  # allocated by torch
    host_memory: int | None = None  # resident set, after the steps
    link: float | None = None  # bytes per second
    copies_to_device: int | None = None  # in one step, by the profiler
    copies_to_host: int | None = None
    device_allocations: int | None = None  # in three steps
    synchronizations: int | None = None  # host waits in one step
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}

    def __str__(self) -> str:
        return "  ".join(f"{key.removesuffix('_s')}={_text(key, value)}" for key, value in self.as_dict().items())


_SIZES = {"budget", "vram", "weight_bytes", "fetched", "written", "resident", "streamed", "pinned"}
_SIZES |= {"device_in_use", "torch_peak", "host_memory"}


def _text(key: str, value: Any) -> str:
    if key.endswith("_s"):
        return f"{value * 1e3:.1f}ms"
    if key == "link":
        return f"{value / 1e9:.1f}GB/s"
    if key in _SIZES:
        return format_bytes(value).replace(" ", "")
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def table(rows: list[Row]) -> str:
    """The figures that settings are compared by, one line each."""
    head = ("model", "engine", "budget", "step ms", "x T1", "x bytes", "sample ms", "device", "host", "identical")
    lines = [head]
    for row in rows:
        size = row.vram if row.vram is not None else row.budget
        lines.append(
            (
                row.model,
                f"{row.engine} {row.setting}".strip(),
                "" if size is None else format_bytes(size),
                _number(row.step_s, 1e3, 1),
                _number(row.time_ratio, 1, 3),
                _number(row.bytes_ratio, 1, 3),
                _number(row.sample_s, 1e3, 1),
                "" if not row.device_in_use else format_bytes(row.device_in_use),
                "" if not row.host_memory else format_bytes(row.host_memory),
                row.note or ("" if row.identical is None else "yes" if row.identical else "NO"),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _number(value: float | None, scale: float, digits: int) -> str:
    return "" if value is None else f"{value * scale:.{digits}f}"
