"""Weights that the host steps, on a real device: the gradients travel back beside the weights that come."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import viking

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HIDDEN, DEPTH, TOKENS = 1024, 6, 96
OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.nn.functional.gelu(self.widen(x)))


class Net(nn.Module):
    def __init__(self, reentrant: bool | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.reentrant = reentrant
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def loss_of(net: Net, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = net.blocks[0].widen.weight.dtype
    x = torch.randn(2, TOKENS, HIDDEN, device="cuda", dtype=dtype, generator=generator).requires_grad_()
    return net(x).float().pow(2).mean()


def train(net: Net, name: str, steps: int = 4, accumulate: int = 2) -> list[torch.Tensor]:
    """Losses and norms, at last the weights. A resident net's optimizer works on the host, on copies."""
    hosted = [p if p.device.type == "cpu" else p.detach().cpu().requires_grad_() for p in net.parameters()]
    optimizer = OPTIMIZERS[name](hosted)
    seen = []
    for step in range(steps):
        for micro in range(accumulate):
            loss = loss_of(net, accumulate * step + micro) / accumulate
            loss.backward()
            seen.append(loss.detach().cpu())
        for p, host in zip(net.parameters(), hosted, strict=True):
            if p is not host:
                host.grad, p.grad = p.grad.cpu(), None
        seen.append(nn.utils.clip_grad_norm_(hosted, 1e-3))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, host in zip(net.parameters(), hosted, strict=True):
                if p is not host:
                    p.copy_(host)
    return seen + [p.detach().clone() for p in hosted]


def weight_bytes(net: Net) -> int:
    return sum(p.nbytes for p in net.parameters())


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()


def attach(net: Net, budget: Any = 0) -> Net:
    viking.attach(net, "cuda", weights_budget=budget, trained="host", progress=False)
    return net


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["off", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_equals_the_resident_one_bit_for_bit(name: str, reentrant: bool | None, dtype: torch.dtype) -> None:
    expected = train(Net(reentrant, dtype).to("cuda"), name)
    for budget in (0, weight_bytes(Net(None, dtype)) // 2, None):
        net = attach(Net(reentrant, dtype), budget)
        found = train(net, name)
        assert len(found) == len(expected)
        assert [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)] == []
        viking.detach(net)


def test_each_gradient_travels_once_per_pass() -> None:
    net = attach(Net(False))
    for seed in range(3):
        loss_of(net, seed).backward()
        net.zero_grad()
    with torch.no_grad():
        net(torch.ones(1, 1, HIDDEN, device="cuda"))  # ends the pass before
    assert viking.stats(net).written_bytes == weight_bytes(net)
    viking.detach(net)


def test_the_host_waits_for_nothing_in_forward() -> None:
    net = attach(Net())
    train(net, "SGD")
    x = torch.ones(2, TOKENS, HIDDEN, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    end.record()
    started = time.perf_counter()
    loss = net(x).pow(2).mean()
    took = time.perf_counter() - started
    assert not end.query(), "the device was faster than the host"
    loss.backward()
    torch.cuda.synchronize()
    print(f"forward took the host {1e3 * took:.1f} ms beside {begin.elapsed_time(end):.0f} ms on the device")
    viking.detach(net)


def test_memory_is_flat_and_the_step_time_is_printed() -> None:
    net = attach(Net(True))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    process = psutil.Process()
    times, seeds = [], itertools.count()

    def steps(count: int) -> None:
        for _ in range(count):
            started = time.perf_counter()
            loss_of(net, next(seeds)).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)

    steps(20)
    gc.collect()
    reserved = torch.cuda.memory_reserved()
    resident = process.memory_info().rss
    times.clear()
    steps(60)
    gc.collect()
    assert torch.cuda.memory_reserved() <= reserved
    assert process.memory_info().rss <= resident + (8 << 20)
    times.sort()
    print(f"{weight_bytes(net) / 1e6:.0f} MB trained, stepped by fused AdamW: {1e3 * times[len(times) // 2]:.1f} ms")
    viking.detach(net)
