"""What went wrong elsewhere when weights were kept on the host, as specifications. The table is docs/lessons.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.models import CHECKPOINTING, Net, wrap
from support.training import assert_same, inputs, one_step, train
from viking import _engine
from viking.nn.device import DeviceEngine

ROOT = Path(__file__).parent.parent
BUDGETS = {"smallest": 0, "a part": 250_000, "all": "2MB"}


def attach(model: nn.Module, budget: Any = 0) -> nn.Module:
    return viking.attach(model, "cpu", weights_budget=budget, progress=False)


def slow_copies(seed: int, bytes_per_second: int = 60_000_000) -> None:
    DeviceEngine.make_engine = lambda device: _engine.Engine(
        "host", bytes_per_second=bytes_per_second, delay_ns=300_000, seed=seed
    )


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


# ---- copies that come too early, too late, or to the wrong place ----


class Tagged(nn.Module):
    """Layer i multiplies by 2 ** (i % 3 - 1): exact in any dtype, and a foreign or torn weight shows by its number."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.tags = [2.0 ** (i % 3 - 1) for i in range(depth)]
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(depth))
        with torch.no_grad():
            for tag, layer in zip(self.tags, self.layers, strict=True):
                layer.weight.copy_(torch.eye(64) * tag)
        self.requires_grad_(False)
        self.wrong: list[str] = []
        for i, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda m, args, y, i=i: self._look("forward", i, args[0], y))
            layer.register_full_backward_hook(lambda m, gi, go, i=i: self._look("backward", i, go[0], gi[0]))

    def _look(self, when: str, i: int, before: torch.Tensor, after: torch.Tensor) -> None:
        if not torch.equal(after, before * self.tags[i]):
            self.wrong.append(f"{when} of layer {i}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("room", [2, 3, 5])
def test_every_use_finds_its_own_weight_forwards_and_backwards_however_slow_the_copies_are(room: int) -> None:
    slow_copies(room)
    model = attach(Tagged(9), room * 64 * 64 * 4)
    for step in range(6):
        x = inputs(step).requires_grad_(True)
        model(x).sum().backward()
        if step % 2:
            with torch.no_grad():
                model(x)

    assert model.wrong == []


def test_a_state_dict_right_after_a_step_holds_what_the_step_wrote() -> None:
    states = []
    for streamed in (True, False):
        slow_copies(3, 400_000_000)
        model = wrap(Net(depth=2))
        if streamed:
            attach(model)
        model.enter.weight.requires_grad_(True)
        optimizer = torch.optim.SGD(trained(model), lr=0.1)
        for step in range(3):
            one_step(model, inputs(step))
            optimizer.step()
            states.append({name: t.clone() for name, t in model.state_dict().items()})
            optimizer.zero_grad()

    for mine, theirs in zip(states[:3], states[3:], strict=True):
        assert all(torch.equal(mine[name], t) for name, t in theirs.items())


def test_layers_of_mirrored_shapes_keep_their_own_shape() -> None:
    class Mirrored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.layers = nn.ModuleList(nn.Linear(*(64, 256) if i % 2 == 0 else (256, 64)) for i in range(6))
            self.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    outcomes = []
    for streamed in (True, False):
        model = Mirrored()
        if streamed:
            attach(model)
        first = model.layers[0].bias.requires_grad_(True)
        outcomes.append(train(model, [first], 12))

    assert_same(*outcomes)


# ---- gradients ----


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_gradients_that_cancel_add_up_to_zero(checkpointing: str) -> None:
    """A second backward that replaced the first one's gradients would leave its own."""
    model = wrap(Net(depth=2, checkpointing=checkpointing))
    attach(model)
    model.enter.weight.requires_grad_(True)
    for sign in (1.0, -1.0):
        (model(inputs(0)).square().mean() * sign).backward()

    for p in trained(model):
        assert p.grad is not None
        assert torch.equal(p.grad, torch.zeros_like(p))


@pytest.mark.parametrize("budget", [0, "2MB"])
def test_a_gradient_that_is_there_survives_a_detach_and_another_attach(budget: Any) -> None:
    model = attach(wrap(Net(depth=2)))
    model.enter.weight.requires_grad_(True)
    one_step(model, inputs(0))
    before = [(p, p.grad, p.grad.clone()) for p in trained(model)]

    viking.detach(model)
    attach(model, budget)
    with torch.no_grad():
        model(inputs(1))

    assert len(before) > 2
    for p, gradient, value in before:
        assert p.grad is gradient
        assert torch.equal(gradient, value)


def with_fresh_lora(model: nn.Module) -> nn.Module:
    """As every trainer starts: the second matrix is zero."""
    wrap(model)
    for name, p in model.named_parameters():
        if name.endswith("rise.weight"):
            nn.init.zeros_(p)
    return model


@pytest.mark.parametrize("needs", [True, False], ids=["inputs need gradients", "inputs need none"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, "int8"], ids=str)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_a_fresh_lora_has_gradients_after_one_step_and_has_learned_after_three(
    checkpointing: str, base: Any, budget: str, needs: bool
) -> None:
    outcomes = []
    for streamed in (True, False):
        model = with_fresh_lora(Net(depth=2, checkpointing=checkpointing))
        if base == "int8":
            for block in model.blocks:
                for wrapper in (block.qkv, block.proj, block.up, block.down):
                    viking.quantize_(wrapper.base_layer, "int8")
        elif base is not torch.float32:
            for linear in model.modules():
                if isinstance(linear, nn.Linear) and not linear.weight.requires_grad:
                    linear.to(base)
            model.to(base)
        if streamed:
            attach(model, BUDGETS[budget])
        parameters = trained(model)
        rises = [p for name, p in model.named_parameters() if name.endswith("rise.weight")]
        dtype = base if isinstance(base, torch.dtype) else torch.float32

        def look(step: int, rises: list[nn.Parameter] = rises) -> None:
            assert step == 0 or all(p.any() for p in rises)

        def step_with(m: nn.Module, x: torch.Tensor, rises: list[nn.Parameter] = rises) -> torch.Tensor:
            loss = one_step(m, x.requires_grad_(needs))
            for p in rises:
                assert p.grad is not None
                assert torch.isfinite(p.grad).all()
                assert p.grad.any()
            return loss

        outcomes.append(train(model, parameters, 3, dtype=dtype, before_step=look, step_with=step_with))
        assert all(p.any() for p in rises)

    assert_same(*outcomes)


def test_a_lora_merged_into_streamed_weights_changes_the_output_as_the_branch_did() -> None:
    model = attach(wrap(Net(depth=1)), "2MB")
    base = model.blocks[0].up
    x = inputs(0)
    with torch.no_grad():
        expected = base(x)
        plain = base.base_layer(x)
        base.base_layer.weight.add_(base.rise.weight @ base.down.weight)

        merged = base.base_layer(x)

    assert not torch.equal(merged, plain)
    assert torch.allclose(merged, expected, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_weight_gives_the_same_bad_numbers_and_stays_where_it_is(value: float) -> None:
    seen = []
    for streamed in (True, False):
        model = wrap(Net(depth=3))
        if streamed:
            attach(model)
        with torch.no_grad():
            model.blocks[1].up.base_layer.weight[3, 5] = value
        bad: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(
                    lambda m, args, y, name=name, bad=bad: None if torch.isfinite(y).all() else bad.append(name)
                )
        loss = one_step(model, inputs(0))
        seen.append((bad, torch.isfinite(loss).item()))
        with torch.no_grad():
            model.blocks[1].up.base_layer.weight[3, 5] = 0
        assert torch.isfinite(model(inputs(1))).all()

    assert seen[0] == seen[1]
    assert seen[0][0][0] == "blocks.1.up.base_layer"


# ---- memory ----


@pytest.fixture
def pinning_host() -> Iterator[None]:
    DeviceEngine.make_engine = lambda device: _engine.Engine("host", delay_ns=1, seed=1)
    yield
    DeviceEngine.make_engine = None


def test_sizes_just_above_a_power_of_two_are_pinned_as_they_are(pinning_host: None) -> None:
    model = nn.ModuleList(nn.Linear(1024, (1 << k) // 4096 + 1, bias=False) for k in range(14, 23))
    attach(model.requires_grad_(False))

    totals = viking.stats(model)

    needed = sum(p.nbytes for p in model.parameters())
    assert totals.streamed_bytes > 0.5 * needed
    assert totals.streamed_bytes <= totals.pinned_bytes <= 1.03 * totals.streamed_bytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_model_that_is_unloaded_gives_its_memory_back_whoever_still_refers_to_it() -> None:
    def is_mapped(address: int) -> bool:
        with open("/proc/self/maps") as file:
            ranges = (line.split()[0].split("-") for line in file)
            return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)

    text_encoder, transformer = Net(depth=1), Net(depth=1, seed=3)
    attach(text_encoder)
    attach(transformer)
    stray = [text_encoder, *text_encoder.modules(), *text_encoder.parameters()]
    transformer(text_encoder(inputs(0)))
    homes = [m._layer_memory_manager.home_ptr for m in text_encoder.modules() if isinstance(m, nn.Linear)]
    expected = transformer(inputs(1))
    assert all(is_mapped(address) for address in homes)

    text_encoder.to("meta")
    stray = [thing for thing in stray if not isinstance(thing, nn.Parameter)]  # torch made new ones

    assert not any(is_mapped(address) for address in homes)
    assert torch.equal(transformer(inputs(1)), expected)
    assert viking.stats(transformer).streamed_bytes + viking.stats(transformer).resident_bytes == sum(
        w.nbytes for w in viking.stats(transformer).weights
    )
    assert len(stray) > 5


def test_a_detached_model_costs_no_more_transfers() -> None:
    text_encoder, transformer = attach(Net(depth=2)), attach(Net(depth=2, seed=3))
    for step in range(4):
        with torch.no_grad():
            transformer(text_encoder(inputs(step)))
    own = viking.stats(transformer)
    viking.detach(text_encoder)
    fetches = sum(m._layer_memory_manager.fetches for m in transformer.modules() if isinstance(m, nn.Linear))

    text_encoder(inputs(0))

    rest = viking.stats(transformer)
    assert rest.streamed_bytes < own.streamed_bytes
    assert rest.slab_bytes <= own.slab_bytes
    assert fetches == sum(m._layer_memory_manager.fetches for m in transformer.modules() if isinstance(m, nn.Linear))


def test_odd_sizes_start_at_multiples_of_256_bytes() -> None:
    shapes = [(1, 1), (3, 1), (17, 1), (1, 17), (33, 31), (4097, 1), (7, 129)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    host = attach(nn.ModuleDict({"plain": nn.Linear(64, 64).requires_grad_(False)}), "8MB")
    manager = host._memory_manager
    linears = [nn.Linear(*shape).to(dtype).requires_grad_(False) for shape in shapes for dtype in dtypes]
    twins = [nn.Linear(*shape).to(dtype) for shape in shapes for dtype in dtypes]
    for linear, twin in zip(linears, twins, strict=True):
        twin.load_state_dict(linear.state_dict())
        host[f"late {len(host)}"] = linear
        viking.LinearLayerMemoryManager.attach(linear, manager)

    for linear, twin in zip(linears, twins, strict=True):
        weight, bias, ticket = linear._layer_memory_manager.acquire()
        assert weight.data_ptr() % 256 == bias.data_ptr() % 256 == 0
        assert torch.equal(weight, twin.weight)
        assert torch.equal(bias, twin.bias)
        linear._layer_memory_manager.release(ticket)


# ---- everything that is no Linear ----


class Everything(nn.Module):
    """What a loop over Linears forgets: bare parameters, buffers, tables, convolutions, norms, keywords."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.bare = nn.Parameter(torch.randn(64))
        self.register_buffer("shift", torch.randn(64))
        self.register_buffer("unsaved", torch.randn(64), persistent=False)
        self.table = nn.Embedding(8, 64)
        self.conv = nn.Conv3d(1, 1, 3, padding=1)
        self.norms = nn.ModuleList([nn.LayerNorm(64), nn.GroupNorm(4, 64), nn.RMSNorm(64)])
        self.first, self.last, self.skipped = (nn.Linear(64, 64) for _ in range(3))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(input=x * self.bare + self.shift + self.unsaved + self.table(torch.tensor(3)))
        y = self.norms[2](self.norms[1](self.norms[0](y).flatten(0, 1))).view_as(x)
        y = self.conv(y.view(2, 1, 5, 8, 8)).view_as(x)
        return self.last(input=y)


@pytest.mark.parametrize("budget", [0, 40_000, "1MB"])
def test_what_is_no_linear_is_where_it_is_needed_at_every_budget(budget: Any) -> None:
    model, plain = Everything(), Everything()
    before = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    attach(model, budget)

    for step in range(3):
        x, y = (inputs(step).requires_grad_(True) for _ in range(2))
        assert torch.equal(model(x), plain(y))
        assert torch.equal(*(torch.autograd.grad(m(a).sum(), a)[0] for m, a in ((model, x), (plain, y))))
    assert before == {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}


# ---- the table ----


def test_every_lesson_names_tests_that_exist_or_a_reason() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "lessons.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.startswith("| lesson")
    ]
    assert len(rows) > 60
    for lesson, proof in rows:
        named = re.findall(r"`([\w/.]+)::([\w-]+)`", proof)
        assert named or proof.startswith("Not here: "), lesson
        for file, name in named:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"\b{re.escape(name)}\b *[(:]", text), f"{lesson}: {file} has no {name}"
