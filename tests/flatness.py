"""A long training with changing input sizes and sampling in between: what the process holds after each hundred steps.

    python tests/flatness.py [--steps 500] [--device cuda] [--compile]

Device memory, events, streams, pinned ranges, threads and Python objects, which must not grow at all, and the process's
memory, which may by the allocator's grain. The last line is FLAT or GROWS, and so is the exit status, 0 or 1.
PYTORCH_CUDA_ALLOC_CONF in the environment chooses the allocator: expandable_segments:True, backend:cudaMallocAsync.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

import viking
from viking.nn.device import DeviceEngine

sys.path.insert(0, str(Path(__file__).parent))

from support.models import build

SIZES = [(1 + i % 3, 16 + 37 * i % 97) for i in range(33)]  # (batch, length)


@dataclass
class Held:
    """What the process holds at one moment."""

    rss_bytes: int
    reserved_bytes: int  # by torch's allocator
    allocated_bytes: int
    driver_bytes: int  # of the card, in use by anybody
    streams: int  # these four are the engine's
    events: int
    pins: int
    paths: int
    threads: int
    objects: int  # that Python's garbage collector knows


#: By which a number may grow over all readings; 0 for the others. Device memory: by what its driver grants at once.
ALLOWED = {"rss_bytes": 4 << 20, "driver_bytes": 2 << 20, "objects": 100}
#: Each block of this size is a mapping of its own, given back when it is freed: else the C library's moods look like
#: growth. It reads this when a process starts.
EXACT_ALLOCATOR = ("MALLOC_MMAP_THRESHOLD_", str(64 << 10))


def held(device: torch.device) -> Held:
    gc.collect()
    reserved = allocated = driver = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        free, total = torch.cuda.mem_get_info()
        driver = total - free
    numbers = DeviceEngine.of(device).engine.stats()
    process = psutil.Process()
    return Held(
        process.memory_info().rss, reserved, allocated, driver, numbers["streams"], numbers["events"], numbers["pins"],
        numbers["paths"], process.num_threads(), len(gc.get_objects()),
    )  # fmt: skip


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, hidden: int, device: torch.device
) -> None:
    batch, length = SIZES[step % len(SIZES)]
    x = torch.full((batch, length, hidden), 0.1 + step % 7, device=device)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 11 == 10:  # a sample, of another size; of the same few ones every time round
        with torch.inference_mode():
            for _ in range(3):
                model(x[:1, : length // 2])


def grown(readings: list[Held]) -> list[str]:
    """The names of what grew: the least of the last two readings is above both of the first ones."""
    names = []
    for name in asdict(readings[0]):
        values = [asdict(reading)[name] for reading in readings]
        if min(values[-2:]) - max(values[:2]) > ALLOWED.get(name, 0):
            names.append(name)
    return names


def run(steps: int, device: torch.device, hidden: int, compiled: bool = False, each: int = 100) -> list[Held]:
    """The readings: one before, one after each `each` steps."""
    torch.manual_seed(0)
    model, trained = build(hidden=hidden, depth=3, checkpointing="early stop")
    if compiled:
        model.blocks[0].compile()
    viking.attach(model, device, weights_budget=0, progress=False)
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    warm = 2 * len(SIZES)
    for step in range(warm):
        training_step(model, optimizer, step, hidden, device)
    readings = [held(device)]
    for step in range(warm, warm + steps):
        training_step(model, optimizer, step, hidden, device)
        if (step - warm + 1) % each == 0:
            readings.append(held(device))
    viking.detach(model)
    return readings


def report(readings: list[Held], each: int) -> str:
    lines = []
    for name in asdict(readings[0]):
        values = [asdict(reading)[name] for reading in readings]
        slope = (values[-1] - values[0]) / (each * (len(values) - 1)) * 100
        shown = [f"{v / 2**20:.2f}" for v in values] if name.endswith("_bytes") else [str(v) for v in values]
        unit = " MiB" if name.endswith("_bytes") else ""
        slope = slope / 2**20 if unit else slope
        lines.append(f"{name:16}{'  '.join(shown)}{unit}   {slope:+.3f}{unit} per 100 steps")
    names = grown(readings)
    lines.append("FLAT" if not names else f"GROWS: {', '.join(names)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile one block")
    arguments = parser.parse_args()
    name, value = EXACT_ALLOCATOR
    if name not in os.environ:
        os.environ[name] = value
        os.execv(sys.executable, sys.orig_argv)
    device = torch.device(arguments.device, 0 if arguments.device == "cuda" else None)
    hidden = 512 if device.type == "cuda" else 64
    each = max(1, arguments.steps // 5)
    print(f"{arguments.steps} steps on {device}, allocator {os.environ.get('PYTORCH_CUDA_ALLOC_CONF', 'as it is')}")
    readings = run(arguments.steps, device, hidden, arguments.compile, each)
    print(report(readings, each))
    return 1 if grown(readings) else 0


if __name__ == "__main__":
    sys.exit(main())
