"""What a plan will cost, without a GPU: bytes and milliseconds of a step, beside the least that any plan can reach.

python -m viking.plan flux2 --weights float8_e4m3fn --weights-budget 20GB
python -m viking.plan flux2 --depth 1/4 --vram 16GiB --link 25GB/s --tflops 150 --hbm 0.9TB/s --png step.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from viking import shapes, timeline
from viking.shapes import Machine, Trace, Use, Weight
from viking.units import format_bytes, parse_bytes, parse_rate

FORMAT = "viking-trace"
VERSION = 1

#: What everything but the weights takes on the device for flux2 at 512 px and rank 16: measured 3.2 to 3.6 GB, of
#: which 0.9 GB the CUDA context.
OTHER_BYTES = 3_600_000_000


# ---- recorded traces ----


def save(path: str | Path, trace: Trace) -> None:
    """Write a trace as JSON that :func:`load` and ``python -m viking.plan FILE`` read.

    ``{"format": "viking-trace", "version": 1, "name": str, "weights": [{"name", "bytes", "block"}],
    "uses": [[weight, begin, end, kind, compute_ns, phase]]}``: begin and end in ticks, kind 0 is a read, phase is "F",
    "R", "B" or "".
    """
    document = {
        "format": FORMAT,
        "version": VERSION,
        "name": trace.name,
        "weights": [{"name": each.name, "bytes": each.nbytes, "block": each.block} for each in trace.weights],
        "uses": [[use.weight, use.begin, use.end, use.kind, use.compute_ns, use.phase] for use in trace.uses],
    }
    Path(path).write_text(json.dumps(document) + "\n", encoding="utf-8")


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def load(path: str | Path) -> Trace:
    """Read what :func:`save` wrote. Raises OSError, or ValueError that says what is wrong with the file."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f'{path} is no trace of Viking: "format" is not "{FORMAT}"')
    if document.get("version") != VERSION:
        raise ValueError(f"{path} has version {document.get('version')!r} of the format; this Viking reads {VERSION}")
    try:
        weights = tuple(
            Weight(str(each["name"]), _whole(each["bytes"]), _whole(each.get("block", 0)))
            for each in document["weights"]
        )
        uses = tuple(
            Use(_whole(weight), _whole(begin), _whole(end), _whole(compute_ns), _whole(kind), str(phase))
            for weight, begin, end, kind, compute_ns, phase in document["uses"]
        )
        if any(not 0 <= use.weight < len(weights) for use in uses):
            raise ValueError("a use is of a weight that is not listed")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    trace = Trace(str(document.get("name", path)), weights, uses)
    return Trace(trace.name, weights, uses, trace.find_sweeps())


# ---- planning ----


@dataclass(frozen=True)
class Report:
    """A plan of one trace under one budget, beside its bounds. Bytes and ns are those of one steady step."""

    trace: Trace
    budget_bytes: int
    link_bytes_per_second: int
    fetched_bytes: int
    bound_bytes: int
    step_ns: int
    floor_ns: int
    compute_ns: int
    stall_ns: int
    link_ns: int
    smallest_budget_bytes: int
    ring_bytes: int
    resident_bytes: int
    slab_bytes: int
    pinned_bytes: int
    fetches: int
    planning_seconds: float
    placed: tuple[timeline.Placed, ...]
    computes: tuple[timeline.Span, ...]
    copies: tuple[timeline.Span, ...]

    @property
    def bytes_ratio(self) -> float:
        """Fetched over the least possible; 1 where nothing must be fetched and nothing is."""
        if self.bound_bytes == 0:
            return 1.0 if self.fetched_bytes == 0 else float("inf")
        return self.fetched_bytes / self.bound_bytes

    @property
    def time_ratio(self) -> float:
        """Predicted step over T1."""
        return self.step_ns / self.floor_ns if self.floor_ns else 1.0


def bounds(trace: Trace, budget_bytes: int, link_bytes_per_second: int) -> tuple[int, int]:
    """(bytes, ns) that no plan can undercut: each sweep of the trace moves what does not fit, and takes as long as
    that or its compute does, whichever is longer (T1)."""
    missing = max(0, sum(trace.weights[index].nbytes for index in {use.weight for use in trace.uses}) - budget_bytes)
    travel = missing / link_bytes_per_second * 1e9
    ends = [*trace.sweeps[1:], len(trace.uses)]
    floor = 0.0
    for begin, end in zip(trace.sweeps, ends, strict=True):
        floor += max(travel, sum(use.compute_ns for use in trace.uses[begin:end]))
    return missing * len(trace.sweeps), round(floor)


def report(trace: Trace, budget_bytes: int, link_bytes_per_second: int = 55_000_000_000) -> Report:
    """Plan a trace under a budget. Raises ValueError, naming the smallest budget that works, where it does not fit."""
    from viking import _engine

    planned: dict[str, Any] = _engine.plan(
        [weight.nbytes for weight in trace.weights],
        [(use.weight, use.begin, use.end, use.kind, use.compute_ns) for use in trace.uses],
        budget_bytes,
        link_bytes_per_second,
    )
    bound, floor = bounds(trace, budget_bytes, link_bytes_per_second)
    placed = tuple(
        timeline.Placed(weight.name, offset, weight.nbytes, resident, weight.block)
        for weight, offset, resident in zip(trace.weights, planned["offsets"], planned["resident"], strict=True)
    )
    return Report(
        trace=trace,
        budget_bytes=budget_bytes,
        link_bytes_per_second=link_bytes_per_second,
        fetched_bytes=planned["fetched_bytes"],
        bound_bytes=bound,
        step_ns=planned["period_ns"],
        floor_ns=floor,
        compute_ns=planned["compute_ns"],
        stall_ns=planned["stall_ns"],
        link_ns=planned["link_ns"],
        smallest_budget_bytes=planned["smallest_budget"],
        ring_bytes=planned["ring_bytes"],
        resident_bytes=planned["resident_bytes"],
        slab_bytes=planned["slab_bytes"],
        pinned_bytes=sum(weight.nbytes for weight in placed if not weight.resident),
        fetches=len(planned["fetches"]),
        planning_seconds=planned["planning_seconds"],
        placed=placed,
        computes=tuple(
            timeline.Span(begin, end, weight, trace.uses[use].phase) for begin, end, weight, use in planned["computes"]
        ),
        copies=tuple(timeline.Span(begin, end, weight) for begin, end, weight, _ in planned["copies"]),
    )


# ---- output ----


def as_json(result: Report, assumptions: Sequence[str] = ()) -> dict[str, Any]:
    """The report as plain data: all numbers, the addresses and the spans."""
    apart = {"trace", "placed", "computes", "copies"}
    numbers = {each.name: getattr(result, each.name) for each in fields(result) if each.name not in apart}
    numbers |= {"bytes_ratio": result.bytes_ratio, "time_ratio": result.time_ratio}
    if result.bytes_ratio == float("inf"):
        numbers["bytes_ratio"] = None
    return {
        "trace": result.trace.name,
        "total_bytes": result.trace.total_bytes,
        "uses": len(result.trace.uses),
        **numbers,
        "assumptions": list(assumptions),
        "weights": [each._asdict() for each in result.placed],
        "computes": [each._asdict() for each in result.computes],
        "copies": [each._asdict() for each in result.copies],
    }


def as_text(result: Report, assumptions: Sequence[str] = ()) -> str:
    """The report as a person wants it, with the step's timeline below."""
    trace = result.trace
    residents = sum(weight.resident for weight in result.placed)
    ms = 1e-6
    lines = [
        f"{trace.name}: {len(trace.weights)} weights, {format_bytes(trace.total_bytes)}, {len(trace.uses)} uses a step",
        *(f"assumed      {sentence}" for sentence in assumptions),
        f"budget       {format_bytes(result.budget_bytes)} for weights; the smallest that works is "
        f"{format_bytes(result.smallest_budget_bytes)}, with {format_bytes(trace.total_bytes)} nothing travels",
        "",
        f"fetched      {format_bytes(result.fetched_bytes)} a step in {result.fetches} copies, "
        + (
            f"{result.bytes_ratio:.3f} x the least possible ({format_bytes(result.bound_bytes)})"
            if result.bound_bytes
            else "nothing has to travel"
        ),
        f"step         {result.step_ns * ms:.1f} ms predicted, {result.time_ratio:.3f} x T1 "
        f"({result.floor_ns * ms:.1f} ms, which no plan can undercut)",
        f"             {result.compute_ns * ms:.1f} ms compute, {result.stall_ns * ms:.1f} ms waiting; "
        f"the link is busy {100 * result.link_ns / max(1, result.step_ns):.0f} % of the step",
        f"slab         {format_bytes(result.slab_bytes)}: "
        + (
            f"{format_bytes(result.resident_bytes)} for {residents} residents, a ring of "
            f"{format_bytes(result.ring_bytes)} for the other {len(trace.weights) - residents}"
            if residents < len(trace.weights)
            else "everything is resident"
        ),
        f"host memory  {format_bytes(result.pinned_bytes)} pinned for what travels, "
        f"{format_bytes(result.resident_bytes)} may stay pageable",
        f"planned in   {1000 * result.planning_seconds:.0f} ms, and found sound by the checker",
        "",
        timeline.text(result.placed, result.computes, result.copies, result.step_ns),
    ]
    return "\n".join(lines)


# ---- command ----


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m viking.plan", description="Plan one step under a budget and print what it will cost."
    )
    parser.add_argument("what", help=f"a shape ({', '.join(shapes.names())}) or a file with a recorded trace")
    parser.add_argument("--mode", choices=shapes.MODES, help="of a shape: kind of step (default checkpointed)")
    parser.add_argument("--rank", type=int, help="of a shape: rank of the LoRA, which stays resident (default 16)")
    parser.add_argument("--depth", help="of a shape: share of its blocks, such as 1/4 (default 1)")
    parser.add_argument("--weights", choices=list(shapes.ELEMENT_BYTES), help="of a shape: type (default bfloat16)")
    parser.add_argument("--tflops", type=float, help="of a shape: sustained TFLOP/s (default 600)")
    parser.add_argument("--hbm", help="of a shape: rate of the device's memory (default 3.87TB/s)")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--weights-budget", help="device memory for weights, such as 18GB (0: the smallest that works)")
    budget.add_argument("--vram", help="device memory for everything, such as 24GiB")
    parser.add_argument("--link", default="55GB/s", help="rate from host to device (default 55GB/s)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--png", metavar="FILE", help="draw the step (needs matplotlib)")
    return parser


def _trace(options: argparse.Namespace, assumptions: list[str]) -> Trace:
    """The trace that the command line names."""
    of_shapes = ("mode", "rank", "depth", "weights", "tflops", "hbm")
    if options.what not in shapes.names():
        given = [name for name in of_shapes if getattr(options, name) is not None]
        if not Path(options.what).exists():
            raise ValueError(f"{options.what!r} is neither a shape ({', '.join(shapes.names())}) nor a file")
        if given:
            raise ValueError(f"--{given[0]} is for shapes; the trace in {options.what} has its own")
        return load(options.what)
    try:
        depth = Fraction("1" if options.depth is None else options.depth)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--depth: {options.depth!r} cannot be read; accepted is a fraction such as 1/4") from None
    tflops = 600.0 if options.tflops is None else options.tflops
    if not 0 < tflops < 1e6:
        raise ValueError(f"--tflops: {tflops:g} is not above 0 and below a million")
    hbm = parse_rate("3.87TB/s" if options.hbm is None else options.hbm, "--hbm")
    assumptions.append(
        f"{tflops:g} TFLOP/s sustained"
        + (f", dequantising at {format_bytes(hbm)}/s" if options.weights not in (None, "bfloat16") else "")
    )
    return shapes.get(options.what, depth).trace(
        options.mode or "checkpointed",
        weights=options.weights or "bfloat16",
        rank=16 if options.rank is None else options.rank,
        machine=Machine(tflops * 1e12, float(hbm)),
    )


def _budget(options: argparse.Namespace, trace: Trace, assumptions: list[str]) -> int:
    """The bytes that weights may take."""
    if options.vram is not None:
        vram = parse_bytes(options.vram, "--vram")
        if vram <= OTHER_BYTES:
            raise ValueError(f"--vram: of {options.vram}, all but weights takes {format_bytes(OTHER_BYTES)} already")
        assumptions.append(
            f"{format_bytes(OTHER_BYTES)} of {options.vram} for all but weights (activations, LoRA, CUDA context, as "
            "measured for flux2 at rank 16)"
        )
        return vram - OTHER_BYTES
    if options.weights_budget is None:
        assumptions.append("half of the weights fit; --weights-budget or --vram says what does")
        return trace.total_bytes // 2
    budget = parse_bytes(options.weights_budget, "--weights-budget")
    return budget or report(trace, trace.total_bytes).smallest_budget_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 0: done; 1: something is missing or cannot be written; 2: the arguments make no sense."""
    options = _parser().parse_args(arguments)
    try:
        link = parse_rate(options.link, "--link")
        assumptions = [f"a link of {format_bytes(link)}/s"]
        trace = _trace(options, assumptions)
        result = report(trace, _budget(options, trace, assumptions), link)
    except (ValueError, OSError) as error:
        print(f"viking.plan: {error}", file=sys.stderr)
        return 2
    if options.png:
        title = f"{trace.name}: {format_bytes(trace.total_bytes)} of weights in {format_bytes(result.slab_bytes)}"
        try:
            timeline.draw(options.png, result.placed, result.computes, result.copies, result.step_ns, title=title)
        except (RuntimeError, OSError, ValueError) as error:
            print(f"viking.plan: {error}", file=sys.stderr)
            return 1
    print(json.dumps(as_json(result, assumptions)) if options.json else as_text(result, assumptions))
    if options.png and not options.json:
        print(f"\n{options.png} shows the same step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
