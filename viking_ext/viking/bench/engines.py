"""One row per setting: the resident model, Viking under a budget or a cap, a peer under a cap."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import viking
from viking import plan
from viking.bench import memory
from viking.bench.measure import (
    Floor,
    StepTimes,
    link_bandwidth,
    results,
    synchronize,
    time_forward,
    time_steps,
    train_step,
)
from viking.bench.models import Model
from viking.bench.models.weights import Weights, dequantize_at_each_use
from viking.bench.peers import Peer
from viking.bench.rows import Row
from viking.nn.device import DeviceEngine
from viking.quant.formats import FORMATS
from viking.shapes import Machine
from viking.units import format_bytes


@dataclass
class Bench:
    """What all rows of a run have in common."""

    model: Model
    rank: int
    weights: Weights
    device: torch.device
    steps: int
    x: torch.Tensor
    fuse_lora: bool = False
    link: int | None = None  # bytes per second to which copies are paced

    def ours(self, weights_on: torch.device) -> nn.Module:
        """The model as engines of ours run it."""
        model = self.build(weights_on)
        if self.fuse_lora:
            viking.fuse_lora(model)
        return model

    def our_row(self, engine: str, *settings: str, **known: Any) -> Row:
        given = (*settings, "LoRA fused" if self.fuse_lora else "")
        return self.row(engine, setting=", ".join(filter(None, given)), **known)

    def build(self, weights_on: torch.device) -> nn.Module:
        return self.model.build(self.rank, self.weights, weights_on, self.device)

    @contextmanager
    def model_on_host(self) -> Iterator[nn.Module]:
        """For several runs of ours one after the other: a detached model is as it was."""
        _forget(self.device)
        model = [self.ours(torch.device("cpu"))]
        try:
            yield model[0]
        finally:
            model.clear()

    def row(self, engine: str, **known: Any) -> Row:
        return Row(self.model.title, engine, **known)


@dataclass
class Reference:
    """The resident run: the floor's figures, and the results to be reproduced (None: not asked for)."""

    floor: Floor
    outcome: list[torch.Tensor] | None
    row: Row
    beside_weights: int = 0  # device memory that everything else took, the CUDA context included


@contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _measure(bench: Bench, model: nn.Module, row: Row, warm_up: int, steps: int) -> tuple[StepTimes, float]:
    """Into the row; the times of steps, and of a forward without gradients."""
    times = time_steps(model, bench.x, steps, warm_up)
    row.step_s, row.fastest_s, row.slowest_s = times.step, times.fastest, times.slowest
    row.forward_s, row.host_s = times.forward, times.host
    sample = time_forward(model, bench.x, max(2, steps // 2))
    row.sample_s = sample
    row.device_in_use = memory.device_in_use(bench.device)
    row.torch_peak = memory.torch_peak(bench.device)
    row.host_memory = memory.host_in_use()
    return times, sample


def run_resident(bench: Bench, verify: bool) -> Reference:
    """Everything on the device, and the link measured beside it."""
    _forget(bench.device)
    model = bench.ours(bench.device)
    dequantize_at_each_use(model)
    nbytes = memory.candidate_bytes(model)
    row = bench.our_row("resident", weight_bytes=nbytes)
    times, sample = _measure(bench, model, row, warm_up=3, steps=bench.steps)
    beside = memory.torch_peak(bench.device) + memory.context_bytes(bench.device) - nbytes
    row.link = link_bandwidth(bench.device)
    bandwidth = row.link if bench.link is None else min(row.link, bench.link)
    floor = Floor(nbytes, bandwidth, times.forward, times.backward, sample)
    outcome = None
    viking.unfuse_lora(model)  # what is to be reproduced is what the model computes without
    if verify:
        with _deterministic():
            outcome = results(model, bench.x)
    return Reference(floor, outcome, row, max(0, beside))


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _steady(model: nn.Module, x: torch.Tensor, row: Row) -> None:
    """Three steps in which a host synchronisation is an error; device allocations, and one step's copies and waits."""
    if x.device.type != "cuda":
        return
    from torch.profiler import ProfilerActivity, profile

    before = torch.cuda.memory_stats(x.device)["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            train_step(model, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronize(x.device)
    row.device_allocations = torch.cuda.memory_stats(x.device)["num_device_alloc"] - before
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        train_step(model, x)
        synchronize(x.device)
    names = [event.name for event in recorded.events()]
    row.copies_to_device = sum("Memcpy HtoD" in name for name in names)
    row.copies_to_host = sum("Memcpy DtoH" in name for name in names)
    row.synchronizations = sum("cudaStreamSynchronize" in name for name in names)


def _predict(bench: Bench, floor: Floor, budget: int) -> float | None:
    """Seconds that the planner foresees with this link, on a machine that computes a resident step in this time."""
    weights = bench.weights.name
    if weights not in ("bfloat16", *FORMATS):
        return None
    shape = bench.model.shape
    known = shape.trace(weights=weights, rank=bench.rank)
    scale = sum(use.compute_ns for use in known.uses) / 1e9 / (floor.forward + floor.backward)
    rates = Machine()
    machine = Machine(rates.flops_per_second * scale, rates.memory_bytes_per_second * scale)
    trace = shape.trace(weights=weights, rank=bench.rank, machine=machine)
    return plan.report(trace, min(budget, trace.total_bytes), int(floor.bandwidth)).step_ns / 1e9


def run_viking(
    bench: Bench,
    reference: Reference,
    model: nn.Module,
    *,
    budget: int | None = None,
    vram: int | None = None,
    deep: bool = False,
) -> Row:
    """Under a budget for the weights, or a cap for the process. `deep`: look for host waits and allocations as well.

    model: on the host, as :meth:`Bench.model_on_host` makes it; it is so again afterwards.
    """
    _forget(bench.device)
    before = _sums(model)
    floor, x = reference.floor, bench.x
    paced = "" if bench.link is None else f"link paced to {format_bytes(floor.bandwidth)}/s"
    row = bench.our_row("viking", paced, vram=vram, weight_bytes=memory.candidate_bytes(model))
    with memory.capped(bench.device, vram):
        begin = time.perf_counter()
        size: dict[str, Any] = {"weights_budget": budget} if vram is None else {"vram": vram}
        viking.attach(model, bench.device, progress=False, **size)
        row.attach_s = time.perf_counter() - begin
        if bench.link is not None:
            DeviceEngine.of(bench.device).engine.pace(bench.link)
        begin = time.perf_counter()
        for _ in range(3 if vram is not None else 2):  # a cap is shared out anew after the second step
            train_step(model, x)
        synchronize(bench.device)
        row.learning_s = time.perf_counter() - begin
        demanded = viking.stats(model).demand_fetches
        _measure(bench, model, row, warm_up=2, steps=bench.steps)
        train_step(model, x)
        train_step(model, x)  # the figures of a step that has one before it
        stats = viking.stats(model)
        if reference.outcome is not None:
            with _deterministic():
                row.identical = all(_same(results(model, x), reference.outcome) for _ in range(3))
        if deep:
            _steady(model, x, row)
    row.budget = stats.weights_budget_bytes
    row.floor_s, row.time_ratio = floor.step(row.budget), _over(row.step_s, floor.step(row.budget))
    row.sample_ratio = _over(row.sample_s, floor.sampling(row.budget))
    row.predicted_s = _predict(bench, floor, row.budget)
    row.fetched, row.written, row.stall_s = stats.fetched_bytes, stats.written_bytes, stats.stall_ns / 1e9
    row.bytes_ratio = _over(float(stats.fetched_bytes), float(floor.fetched_bytes(row.budget)))
    row.late_fetches = stats.demand_fetches - demanded
    row.resident, row.streamed, row.pinned = stats.resident_bytes, stats.streamed_bytes, stats.pinned_bytes
    viking.detach(model)
    if _sums(model) != before:
        raise RuntimeError("a streamed weight is not what it was before attach: no further row is measured with it")
    return row


def _sums(model: nn.Module) -> list[int]:
    """Of the bytes of three weights: a model is used again for the next row."""
    weights = [p.data for p in model.parameters() if not p.requires_grad and p.dim() == 2]
    some = (weights[0], weights[len(weights) // 2], weights[-1])
    return [int(each.view(torch.uint8).sum(dtype=torch.int64)) for each in some]


def _over(value: float | None, least: float) -> float | None:
    return None if value is None or least == 0 else value / least


def run_peer(bench: Bench, reference: Reference, peer: Peer, vram: int | None) -> Row:
    """Its best setting that gets through under the cap; without a cap, the one that keeps least on the device."""
    _forget(bench.device)
    models = [bench.build(torch.device("cpu"))]

    def fresh_model() -> nn.Module:
        return models.pop() if models else bench.build(torch.device("cpu"))

    for setting in _promising(peer, models[0], reference, vram):
        row = bench.row(peer.name, setting=peer.describe(setting), vram=vram)
        try:
            with memory.capped(bench.device, vram):
                _try_peer(bench, reference, peer, fresh_model(), setting, row)
        except torch.OutOfMemoryError:
            row.note = "out of memory"
        except (ValueError, RuntimeError, AssertionError) as error:
            row.note = f"failed: {error}".splitlines()[0][:120]
        _forget(bench.device)
        if not row.note and (vram is None or (row.device_in_use or 0) <= vram):
            return row
    row.note = row.note or "no setting fits"
    return row


def _promising(peer: Peer, model: nn.Module, reference: Reference, vram: int | None) -> list[Any]:
    """The settings to try: those that keep no more on the device than the cap leaves beside what the resident run
    needed for all but the weights. Each try costs a model."""
    if vram is None:
        return list(peer.settings[-1:])
    room = vram - reference.beside_weights
    return [s for s in peer.settings if peer.kept_bytes(model, s) <= room] or list(peer.settings[-1:])


def _try_peer(bench: Bench, reference: Reference, peer: Peer, model: nn.Module, setting: Any, row: Row) -> None:
    row.weight_bytes = memory.candidate_bytes(model)
    begin = time.perf_counter()
    peer.attach(model, bench.device, setting)
    row.attach_s = time.perf_counter() - begin
    try:
        _measure(bench, model, row, warm_up=2, steps=max(2, bench.steps // 2))
        if reference.outcome is not None:
            with _deterministic():
                row.identical = _same(results(model, bench.x), reference.outcome)
    finally:
        peer.detach(model)
