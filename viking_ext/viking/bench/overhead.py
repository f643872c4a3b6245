"""Host time of small linears: what a managed forward and backward cost beyond torch's own.

On a GPU the host must not wait for the device while it is timed, so the layers are small and the queue is short.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

import viking
from viking.bench.measure import synchronize
from viking.bench.models import LoraFactor
from viking.bench.peers import Peer

LAYERS = 200
SIDE = 640
TOKENS = 64


@dataclass(frozen=True)
class Overhead:
    """Microseconds of one Linear, forward + backward: as it is, and beyond plain torch."""

    engine: str
    each_us: float
    beyond_us: float

    def __str__(self) -> str:
        return f"{self.engine:34} {self.each_us:7.1f} us per linear  {self.beyond_us:+7.1f}"


class _Chain(nn.Module):
    """A trainable factor at the front, so that every frozen layer has a backward."""

    def __init__(self, layers: int, side: int) -> None:
        super().__init__()
        self.enter = LoraFactor(side, side, bias=False)
        self.layers = nn.ModuleList([nn.Linear(side, side, bias=False) for _ in range(layers)]).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return x


def _each(model: nn.Module, x: torch.Tensor, layers: int, passes: int) -> float:
    """Microseconds; the median over the passes, each started with an empty queue."""
    times = []
    for number in range(passes + 3):
        synchronize(x.device)
        begin = time.perf_counter()
        model(x).sum().backward()
        if number >= 3:
            times.append(time.perf_counter() - begin)
    return statistics.median(times) / layers * 1e6


def measure(device: torch.device, peers: list[Peer], layers: int = LAYERS, passes: int = 20) -> list[Overhead]:
    """`layers` linears of 640 x 640 in bf16 on 64 tokens: plain, resident and streamed under Viking, and peers."""
    dtype = torch.bfloat16
    x = torch.randn(TOKENS, SIDE, dtype=dtype, device=device)

    def build(where: torch.device) -> nn.Module:
        model = _Chain(layers, SIDE).to(dtype)
        model.enter.to(device)
        model.layers.to(where)
        return model

    model = build(device)
    plain = _each(model, x, layers, passes)
    found = [Overhead("torch", plain, 0.0)]
    for name, budget in (("viking, everything resident", 1 << 60), ("viking, as little as possible", 0)):
        model = build(torch.device("cpu"))
        viking.attach(model, device, weights_budget=budget, progress=False)
        each = _each(model, x, layers, passes)
        viking.detach(model)
        found.append(Overhead(name, each, each - plain))
    for peer in peers:
        setting = peer.settings[-1]
        model = build(torch.device("cpu"))
        try:
            peer.attach(model, device, setting)
        except ValueError:
            continue  # not for a model without blocks
        each = _each(model, x, layers, passes)
        peer.detach(model)
        found.append(Overhead(f"{peer.name}, {peer.describe(setting)}", each, each - plain))
    return found
