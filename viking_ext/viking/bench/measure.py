"""Steps with a clock on them, and the two figures that a floor is made of: link bandwidth and resident compute."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class StepTimes:
    """Seconds: medians over the steps, and the spread of the whole step."""

    step: float
    forward: float
    fastest: float
    slowest: float
    host: float  # the host had queued a step after this long

    @property
    def backward(self) -> float:
        return self.step - self.forward


class _Clock:
    """Moments on the device's current stream, or on the host where there is no stream."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is None:
            self.time = time.perf_counter()
        else:
            self.event.record()

    def until(self, later: _Clock) -> float:
        if self.event is None or later.event is None:
            return later.time - self.time
        return self.event.elapsed_time(later.event) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train_step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, _Clock]:
    """Forward, a quadratic loss, backward. Gradients are those of this step alone."""
    for p in (x, *(p for p in model.parameters() if p.requires_grad)):
        p.grad = None
    y = model(x)
    middle = _Clock(x.device)
    y.float().pow(2).mean().backward()
    return y, middle


def time_steps(model: nn.Module, x: torch.Tensor, steps: int, warm_up: int) -> StepTimes:
    for _ in range(warm_up):
        train_step(model, x)
    synchronize(x.device)
    marks, middles = [_Clock(x.device)], []
    begin = time.perf_counter()
    for _ in range(steps):
        _, middle = train_step(model, x)
        middles.append(middle)
        marks.append(_Clock(x.device))
    host = (time.perf_counter() - begin) / steps
    synchronize(x.device)
    whole = [a.until(b) for a, b in itertools.pairwise(marks)]
    forward = [a.until(m) for a, m in zip(marks, middles, strict=False)]
    return StepTimes(statistics.median(whole), statistics.median(forward), min(whole), max(whole), host)


def time_forward(model: nn.Module, x: torch.Tensor, passes: int) -> float:
    """Median of a forward without gradients, as sampling runs it; the first one is not counted."""
    times = []
    for _ in range(passes + 1):
        with torch.no_grad():
            begin = _Clock(x.device)
            model(x)
            end = _Clock(x.device)
        synchronize(x.device)
        times.append(begin.until(end))
    return statistics.median(times[1:])


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, input gradient and LoRA gradients of one step, on the host."""
    y, _ = train_step(model, x)
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return [t.detach().cpu() for t in (y, x.grad, *gradients) if t is not None]


def link_bandwidth(device: torch.device, nbytes: int = 256 << 20, copies: int = 16) -> float:
    """Host to device, bytes per second, from pinned memory; the median of a few runs."""
    source = torch.empty(nbytes, dtype=torch.uint8)
    if device.type == "cuda":
        source = source.pin_memory()
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(3):
        begin = _Clock(device)
        for _ in range(copies):
            target.copy_(source, non_blocking=True)
        end = _Clock(device)
        synchronize(device)
        rates.append(copies * nbytes / begin.until(end))
    return statistics.median(rates)


@dataclass(frozen=True)
class Floor:
    """What no executor can beat: T1 of each sweep over all weights."""

    candidate_bytes: int  # N
    bandwidth: float
    forward: float  # resident compute time, s
    backward: float
    sample: float

    def _travel(self, budget_bytes: int) -> float:
        return max(0, self.candidate_bytes - budget_bytes) / self.bandwidth

    def step(self, budget_bytes: int) -> float:
        travel = self._travel(budget_bytes)
        return max(self.forward, travel) + max(self.backward, travel)

    def sampling(self, budget_bytes: int) -> float:
        return max(self.sample, self._travel(budget_bytes))

    def fetched_bytes(self, budget_bytes: int) -> int:
        return 2 * max(0, self.candidate_bytes - budget_bytes)
