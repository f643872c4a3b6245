"""The command line of `python -m viking.bench`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for --verify: cuBLAS picks by it what is deterministic
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch

from viking import bench as described
from viking.bench import memory, models, overhead, peers
from viking.bench.engines import Bench, Reference, run_peer, run_resident, run_viking
from viking.bench.measure import Floor
from viking.bench.models.weights import FLOATS, Weights
from viking.bench.rows import Row, table
from viking.machine import memory_available
from viking.nn.device import resolve_device
from viking.quant.formats import FORMATS
from viking.units import format_bytes, parse_bytes, parse_rate

#: What a step needs beside the weights, for the question whether a resident run fits.
BESIDE_WEIGHTS = 6_000_000_000
#: What the process needs of host memory beside the weights.
HOST_BESIDE_WEIGHTS = 2_000_000_000
QUICK = {"flux1": Fraction(1, 6), "flux2": Fraction(1, 8), "sdxl": Fraction(1, 2), "wan14b": Fraction(1, 10)}
OURS = ("viking", "resident")
QUICK_SHARE = 4  # of the weights, one in so many fits


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m viking.bench",
        description=described.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=[*models.names(), "all", "overhead"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--depth", type=Fraction, help="fraction of the blocks, such as 1/4 (default 1)")
    parser.add_argument("--width", type=int, help="hidden size, instead of the model's own")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA on every linear (default 16)")
    parser.add_argument("--weights", choices=[*FLOATS, *FORMATS], default="bfloat16", help="form of what is frozen")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--vram", nargs="+", default=[], metavar="SIZE", help="caps for the whole process, in turn")
    sizes.add_argument("--weights-budget", nargs="+", default=[], metavar="SIZE", help="for the weights alone, in turn")
    parser.add_argument("--link", metavar="RATE", help="pace Viking's copies to a slower card's link, such as 25GB/s")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME",
        help="viking (default), resident, ai-toolkit:PATH[@SHARE], musubi:PATH[@SHARE,RING]; may be repeated",
    )
    parser.add_argument("--steps", type=int, default=6, help="that are timed (default 6)")
    parser.add_argument("--quick", action="store_true", help="of all: a few blocks, three steps")
    parser.add_argument("--verify", action="store_true", help="compare output and gradients with the resident run")
    parser.add_argument("--fuse-lora", action="store_true", help="viking.fuse_lora for viking and resident")
    parser.add_argument("--json", metavar="FILE")
    return parser


def _peers(options: argparse.Namespace) -> list[peers.Peer]:
    named = [engine.partition(":") for engine in options.engine if engine not in OURS]
    return [peers.load(name, *path.partition("@")[::2]) for name, _, path in named]


def _bench(model: models.Model, options: argparse.Namespace, device: torch.device, steps: int) -> Bench:
    x = model.make_input(options.weights.computes_in, device)
    return Bench(model, options.rank, options.weights, device, steps, x, options.fuse_lora, options.link)


def _resident_depth(model: models.Model, options: argparse.Namespace, device: torch.device) -> Fraction:
    """The largest depth, halved as often as it takes, at which everything fits on the device."""
    free, depth = memory.device_free(device), model.depth
    element = options.weights.bytes_per_element
    while free is not None and depth > Fraction(1, 64):
        shape = models.Model(model.name, depth, model.width).shape
        if shape.parameters * element + BESIDE_WEIGHTS < free:
            break
        depth /= 2
    return depth


def _reference(whole: Bench, options: argparse.Namespace) -> Reference:
    """At full depth where that fits; else at a smaller one, whose results serve there and whose times are scaled."""
    depth = _resident_depth(whole.model, options, whole.device)
    if depth == whole.model.depth:
        return run_resident(whole, options.verify)
    part = models.Model(whole.model.name, depth, whole.model.width)
    small = _bench(part, options, whole.device, whole.steps)
    found = run_resident(small, options.verify)
    found.row.note = "everything resident does not fit: times of T1 are scaled from this depth"
    if options.verify:
        budget = (found.row.weight_bytes or 0) // 2
        with small.model_on_host() as ready:
            print(run_viking(small, found, ready, budget=budget), flush=True)
    scale = whole.model.shape.parameters / part.shape.parameters
    floor = found.floor
    nbytes = round(floor.candidate_bytes * scale)
    scaled = Floor(nbytes, floor.bandwidth, *(t * scale for t in (floor.forward, floor.backward, floor.sample)))
    return Reference(scaled, None, found.row, found.beside_weights)


def _refuse_what_does_not_fit(model: models.Model, options: argparse.Namespace, device: torch.device) -> None:
    """ValueError where host memory cannot hold the weights, which would end the process or the machine's patience."""
    need = model.shape.parameters * options.weights.bytes_per_element
    free = memory_available()
    on_host = device.type == "cpu" or options.engine != ["resident"]
    if on_host and free is not None and need + HOST_BESIDE_WEIGHTS > free:
        raise ValueError(
            f"{model.title} in {options.weights.name} takes {format_bytes(need)} of host memory and "
            f"{format_bytes(free)} are free: measure a part of it, such as --depth 1/16"
        )


def _measure(model: models.Model, options: argparse.Namespace, steps: int, budgets: list[int]) -> Iterator[Row]:
    device = resolve_device(options.device)
    _refuse_what_does_not_fit(model, options, device)
    whole = _bench(model, options, device, steps)
    engines = options.engine or ["viking"]
    others = _peers(options)
    reference = _reference(whole, options)
    yield reference.row
    caps = [parse_bytes(text, "--vram") for text in options.vram]
    if "viking" in engines:
        yield from _ours(whole, reference, options, caps, budgets)
    for peer in others:
        for cap in caps or (None,):
            yield run_peer(whole, reference, peer, cap)


def _ours(
    whole: Bench, reference: Reference, options: argparse.Namespace, caps: list[int], budgets: list[int]
) -> Iterator[Row]:
    budgets = [parse_bytes(text, "--weights-budget") for text in options.weights_budget] + budgets
    with whole.model_on_host() as model:
        for vram in caps:
            yield run_viking(whole, reference, model, vram=vram, deep=True)
        for budget in budgets:
            yield run_viking(whole, reference, model, budget=budget, deep=True)


def _model(options: argparse.Namespace) -> models.Model:
    return models.Model(options.what, Fraction(1) if options.depth is None else options.depth, options.width)


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    if options.what != "all":
        yield from _measure(_model(options), options, options.steps, [])
        return
    for name in models.names():
        depth = options.depth or (QUICK[name] if options.quick else Fraction(1))
        model = models.Model(name, depth, options.width)
        share = model.shape.parameters * options.weights.bytes_per_element // QUICK_SHARE
        fixed = options.vram or options.weights_budget
        yield from _measure(model, options, 3 if options.quick else options.steps, [] if fixed else [share])


def _check(options: argparse.Namespace) -> None:
    if options.steps < 1 or options.rank < 1:
        raise ValueError("--steps and --rank are at least 1")
    if options.what not in ("all", "overhead"):
        _ = _model(options).size
    resolve_device(options.device)
    options.link = None if options.link is None else parse_rate(options.link, "--link")
    others = [engine.partition(":")[0] for engine in options.engine if engine not in OURS]
    if options.link is not None and others:
        raise ValueError(f"--link paces Viking's copies alone: leave out --link or --engine {', '.join(others)}")
    for name in ("vram", "weights_budget"):
        for text in getattr(options, name):
            parse_bytes(text, "--" + name.replace("_", "-"))


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 1 where results differ from the resident run's, 2 for what cannot be run."""
    options = _parser().parse_args(arguments)
    options.weights = Weights(options.weights)
    try:
        _check(options)
        found: list[Any] = []
        models.avoid_cudnn_attention()
        if options.what == "overhead":
            found = list(overhead.measure(resolve_device(options.device), _peers(options), passes=options.steps))
            print("\n".join(str(each) for each in found))
        else:
            for row in _rows(options):
                print(row, flush=True)
                found.append(row)
            print("\n" + table(found))
    except (ValueError, ImportError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        print(f"viking.bench: {error}", file=sys.stderr)
        return 2
    print(f"peak host memory {format_bytes(memory.host_peak())}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([vars(row) for row in found], file, indent=1)
    return 1 if any(getattr(row, "identical", None) is False and row.engine == "viking" for row in found) else 0
