"""Weights that lie in a file's mapping stay there: no second copy, and the parameters are left as they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.processes import measure
from viking import _engine
from viking.nn.device import DeviceEngine

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


class Odd(nn.Module):
    """Linears with biases, and sizes that fill no page."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(37, 129), nn.Linear(129, 65), nn.Linear(65, 37, bias=False)
        self.scale = nn.Parameter(torch.full((37,), 0.5))
        for layer in (self.first, self.second, self.third):
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x * self.scale)))))


def load(path: Path) -> Odd:
    model = Odd()
    model.load_state_dict(safetensors.load_file(path), assign=True)
    for name, p in model.named_parameters():
        p.requires_grad_(name == "scale")
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    path = tmp_path / "model.safetensors"
    safetensors.save_file(Odd().state_dict(), path)
    return path


@pytest.fixture(params=["unpinned", "pinned", "limited"])
def engine(request: Any) -> Iterator[str]:
    if request.param != "unpinned":
        DeviceEngine.make_engine = lambda device: _engine.Engine("host", delay_ns=20000)
    yield request.param
    DeviceEngine.make_engine = None


def train(model: Odd, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD([model.scale], lr=0.1)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, 37, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), model.scale.detach().clone()]
    return found


def linears(model: Odd) -> list[nn.Linear]:
    return [model.first, model.second, model.third]


@pytest.mark.parametrize("budget", [0, "60KB", "10MB"])
def test_a_mapped_model_trains_as_without_viking(saved: Path, engine: str, budget: Any) -> None:
    model = load(saved)
    identity = {name: id(p) for name, p in model.named_parameters()}
    before = {name: p.data_ptr() for name, p in model.named_parameters()}

    viking.attach(model, "cpu", weights_budget=budget, pin="50KB" if engine == "limited" else "auto", progress=False)
    mine = train(model)

    for layer in linears(model):
        manager = layer._layer_memory_manager
        kept = layer.weight.data_ptr() == before[next(n for n, p in model.named_parameters() if p is layer.weight)]
        assert manager.home.borrowed == kept
        assert manager.home.pinned == (not manager.home.borrowed)
        if manager.path == "resident" or engine == "unpinned":
            assert manager.home.borrowed
        elif engine == "pinned":
            assert manager.home.pinned
    viking.detach(model)
    assert {name: id(p) for name, p in model.named_parameters()} == identity
    for a, b in zip(mine, train(load(saved)), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(p, q) for p, q in zip(linears(model)[0].parameters(), load(saved).first.parameters(),
                                                 strict=True))


def test_an_edit_of_a_mapped_weight_is_seen_and_stays_off_the_file(saved: Path, engine: str) -> None:
    model, other = load(saved), load(saved)
    viking.attach(model, "cpu", weights_budget=0, pin=engine == "pinned", progress=False)
    train(model)
    train(other)

    for m in (model, other):
        with torch.no_grad():
            m.first.weight.mul_(0.5)
            m.second.weight.data = m.second.weight.data.clone().add_(1)

    for a, b in zip(train(model), train(other), strict=True):
        assert torch.equal(a, b)
    viking.detach(model)
    assert torch.equal(model.first.weight, other.first.weight)
    assert not torch.equal(model.first.weight, load(saved).first.weight)


def test_what_a_later_layout_streams_is_copied_from_its_mapping(saved: Path) -> None:
    DeviceEngine.make_engine = lambda device: _engine.Engine("host", delay_ns=20000)
    try:
        model = load(saved)
        viking.attach(model, "cpu", weights_budget="10MB", progress=False)
        assert all(layer._layer_memory_manager.home.borrowed for layer in linears(model))
        other = load(saved)
        viking.attach(other, "cpu", weights_budget=0, progress=False)

        both = [m._layer_memory_manager for m in linears(model)]
        assert any(m.path != "resident" for m in both)
        assert all(m.home.borrowed for m in both)
        assert viking.stats(model).staged_bytes > 0
        for a, b in zip(train(model), train(load(saved)), strict=True):
            assert torch.equal(a, b)
    finally:
        viking.detach(model)
        viking.detach(other)
        DeviceEngine.make_engine = None


def test_a_home_over_pieces_that_do_not_fit_is_refused() -> None:
    owner = torch.zeros(16, dtype=torch.uint8)
    address = owner.data_ptr()
    for pieces in ([], [(0, address, 17)], [(8, address, 8), (0, address, 8)], [(0, address, 9), (8, address, 8)],
                   [(0, 0, 8)], [(0, address, 0)]):
        with pytest.raises(ValueError, match="piece"):
            _engine.Home.over(pieces, 16, owner)
    home = _engine.Home.over([(0, address, 16)], 16, owner)
    assert home.borrowed
    assert not home.pinned
    with pytest.raises(BufferError, match="borrowed"):
        memoryview(home)


def test_a_mapped_model_needs_no_second_copy(tmp_path: Path) -> None:
    found = measure(f"""
        from safetensors.torch import load_file, save_file
        path = {str(tmp_path / "large.safetensors")!r}
        count, side = 20, 1024
        save_file({{f"{{i}}.weight": torch.full((side, side), 1 / side) for i in range(count)}}, path)
        model = nn.Sequential(*[nn.Linear(side, side, bias=False, device="meta") for _ in range(count)])
        model.load_state_dict(load_file(path), assign=True)
        model.requires_grad_(False)
        gc.collect()
        before = status("RssAnon")
        viking.attach(model, "cpu", weights_budget=int(0.8 * count * side * side * 4), progress=False)
        x = torch.ones(1, side)
        with torch.no_grad():
            model(x), model(x)
        stats = viking.stats(model)
        print(json.dumps({{"model": count * side * side * 4, "slab": stats.slab_bytes,
                          "grown": status("RssAnon") - before}}))
    """)

    assert found["slab"] > 0.7 * found["model"]
    assert found["grown"] - found["slab"] < 0.25 * found["model"]
