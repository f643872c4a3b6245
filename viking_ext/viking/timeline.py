"""One step drawn over time: what computes, what is on the link, what is in the slab. As text, and as a picture.

The drawings take plain data, so a planned, a simulated and a recorded step look alike. matplotlib is imported only
where a picture is drawn.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from viking.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Phases of a training step, in the order in which a picture stacks them. A phase "" is drawn as "use".
PHASES = {"F": "forward", "R": "recompute", "B": "backward", "": "use"}


class Placed(NamedTuple):
    """A weight and its bytes in the slab, [offset, offset + nbytes); ``block`` gives the colour."""

    name: str
    offset: int
    nbytes: int
    resident: bool
    block: int = 0


class Span(NamedTuple):
    """[begin_ns, end_ns] of the step, in which a weight computes or travels."""

    begin_ns: float
    end_ns: float
    weight: int
    phase: str = ""


# ---- contents of the ring ----


def stays(
    weights: Sequence[Placed], copies: Sequence[Span], period_ns: float, *, periodic: bool = True
) -> list[tuple[int, float, float, float]]:
    """(weight, begin, arrived, end) in ns of every stay of a streamed weight's bytes in the slab, by begin.

    A stay begins with its copy and ends where the copy of a weight that shares bytes with it begins. ``periodic``: what
    the step before left behind is there at the start, so begin and arrived may be negative.
    """
    starts = [(copy.begin_ns, copy.end_ns, copy.weight) for copy in copies]
    if periodic:
        starts = [(begin - period_ns, end - period_ns, weight) for begin, end, weight in starts] + starts
    starts.sort()
    found = []
    for index, (begin, arrived, weight) in enumerate(starts):
        low, high = weights[weight].offset, weights[weight].offset + weights[weight].nbytes
        end = period_ns
        for later, _, other in starts[index + 1 :]:
            if other == weight or (
                weights[other].offset < high and low < weights[other].offset + weights[other].nbytes
            ):
                end = later
                break
        if end > 0:
            found.append((weight, begin, arrived, min(end, period_ns)))
    if periodic:
        travelling = {copy.weight for copy in copies}
        kept = (index for index, weight in enumerate(weights) if not weight.resident and index not in travelling)
        found = [(index, -period_ns, -period_ns, period_ns) for index in kept] + found
    return found


# ---- text ----


def _columns(spans: Sequence[Span], period_ns: float, columns: int) -> list[dict[str, float]]:
    """For each column, the share of its time that each phase takes."""
    width = period_ns / columns
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        first = max(0, int(span.begin_ns / width))
        for column in range(first, min(columns, int(span.end_ns / width) + 1)):
            common = min(span.end_ns, (column + 1) * width) - max(span.begin_ns, column * width)
            if common > 0:
                shares[column][span.phase] = shares[column].get(span.phase, 0.0) + common / width
    return shares


def _level(share: float) -> str:
    return "#" if share > 0.95 else "=" if share > 0.5 else "-" if share > 0.05 else " "


def _slab_rows(
    weights: Sequence[Placed], copies: Sequence[Span], period_ns: float, columns: int, rows: int, periodic: bool
) -> Iterator[tuple[str, str]]:
    """One row for each group of blocks: how much of the group is on the device, residents included."""
    blocks = sorted({weight.block for weight in weights})
    size = -(-len(blocks) // rows)
    groups = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    group_of = {block: index for index, group in enumerate(groups) for block in group}
    totals, present = [0.0] * len(groups), [[0.0] * columns for _ in groups]
    for weight in weights:
        totals[group_of[weight.block]] += weight.nbytes
        if weight.resident:
            present[group_of[weight.block]] = [value + weight.nbytes for value in present[group_of[weight.block]]]
    for index, _, arrived, end in stays(weights, copies, period_ns, periodic=periodic):
        group = group_of[weights[index].block]
        for column in range(columns):
            if arrived <= (column + 0.5) * period_ns / columns < end:
                present[group][column] += weights[index].nbytes
    for group, blocks_of_group in enumerate(groups):
        first, last = blocks_of_group[0], blocks_of_group[-1]
        label = f"{first}" if first == last else f"{first}-{last}"
        row = "".join(_level(value / totals[group]) if totals[group] else " " for value in present[group])
        yield label, row


def text(
    weights: Sequence[Placed],
    computes: Sequence[Span],
    copies: Sequence[Span],
    period_ns: float,
    *,
    columns: int = 100,
    rows: int = 8,
    periodic: bool = True,
) -> str:
    """The step as lines of ``columns`` characters: compute (F, R, B, "." for waiting), link, slab by blocks."""
    if period_ns <= 0:
        return "nothing takes any time"
    compute = ""
    for shares in _columns(computes, period_ns, columns):
        busy = sum(shares.values())
        compute += max(shares, key=lambda phase: shares[phase]) or "#" if busy > 0.5 else "."
    link = "".join(_level(sum(shares.values())) for shares in _columns(copies, period_ns, columns))
    end = f"{period_ns / 1e6:.1f} ms"
    lines = [
        f"{'':12}0{end.rjust(columns - 1)}",
        f"{'compute':12}{compute}",
        f"{'link':12}{link}",
    ]
    for label, row in _slab_rows(weights, copies, period_ns, columns, rows, periodic):
        lines.append(f"{'block ' + label:12}{row}")
    lines += [
        "",
        f"{'':12}compute: F forward, R recompute, B backward, . waits; link and blocks (bytes on the device):",
        f"{'':12}# all, = most, - some, blank none",
    ]
    return "\n".join(line.rstrip() for line in lines)


# ---- picture ----

_INK = "#1f2933"
_FAINT = "#8a94a0"
_STALL = "#d64545"


def _need_matplotlib() -> None:
    """One sentence where there is none. pyplot is left alone: a picture changes nothing in the caller's session."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("drawing needs matplotlib, which is not installed: pip install 'viking-engine[demo]'")


def _style(axes: Axes, ylabel: str) -> None:
    axes.set_ylabel(ylabel, color=_INK, fontsize=9)
    axes.tick_params(colors=_INK, labelsize=8.5, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)


def _draw_ring(
    axes: Axes,
    weights: Sequence[Placed],
    colours: dict[int, Any],
    computes: Sequence[Span],
    copies: Sequence[Span],
    period_ns: float,
    periodic: bool,
) -> None:
    """Address over time; in flight pale, there full, in use with a dark core."""
    from matplotlib.collections import PolyCollection

    def box(begin: float, end: float, weight: Placed, inset: float = 0.0) -> list[tuple[float, float]]:
        low, high = (weight.offset + inset * weight.nbytes) / 1e9, (weight.offset + (1 - inset) * weight.nbytes) / 1e9
        left, right = max(0.0, begin) / 1e6, min(period_ns, end) / 1e6
        return [(left, low), (left, high), (right, high), (right, low)]

    there, there_colours, flying, flying_colours = [], [], [], []
    for index, begin, arrived, end in stays(weights, copies, period_ns, periodic=periodic):
        weight = weights[index]
        if min(arrived, end) > 0:
            flying.append(box(begin, min(arrived, end), weight))
            flying_colours.append(colours[weight.block])
        if arrived < end:
            there.append(box(arrived, end, weight))
            there_colours.append(colours[weight.block])
    axes.add_collection(PolyCollection(flying, facecolors=flying_colours, alpha=0.28, linewidths=0))
    axes.add_collection(PolyCollection(there, facecolors=there_colours, alpha=0.9, edgecolors="white", linewidths=0.25))
    used = [
        box(span.begin_ns, span.end_ns, weights[span.weight], 0.12)
        for span in computes
        if not weights[span.weight].resident
    ]
    axes.add_collection(PolyCollection(used, facecolors=_INK, alpha=0.85, linewidths=0))


def _draw_residents(
    axes: Axes, weights: Sequence[Placed], colours: dict[int, Any], computes: Sequence[Span], period_ns: float
) -> None:
    """Their range, pale over the whole step, with a dark mark wherever one is in use."""
    from matplotlib.collections import PolyCollection

    boxes, faces = [], []
    for weight in weights:
        if weight.resident:
            low, high = weight.offset / 1e9, (weight.offset + weight.nbytes) / 1e9
            boxes.append([(0, low), (0, high), (period_ns / 1e6, high), (period_ns / 1e6, low)])
            faces.append(colours[weight.block])
    axes.add_collection(PolyCollection(boxes, facecolors=faces, alpha=0.3, linewidths=0))
    marks = []
    for span in computes:
        weight = weights[span.weight]
        if weight.resident:
            low, high = weight.offset / 1e9, (weight.offset + weight.nbytes) / 1e9
            left, right = span.begin_ns / 1e6, span.end_ns / 1e6
            marks.append([(left, low), (left, high), (right, high), (right, low)])
    axes.add_collection(PolyCollection(marks, facecolors=_INK, alpha=0.85, linewidths=0.4, edgecolors=_INK))


def _bars(axes: Axes, spans: Sequence[tuple[float, float]], row: float, height: float, colours: Any) -> None:
    axes.broken_barh(
        [(begin / 1e6, (end - begin) / 1e6) for begin, end in spans], (row, height), facecolors=colours, linewidth=0
    )


def _draw_link(
    axes: Axes, weights: Sequence[Placed], colours: dict[int, Any], copies: Sequence[Span], period_ns: float
) -> None:
    _bars(axes, [copy[:2] for copy in copies], 0.0, 1.0, [colours[weights[copy.weight].block] for copy in copies])
    busy = sum(copy.end_ns - copy.begin_ns for copy in copies)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_title(
        f"on the link: busy {100 * busy / period_ns:.0f} % of the step", loc="left", fontsize=9.5, color=_INK
    )


def _draw_compute(
    axes: Axes, weights: Sequence[Placed], colours: dict[int, Any], computes: Sequence[Span], period_ns: float
) -> None:
    """A lane per phase, the first on top, and one below for the time in which nothing computes."""
    phases = [phase for phase in PHASES if any(span.phase == phase for span in computes)]
    for row, phase in enumerate(reversed(phases), start=1):
        own = [span for span in computes if span.phase == phase]
        _bars(axes, [span[:2] for span in own], row + 0.1, 0.8, [colours[weights[span.weight].block] for span in own])
    waits, now = [], 0.0
    for span in sorted(computes):
        if span.begin_ns > now + 1000:
            waits.append((now, span.begin_ns))
        now = max(now, span.end_ns)
    if period_ns > now + 1000:
        waits.append((now, period_ns))
    _bars(axes, waits, 0.1, 0.8, _STALL)
    axes.set_ylim(0, len(phases) + 1)
    axes.set_yticks([0.5 + row for row in range(len(phases) + 1)])
    axes.set_yticklabels(["waits", *(PHASES[phase] for phase in reversed(phases))])
    waited = sum(end - begin for begin, end in waits)
    axes.set_title(
        f"what computes: {(period_ns - waited) / 1e6:.0f} ms, waiting {waited / 1e6:.0f} ms",
        loc="left",
        fontsize=9.5,
        color=_INK,
    )


def figure(
    weights: Sequence[Placed],
    computes: Sequence[Span],
    copies: Sequence[Span],
    period_ns: float,
    *,
    title: str = "",
    periodic: bool = True,
) -> Figure:
    """The step as a matplotlib figure of three panels over one time axis in ms: slab, link, compute.

    Raises RuntimeError, naming the extra to install, without matplotlib.
    """
    _need_matplotlib()
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure

    blocks = sorted({weight.block for weight in weights})
    # Turbo without its ends, which are too dark to tell from the marks of use.
    ramp = ListedColormap([colormaps["turbo"](0.07 + 0.86 * step / 255) for step in range(256)])
    place = {block: index / max(1, len(blocks) - 1) for index, block in enumerate(blocks)}
    colours = {block: ramp(place[block]) for block in blocks}
    streamed = [weight for weight in weights if not weight.resident]
    residents = [weight for weight in weights if weight.resident]
    ring_end = max((weight.offset + weight.nbytes for weight in streamed), default=0) / 1e9
    if residents:  # they are behind the ring, whose last bytes may be unused
        ring_end = max(ring_end, min(weight.offset for weight in residents) / 1e9)

    rows: list[tuple[str, float]] = []
    if residents:
        rows.append(("residents", 1.5 if streamed else 4.0))
    if streamed:
        rows.append(("ring", 4.0))
    rows += [("link", 0.7), ("compute", 1.6)]
    drawn = Figure(figsize=(11.5, 8.0), layout="constrained")
    grid = drawn.subplots(
        len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [height for _, height in rows]}
    )
    panels: dict[str, Axes] = {name: grid[index][0] for index, (name, _) in enumerate(rows)}
    if residents:
        low = min(weight.offset for weight in residents) / 1e9
        high = max(weight.offset + weight.nbytes for weight in residents) / 1e9
        axes = panels["residents"]
        _draw_residents(axes, weights, colours, computes, period_ns)
        axes.set_ylim(low, high)
        _style(axes, "address, GB")
        axes.set_title(
            f"in the slab, residents: {format_bytes(sum(weight.nbytes for weight in residents))} in "
            f"{len(residents)} weights stay for ever (dark: in use)",
            loc="left",
            fontsize=9.5,
            color=_INK,
        )
    if streamed:
        axes = panels["ring"]
        _draw_ring(axes, weights, colours, computes, copies, period_ns, periodic)
        axes.set_ylim(0, ring_end)
        _style(axes, "address, GB")
        axes.set_title(
            f"in the slab, ring: {format_bytes(sum(weight.nbytes for weight in streamed))} in {len(streamed)} weights "
            f"share {format_bytes(ring_end * 1e9)} (pale: arriving, dark: in use)",
            loc="left",
            fontsize=9.5,
            color=_INK,
        )
    _style(panels["link"], "")
    _draw_link(panels["link"], weights, colours, copies, period_ns)
    _style(panels["compute"], "")
    _draw_compute(panels["compute"], weights, colours, computes, period_ns)
    panels["compute"].set_xlim(0, period_ns / 1e6)
    panels["compute"].set_xlabel("ms of one step", color=_INK, fontsize=9)
    scale = ScalarMappable(Normalize(blocks[0] if blocks else 0, blocks[-1] if blocks else 1), ramp)
    bar = drawn.colorbar(scale, ax=list(panels.values()), pad=0.01, aspect=45, fraction=0.03)
    bar.set_label("block", color=_INK, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=_INK, labelsize=8.5, length=3)
    if title:
        drawn.suptitle(title, x=0.01, ha="left", fontsize=12, color=_INK, fontweight="bold")
    return drawn


def draw(
    path: str | Path,
    weights: Sequence[Placed],
    computes: Sequence[Span],
    copies: Sequence[Span],
    period_ns: float,
    *,
    title: str = "",
    periodic: bool = True,
) -> None:
    """Write :func:`figure` to ``path``; the ending chooses the format.

    Raises RuntimeError without matplotlib, OSError where the file cannot be written, ValueError for a format that
    matplotlib does not know.
    """
    drawn = figure(weights, computes, copies, period_ns, title=title, periodic=periodic)
    drawn.savefig(path, dpi=150, facecolor="white")
