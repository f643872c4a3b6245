"""Weights that are streamed and trained: the host steps them, as it would step those of a plain model.

Every test runs a model and its plain twin side by side and compares parameters and gradients bit for bit. Copies are
slow and randomly late, so whoever reads a gradient before it has arrived, or computes with a weight from before a step,
computes something else.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import viking
from support.models import CHECKPOINTING, HIDDEN, Block, Net, hijack
from support.threads import together
from support.training import inputs
from viking import _engine
from viking.nn import gradients
from viking.nn.device import DeviceEngine

SLOW = {"bytes_per_second": 400_000_000, "delay_ns": 50_000, "seed": 7}
BUDGETS = {"smallest": 0, "some": 200_000, "all": None}


@pytest.fixture(autouse=True)
def slow_copies() -> None:
    DeviceEngine.make_engine = lambda device: _engine.Engine("host", **SLOW)


def attach(model: nn.Module, budget: Any = 0, **how: Any) -> nn.Module:
    return viking.attach(model, "cpu", **{"weights_budget": budget, "trained": "host", "progress": False, **how})


class Pair:
    """A streamed model and its twin, each with the optimizer that `make` builds for it."""

    def __init__(
        self,
        model: nn.Module | None = None,
        make: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.1),
        budget: Any = 0,
        frozen: bool = False,
        **how: Any,
    ) -> None:
        self.streamed = Net(depth=2) if model is None else model
        if not frozen:
            self.streamed.requires_grad_(True)
        self.plain = copy.deepcopy(self.streamed)
        attach(self.streamed, budget, **how)
        self.models = (self.streamed, self.plain)
        self.optimizers = [make(list(model.parameters())) for model in self.models]

    def both(self, what: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> list[Any]:
        results = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            torch.manual_seed(0)
            results.append(what(model, optimizer))
        self.compare()
        return results

    def compare(self) -> None:
        theirs = dict(self.plain.named_parameters())
        for name, p in self.streamed.named_parameters():
            assert torch.equal(p, theirs[name]), f"{name} differs"
            a, b = p.grad, theirs[name].grad
            assert (a is None) == (b is None), f"only one {name} has a gradient"
            if a is not None and b is not None:
                assert (a.dtype, a.device, a.stride()) == (b.dtype, b.device, b.stride())
                assert a.requires_grad == b.requires_grad
                assert torch.equal(a, b), f"the gradient of {name} differs"


def parameters_of_linears(model: nn.Module) -> list[nn.Parameter]:
    """What is streamed."""
    return [p for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()]


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return model(inputs(step, dtype)).float().square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, n: int = 0, dtype: torch.dtype = torch.float32) -> None:
    loss_of(model, n, dtype).backward()
    optimizer.step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "fused SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, foreach=False),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}


@pytest.mark.parametrize(
    ("name", "budget"),
    [*((name, "some") for name in OPTIMIZERS), ("fused AdamW", "smallest"), ("fused AdamW", "all")],
)
def test_any_optimizer_steps_them_after_four_micro_steps_and_a_clip(name: str, budget: str) -> None:
    """Neither early gradients nor replaced ones; fused optimizers tell nobody that they write."""
    pair = Pair(make=OPTIMIZERS[name], budget=BUDGETS[budget])

    for n in range(3):
        def train(model: nn.Module, optimizer: torch.optim.Optimizer, n: int = n) -> torch.Tensor:
            for micro in range(4):
                (loss_of(model, 4 * n + micro) / 4).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            return norm

        assert torch.equal(*pair.both(train))
        pair.both(lambda model, optimizer, n=n: optimizer.zero_grad(set_to_none=n != 1))


@pytest.mark.parametrize(
    ("checkpointing", "dtype"),
    [*((how, torch.float32) for how in CHECKPOINTING), ("off", torch.float16), ("early stop", torch.bfloat16)],
)
def test_checkpointed_blocks_give_the_same_gradients_in_every_dtype(checkpointing: str, dtype: torch.dtype) -> None:
    pair = Pair(Net(depth=2, checkpointing=checkpointing).to(dtype))

    for n in range(3):
        pair.both(lambda model, optimizer, n=n: step(model, optimizer, n, dtype))


def test_under_autocast_an_fp32_weight_gets_an_fp32_gradient() -> None:
    pair = Pair()

    for n in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            pair.both(lambda model, optimizer, n=n: step(model, optimizer, n))


def test_gradients_that_cancel_add_up_to_zero() -> None:
    pair = Pair()

    for factor in (1, -1):
        pair.both(lambda model, optimizer, factor=factor: (factor * loss_of(model, 0)).backward())

    assert all(p.grad is not None and bool((p.grad == 0).all()) for p in pair.streamed.parameters())


def test_a_grad_scaler_skips_a_step_with_an_infinite_gradient() -> None:
    pair = Pair()
    scalers = {id(model): torch.amp.GradScaler("cpu", init_scale=2.0**6) for model in pair.models}

    for factor in (1.0, float("inf"), 1.0):
        def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = factor) -> float:
            optimizer.zero_grad()
            scaler = scalers[id(model)]
            scaler.scale(loss_of(model, 0) * factor).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            for p in model.parameters():
                p.grad = None  # of the infinite step: NaN equals nothing
            return scaler.get_scale()

        mine, theirs = pair.both(scaled)
        assert mine == theirs
    assert mine == 2.0**5


# ---- hooks, and others who look early ----


def in_tensor_hooks(model: nn.Module, seen: list[torch.Tensor]) -> None:
    for p in model.parameters():
        p.register_hook(lambda g: seen.append(g.clone()) or g * 0.5)


def in_the_optimizer_step_within_backward(model: nn.Module, seen: list[torch.Tensor]) -> None:
    def update(p: torch.Tensor) -> None:
        assert p.grad is not None
        seen.append(p.grad.clone())
        torch.optim.SGD([p], lr=0.1, fused=True).step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)


def in_hooks_of_the_accumulators(model: nn.Module, seen: list[torch.Tensor]) -> None:
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    for node in nodes:
        node.register_prehook(lambda grads: seen.append(grads[0].clone()))
    model.__dict__["nodes"] = nodes  # hooks live as long as these


def in_full_backward_hooks(model: nn.Module, seen: list[torch.Tensor]) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(lambda m, gx, gy: seen.append(gy[0].clone()))


@pytest.mark.parametrize(
    "where",
    [in_tensor_hooks, in_the_optimizer_step_within_backward, in_hooks_of_the_accumulators, in_full_backward_hooks],
)
def test_whoever_looks_early_sees_the_gradient(where: Callable[[nn.Module, list[torch.Tensor]], None]) -> None:
    pair = Pair()
    seen: dict[int, list[torch.Tensor]] = {id(model): [] for model in pair.models}
    for model in pair.models:
        where(model, seen[id(model)])

    for n in range(3):
        pair.both(lambda model, optimizer, n=n: step(model, optimizer, n))

    mine, theirs = (sorted(s, key=lambda t: (t.numel(), float(t.double().sum()))) for s in seen.values())
    assert len(mine) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_autograd_grad_returns_the_gradients_and_leaves_none_behind() -> None:
    pair = Pair()

    mine, theirs = pair.both(lambda m, o: torch.autograd.grad(loss_of(m, 0), [m.leave.weight, m.blocks[0].up.bias]))

    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_backward_that_names_its_inputs_gives_gradients_to_these_alone() -> None:
    pair = Pair()

    pair.both(lambda m, o: loss_of(m, 0).backward(inputs=[m.blocks[0].up.weight, m.blocks[1].norm.weight]))

    assert pair.streamed.blocks[0].up.weight.grad is not None
    assert pair.streamed.leave.weight.grad is None


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_with_a_graph_of_their_own_have_one() -> None:
    pair = Pair()

    pair.both(lambda model, optimizer: loss_of(model, 0).backward(create_graph=True))

    assert pair.streamed.leave.weight.grad.requires_grad
    for model in pair.models:
        model.zero_grad()


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning", "ignore:Error detected in:UserWarning")
def test_anomaly_mode_names_the_layer_whose_gradient_is_nan() -> None:
    pair = Pair(nn.Sequential(nn.Linear(HIDDEN, HIDDEN)))
    x = torch.zeros(2, HIDDEN)
    x[0], x[1] = float("inf"), -float("inf")

    for model in pair.models:
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
            model(x).sum().backward()


# ---- what torch counts and what it does not ----


def test_what_writes_to_data_between_steps_is_seen_without_a_refresh() -> None:
    """A moving average that is swapped in to sample, and plain p.data writes."""
    pair = Pair(budget=None)

    for n in range(3):
        def train(model: nn.Module, optimizer: torch.optim.Optimizer, n: int = n) -> torch.Tensor:
            step(model, optimizer, n)
            kept = [p.data.clone() for p in model.parameters()]
            for p in model.parameters():
                p.data.mul_(0.5)
            with torch.no_grad():
                sample = model(inputs(9))
            for p, value in zip(model.parameters(), kept, strict=True):
                p.data.copy_(value)
            return sample

        assert torch.equal(*pair.both(train))


@pytest.mark.parametrize("how", ["a block by itself", "a Linear by itself", "by its forward"])
def test_a_step_is_seen_where_no_root_was_entered(how: str) -> None:
    model = Net(depth=1).requires_grad_(True)
    twin = copy.deepcopy(model)
    if how == "a Linear by itself":
        attach(Net(depth=1), None)  # whose manager takes the others in
        owner = next(iter(DeviceEngine.of(torch.device("cpu")).managers))
        manager = viking.MemoryManager(model, owner.device)
        manager.device.join(manager)
        for linear in (m for m in model.blocks[0].modules() if isinstance(m, nn.Linear)):
            viking.LinearLayerMemoryManager.attach(linear, manager)
    else:
        attach(model, None)

    for n in range(4):
        results = []
        for m in (model, twin):
            call = m.forward if how == "by its forward" else m.blocks[0]
            y = call(inputs(n))
            y.square().mean().backward()
            torch.optim.SGD(m.blocks[0].parameters(), lr=0.5, fused=True).step()
            m.zero_grad()
            with torch.no_grad():
                results.append([y, call(inputs(n))])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), f"step {n}"


def test_weights_may_be_unfrozen_and_frozen_in_mid_run() -> None:
    """By a fused optimizer, whatever was chosen for those that are trained from the start."""
    pair = Pair(Net(depth=2), make=lambda ps: torch.optim.SGD(ps, lr=0.5, fused=True), frozen=True, trained="device",
                budget=None)
    chosen: list[Callable[[nn.Module], Any]] = [
        lambda m: m.blocks[0].up, lambda m: m.blocks[1].qkv.weight, lambda m: m.leave.bias]

    for n in range(9):
        def train(model: nn.Module, optimizer: torch.optim.Optimizer, n: int = n) -> torch.Tensor:
            for i, choose in enumerate(chosen):
                choose(model).requires_grad_((n + i) % 3 != 0)
            y = model(inputs(n))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return y

        assert torch.equal(*pair.both(train))


def test_a_trained_weight_is_fetched_once_per_pass_even_if_it_is_resident() -> None:
    pair = Pair(budget=None)
    for n in range(3):
        pair.both(lambda model, optimizer, n=n: step(model, optimizer, n))
    linears = [m._layer_memory_manager for m in pair.streamed.modules() if isinstance(m, nn.Linear)]
    assert {linear.path for linear in linears} == {"resident"}
    before = [linear.fetches for linear in linears]

    pair.both(lambda model, optimizer: step(model, optimizer, 5))

    assert [linear.fetches - b for linear, b in zip(linears, before, strict=True)] == [1] * len(linears)
    assert all(linear.home.pinned for linear in linears), "a step would wait for pageable copies"
    with torch.no_grad():
        pair.streamed(inputs(0))
    stats = viking.stats(pair.streamed)
    assert stats.written_bytes == sum(p.nbytes for p in parameters_of_linears(pair.streamed))
    assert {w.reason for w in stats.weights} == {"trained: stepped on the host"}


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_beside_frozen_weights_trained_ones_leave_them_the_device(share: float) -> None:
    """They travel once per pass even if they are resident, so that the frozen ones gain more by staying."""
    model = Net(depth=8, checkpointing="no early stop")
    for block in model.blocks:
        block.qkv.requires_grad_(True)
    total = sum(p.nbytes for p in parameters_of_linears(model))
    pair = Pair(model, frozen=True, budget=int(total * share))
    for n in range(3):
        pair.both(lambda model, optimizer, n=n: step(model, optimizer, n))

    with torch.no_grad():
        pair.streamed(inputs(0))  # ends the pass
    stats = viking.stats(pair.streamed)
    assert 1.0 <= stats.plan_ratio <= 1.1
    trained = [w for w in stats.weights if w.reason.startswith("trained")]
    assert len(trained) == 8
    assert sum(w.path == "resident" for w in trained) <= 1


# ---- shapes of use ----


class Shared(nn.Module):
    """One Linear used many times, and another Linear with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2 * gradients.LANDINGS):
            x = functional.gelu(self.first(x))
        return self.second(x)


def test_gradients_of_several_uses_are_summed_before_they_are_added() -> None:
    """(G + g1) + g2 has other bits than G + (g1 + g2)."""
    torch.manual_seed(3)
    pair = Pair(Shared())

    for n in range(3):
        for micro in range(3):
            pair.both(lambda model, optimizer, n=3 * n + micro: loss_of(model, n).backward())
        pair.both(lambda model, optimizer: optimizer.step())
        pair.both(lambda model, optimizer: optimizer.zero_grad())


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_weight_and_bias_may_be_trained_alone(what: str) -> None:
    model = Net(depth=2)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            getattr(module, what).requires_grad_(True)
    pair = Pair(model, frozen=True)

    for n in range(2):
        pair.both(lambda model, optimizer, n=n: step(model, optimizer, n))


def test_a_gradient_has_the_strides_of_its_weight() -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN))
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    pair = Pair(model)

    pair.both(step)

    assert model[0].weight.grad.stride() == (1, 32)


def test_two_graphs_may_wait_for_their_backward_and_be_retained() -> None:
    pair = Pair()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        first, second = loss_of(model, 0), loss_of(model, 1)
        second.backward(retain_graph=True)
        first.backward()
        second.backward()

    pair.both(train)


def test_gradients_that_the_user_keeps_are_not_written_again() -> None:
    pair = Pair()
    kept: dict[int, list[torch.Tensor]] = {}

    for n in range(3):
        def train(model: nn.Module, optimizer: torch.optim.Optimizer, n: int = n) -> None:
            step(model, optimizer, n)
            views = [p.grad.view(-1)[1:] for p in model.parameters() if p.grad is not None]
            kept.setdefault(id(model), []).extend(views)
            optimizer.zero_grad()

        pair.both(train)

    mine, theirs = kept.values()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_their_memory_is_used_again_from_step_to_step() -> None:
    pair = Pair()
    device = DeviceEngine.of(torch.device("cpu"))

    def homes(n: int) -> set[int]:
        pair.both(lambda model, optimizer: optimizer.zero_grad())
        pair.both(lambda model, optimizer: step(model, optimizer, n))
        return {p.grad.data_ptr() for p in parameters_of_linears(pair.streamed) if p.grad is not None}

    first = homes(0)
    pinned = device.engine.stats()["pinned_bytes"]

    for n in range(1, 4):
        assert homes(n) == first
    assert device.engine.stats()["pinned_bytes"] == pinned


@pytest.mark.parametrize("accumulates", [False, True])
def test_few_gradients_are_on_the_device_at_once(monkeypatch: pytest.MonkeyPatch, accumulates: bool) -> None:
    """However far the copies are behind; and few are on the host that only wait to be added."""
    pair = Pair(Net(depth=4))
    if accumulates:
        pair.both(lambda model, optimizer: loss_of(model, 0).backward())
    device = DeviceEngine.of(torch.device("cpu"))
    tickets: list[int] = []
    released: list[int] = []

    def download(*args: int) -> int:
        tickets.append(device.engine.original.download(*args))
        return tickets[-1]

    def release(ticket: int) -> None:
        released.append(ticket)
        device.engine.original.download_release(ticket)

    monkeypatch.setattr(device, "engine", Stand(device.engine, download=download, download_release=release))
    alive = most = landing = 0
    make, settle = gradients._as_torch_keeps_it, gradients.Pass.settle

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def counted(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        weakref.finalize(gradient, gone)
        return make(gradient, parameter)

    def watched(self: gradients.Pass) -> None:
        nonlocal landing
        settle(self)
        landing = max(landing, self.landing)

    monkeypatch.setattr(gradients, "_as_torch_keeps_it", counted)
    monkeypatch.setattr(gradients.Pass, "settle", watched)

    pair.both(lambda model, optimizer: loss_of(model, 1).backward())

    assert alive == 0
    assert 1 < most <= gradients.SLOTS
    assert landing == (gradients.LANDINGS if accumulates else 0)
    assert released == tickets[: -gradients.SLOTS], "whose memory another gradient got while it was read"


def test_a_state_dict_right_after_a_step_has_the_stepped_values() -> None:
    pair = Pair(make=OPTIMIZERS["fused AdamW"])

    def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        step(model, optimizer)
        return {name: t.clone() for name, t in model.state_dict().items()}

    for _ in range(2):
        mine, theirs = pair.both(saved)
        assert all(torch.equal(mine[name], t) for name, t in theirs.items())


# ---- failures ----


class Stand:
    """In an object's place, with some attributes of its own."""

    def __init__(self, original: Any, **own: Any) -> None:
        self.__dict__.update(own, original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class Stumble(Exception):
    """Raised in the middle of a backward."""


@contextlib.contextmanager
def stumbling(model: nn.Module, error: type[BaseException]) -> Any:
    """The backward of the model's first layer raises."""
    def fall(*unused: Any) -> None:
        raise error

    handle = model.enter.register_forward_hook(lambda m, args, y: y.register_hook(fall) and None)
    try:
        with pytest.raises(error):
            yield
    finally:
        handle.remove()


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("error", [Stumble, KeyboardInterrupt])
def test_gradients_of_a_failed_backward_are_not_added_to_a_later_one(
    error: type[BaseException], checkpointing: str
) -> None:
    pair = Pair(Net(depth=2, checkpointing=checkpointing))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
        with stumbling(model, error):
            loss_of(model, 9).backward()
        if checkpointing != "reentrant":
            assert model is pair.plain or all(p.grad is None for p in parameters_of_linears(model))
        model.zero_grad()
        step(model, optimizer, n)

    for n in range(2):
        pair.both(lambda model, optimizer, n=n: train(model, optimizer, n))
        pair.both(lambda model, optimizer: optimizer.zero_grad())
    assert not DeviceEngine.of(torch.device("cpu")).gradients.passes


@pytest.mark.parametrize("where", ["_as_torch_keeps_it", "Home", "download"])
def test_gradients_that_could_not_be_sent_fail_the_backward_and_nothing_more(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    pair = Pair()
    pair.both(lambda model, optimizer: loss_of(model, 0).backward())
    before = [p.grad.clone() for p in parameters_of_linears(pair.streamed)]
    calls = 0

    def fail(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < 3:
            return works(*args)
        raise MemoryError

    device = DeviceEngine.of(torch.device("cpu"))
    awaited: list[int] = []

    def wait(ticket: int) -> None:
        awaited.append(ticket)
        device.engine.original.download_await(ticket)

    original = device.engine
    monkeypatch.setattr(device, "engine", Stand(original, download_await=wait))
    works = original.download if where == "download" else getattr(gradients, where)
    if where == "download":
        monkeypatch.setattr(device, "engine", Stand(original, download_await=wait, download=fail))
    else:
        device.gradients._homes.clear()
        monkeypatch.setattr(gradients, where, fail)
    with pytest.raises(MemoryError):
        loss_of(pair.streamed, 1).backward()
    monkeypatch.undo()

    assert awaited == [2**64 - 1], "the memory of copies in flight was let go"
    for p, value in zip(parameters_of_linears(pair.streamed), before, strict=True):
        assert torch.equal(p.grad, value)
    for model in pair.models:
        model.zero_grad()
    pair.both(lambda model, optimizer: step(model, optimizer, 2))


def test_an_error_in_the_join_leaves_the_rest_unadded(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    deliver = gradients.Pass._deliver
    delivered: list[Any] = []

    def twice(self: gradients.Pass, total: gradients.Arrival) -> None:
        if len(delivered) == 2:
            raise Stumble
        delivered.append(total.parameter)
        deliver(self, total)

    monkeypatch.setattr(gradients.Pass, "_deliver", twice)
    with pytest.raises(Stumble):
        loss_of(pair.streamed, 0).backward()
    monkeypatch.undo()

    assert sum(p.grad is not None for p in parameters_of_linears(pair.streamed)) == 2
    pair.streamed.zero_grad()
    pair.both(step)


# ---- attach and detach ----


def test_gradients_survive_a_detach_in_memory_that_is_pinned_no_longer() -> None:
    pair = Pair()
    pair.both(lambda model, optimizer: loss_of(model, 0).backward())

    viking.detach(pair.streamed)

    assert not DeviceEngine._open
    pair.compare()
    pair.both(lambda model, optimizer: optimizer.step())
    pair.both(lambda model, optimizer: step(model, optimizer, 1))


def test_a_model_that_is_dropped_before_its_backward_ended_leaves_nothing() -> None:
    pair = Pair()
    with stumbling(pair.streamed, Stumble):
        loss_of(pair.streamed, 0).backward()
    gone = weakref.ref(pair.streamed)

    del pair
    gc.collect()

    assert gone() is None
    assert not DeviceEngine._open


def test_trained_is_device_or_host_and_is_one_of_the_arguments() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="'gpu' is neither"):
        attach(model, trained="gpu")
    assert "_memory_manager" not in model.__dict__

    attach(model)

    assert attach(model) is model
    with pytest.raises(ValueError, match="other arguments"):
        attach(model, trained="device")
    assert [w.reason for w in viking.stats(model).weights] == ["trained: stepped on the host", "it is small"]
    viking.detach(model)
    attach(model, trained="device")
    assert [w.reason for w in viking.stats(model).weights] == ["it is trained", "it is trained"]


@pytest.mark.parametrize("trained", ["device", "host"])
def test_what_comes_later_follows_the_same_choice(trained: str) -> None:
    pair = Pair(trained=trained)
    late = Block().requires_grad_(True)
    for model, block in zip(pair.models, (late, copy.deepcopy(late)), strict=True):
        model.blocks.append(block)
    pair.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair.models]

    for n in range(2):
        pair.both(lambda model, optimizer, n=n: step(model, optimizer, n))

    assert ("_layer_memory_manager" in late.up.__dict__) == (trained == "host")


def test_a_network_beside_a_frozen_model_is_a_model_of_its_own() -> None:
    """A LoRA of high rank, streamed and stepped by the host, over a model that is streamed as well."""
    def build(attached: bool) -> tuple[nn.Module, nn.ModuleList]:
        model = Net(depth=2, checkpointing="early stop")
        network = hijack(model)
        torch.manual_seed(5)
        for lora in network:
            lora.down = nn.Linear(lora.down.in_features, 48, bias=False)
            lora.rise = nn.Linear(48, lora.rise.out_features, bias=False)
        if attached:
            attach(model, 150_000)
            attach(network, 150_000)
            assert all("_layer_memory_manager" in lora.down.__dict__ for lora in network)
        return model, network

    outcomes = []
    for attached in (True, False):
        model, network = build(attached)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
        seen: list[torch.Tensor] = []
        for n in range(5):
            loss = loss_of(model, n)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen += [loss.detach(), model(inputs(8)) if n % 2 else loss.detach()]
        outcomes.append(seen + [p.detach() for p in network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_two_threads_train_two_models_on_one_device() -> None:
    pairs = [Pair(Net(depth=2, seed=seed, checkpointing=how)) for seed, how in ((1, "off"), (2, "early stop"))]

    def job(pair: Pair) -> Callable[[], None]:
        return lambda: [step(pair.streamed, pair.optimizers[0], n) for n in range(4)] and None

    together(*(job(pair) for pair in pairs))

    for pair in pairs:
        for n in range(4):
            step(pair.plain, pair.optimizers[1], n)
        pair.compare()
