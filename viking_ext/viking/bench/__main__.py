"""The command line of `python -m viking.bench`."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from fractions import Fraction
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for --verify: cuBLAS picks by it what is deterministic
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import nn

import viking
from viking.bench.measure import Floor, link_bandwidth, results, synchronize, time_steps, train_step
from viking.bench.model import Lora, Size, Transformer, avoid_cudnn_attention, build, make_input
from viking.nn.device import resolve_device
from viking.units import format_bytes, parse_bytes

GIB = 1 << 30


def candidate_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)


def cap_memory(device: torch.device, nbytes: int | None) -> None:
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / total), device)


def memory_in_use(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def peak_host_bytes() -> int:
    """Of this process; 0 where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def steady_state(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Three steps in which a host synchronisation is an error; device allocations, copies by direction, calls."""
    if x.device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    before = torch.cuda.memory_stats(x.device)["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            train_step(model, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronize(x.device)
    allocations = torch.cuda.memory_stats(x.device)["num_device_alloc"] - before
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        train_step(model, x)
        synchronize(x.device)
    names = [event.name for event in recorded.events()]
    count = {
        key: sum(key in name for name in names)
        for key in ("Memcpy HtoD", "Memcpy DtoH", "cudaMalloc", "cudaHostRegister", "cudaStreamSynchronize")
    }
    return {"device_allocations": allocations, "sync_free": True, **count}


def run_viking(
    model: Transformer,
    x: torch.Tensor,
    budget: int,
    floor: Floor,
    reference: list[torch.Tensor] | None,
    options: argparse.Namespace,
) -> dict[str, Any]:
    begin = time.perf_counter()
    viking.attach(model, x.device, weights_budget=budget, progress=False)
    attach = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(2):
        train_step(model, x)
    synchronize(x.device)
    learning = time.perf_counter() - begin
    demand = viking.stats(model).demand_fetches
    times = time_steps(model, x, options.steps, 2)
    identical = None
    if reference is not None:
        torch.use_deterministic_algorithms(True)
        identical = all(
            len(found) == len(reference) and all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))
            for found in (results(model, x) for _ in range(3))
        )
        torch.use_deterministic_algorithms(False)
    steady = steady_state(model, x)
    stats = viking.stats(model)
    row = {
        "engine": "viking",
        "budget": budget,
        "attach_s": attach,
        "learning_s": learning,
        "step_s": times.step,
        "fastest_s": times.fastest,
        "slowest_s": times.slowest,
        "host_s": times.host,
        "T1_s": floor.step(budget),
        "time_ratio": times.step / floor.step(budget),
        "fetched": stats.fetched_bytes,
        "bytes_ratio": stats.fetched_bytes / max(1, floor.fetched_bytes(budget)),
        "stall_s": stats.stall_ns / 1e9,
        "resident": stats.resident_bytes,
        "streamed": stats.streamed_bytes,
        "pinned": stats.pinned_bytes,
        "written": stats.written_bytes,
        "late_demand_fetches": stats.demand_fetches - demand,
        "identical": identical,
        "device_in_use": memory_in_use(x.device),
        **steady,
    }
    viking.detach(model)
    return row


def run_toolkit(path: str, model: Transformer, x: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """ai-toolkit's own MemoryManager from the user's checkout, every block linear offloaded."""
    sys.path.insert(0, path)
    from toolkit.memory_management import MemoryManager  # type: ignore[import-not-found]

    adapters = [module for module in model.modules() if isinstance(module, Lora)]
    begin = time.perf_counter()
    model.blocks.cpu()
    MemoryManager.attach(model, x.device, ignore_modules=[m for lora in adapters for m in (lora.down, lora.up)])
    for lora in adapters:
        lora.down.to(x.device)
        lora.up.to(x.device)
    attach = time.perf_counter() - begin
    times = time_steps(model, x, max(2, options.steps // 2), 2)
    return {
        "engine": "ai-toolkit",
        "attach_s": attach,
        "step_s": times.step,
        "fastest_s": times.fastest,
        "slowest_s": times.slowest,
        "host_s": times.host,
        "device_in_use": memory_in_use(x.device),
    }


def reference_run(
    model: Transformer, x: torch.Tensor, options: argparse.Namespace
) -> tuple[Floor, dict[str, Any], Any]:
    """Everything resident: the floor's compute times, and the results to be reproduced."""
    times = time_steps(model, x, options.steps, 3)
    floor = Floor(candidate_bytes(model), link_bandwidth(x.device), times.forward, times.backward)
    found = None
    if options.verify:
        torch.use_deterministic_algorithms(True)
        found = results(model, x)
        torch.use_deterministic_algorithms(False)
    row = {
        "engine": "resident",
        "step_s": times.step,
        "forward_s": times.forward,
        "fastest_s": times.fastest,
        "slowest_s": times.slowest,
        "host_s": times.host,
        "device_in_use": memory_in_use(x.device),
        "link": f"{floor.bandwidth / 1e9:.1f} GB/s",
        "candidate_bytes": floor.candidate_bytes,
    }
    return floor, row, found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m viking.bench", description=__doc__)
    parser.add_argument("shape", choices=["flux2"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--depth", type=Fraction, default=Fraction(1), help="fraction of the blocks, such as 1/4")
    parser.add_argument("--width", type=int, default=6144, help="hidden size, a multiple of 48")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--weights", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--weights-budget", nargs="+", default=[], metavar="SIZE", help="such as 4GiB; several are measured in turn"
    )
    parser.add_argument(
        "--cap", metavar="SIZE", help="let the process use this much device memory, while weights stream"
    )
    parser.add_argument(
        "--engine", action="append", default=[], metavar="NAME", help="ai-toolkit:PATH, beside viking and resident"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--verify", action="store_true", help="compare output and gradients with the resident run, bit for bit"
    )
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


def show(row: dict[str, Any]) -> None:
    def text(key: str, value: Any) -> str:
        if key.endswith("_s") and isinstance(value, float):
            return f"{value * 1e3:.1f} ms"
        if key in (
            "budget",
            "fetched",
            "resident",
            "streamed",
            "pinned",
            "written",
            "device_in_use",
            "candidate_bytes",
        ):
            return format_bytes(value)
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    print("  ".join(f"{key.removesuffix('_s')}={text(key, value)}" for key, value in row.items()), flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device = resolve_device(options.device)
    avoid_cudnn_attention()
    scale = Fraction(options.width, 6144)
    size = Size(
        options.width,
        48,
        int(18432 * scale),
        image_tokens=max(8, int(1024 * scale)),
        text_tokens=max(4, int(512 * scale)),
    ).at_depth(float(options.depth))
    dtype = getattr(torch, options.weights)
    model = build(size, options.rank, dtype, device, device)
    x = make_input(size, dtype, device)
    floor, row, reference = reference_run(model, x, options)
    rows = [row]
    show(row)
    peers = [engine.partition(":") for engine in options.engine]
    for budget in [parse_bytes(text, "--weights-budget") for text in options.weights_budget]:
        cap_memory(device, parse_bytes(options.cap, "--cap") if options.cap else None)
        rows.append(run_viking(model, x, budget, floor, reference, options))
        show(rows[-1])
        cap_memory(device, None)
    for name, _, path in peers:
        if name != "ai-toolkit":
            raise SystemExit(f"--engine {name}: known are ai-toolkit:PATH")
        gc.collect()
        rows.append(run_toolkit(path, model, x, options))
        show(rows[-1])
    print(f"peak host memory {format_bytes(peak_host_bytes())}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
