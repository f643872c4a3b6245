"""viking.fuse_lora: every number is that of the network as it was, and a checkpointed block recomputes less."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import viking
from support.models import CHECKPOINTING, HIDDEN, LORA_STYLES, LoRA, build
from support.training import assert_same, inputs, same_bits, train
from viking.bench.models import Lora
from viking.lora import adding
from viking.lora.deferred import Deferred
from viking.quant import quantizing

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def small_weights_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viking.nn.eligible.SMALLEST_BYTES", {"cuda": 4 << 10, "cpu": 4 << 10})
    monkeypatch.setattr(quantizing, "SMALLEST_ELEMENTS", 64)


class Scaled(nn.Module):
    """In front of a Linear, with a strength."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.down, self.up = nn.Linear(base.in_features, rank, False), nn.Linear(rank, base.out_features, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


class Replacing(nn.Module):
    """Replaces its Linear's forward, as kohya's scripts and musubi-tuner do it."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.lora_down = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, linear.out_features, bias=False)
        self.multiplier, self.scale, self.dropout, self.rank_dropout, self.module_dropout = 0.7, scale, None, None, None
        self.org_forward = linear.forward
        linear.forward = self.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        org_forwarded = self.org_forward(x)
        if self.module_dropout is not None and self.training and torch.rand(1) < self.module_dropout:
            return org_forwarded
        lx = self.lora_down(x)
        if self.dropout is not None and self.training:
            lx = functional.dropout(lx, p=self.dropout)
        if self.rank_dropout is not None and self.training:
            mask = torch.rand((lx.size(0), lx.size(-1))) > self.rank_dropout
            lx = lx * mask.unsqueeze(1)
        lx = self.lora_up(lx)
        return org_forwarded + lx * self.multiplier * self.scale


class Attention(nn.Module):
    """Three Linears read one tensor, whose gradient is a sum of seven then."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return x + self.out(torch.tanh(q) * k + v)


class Stack(nn.Module):
    def __init__(self, depth: int = 2, width: int = 32, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(Attention(width) for _ in range(depth)), reentrant
        self.network = nn.ModuleList()
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.reentrant is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def in_front(rank: int = 4, scale: float = 0.3) -> Callable[[nn.Linear], nn.Module]:
    return lambda linear: Scaled(linear, rank, scale)


def in_place(rank: int = 4, scale: float = 0.3) -> Callable[[nn.Linear], nn.Module]:
    return lambda linear: Replacing(linear, rank, scale)


def with_lora(stack: Stack, make: Callable[[nn.Linear], nn.Module], dtype: torch.dtype = torch.float32) -> Stack:
    for block in stack.blocks:
        for name, linear in list(block.named_children()):
            lora = make(linear)
            if isinstance(lora, Replacing):
                stack.network.append(lora)
            else:
                setattr(block, name, lora)
    generator = torch.Generator().manual_seed(5)
    for parameter in stack.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return stack.to(dtype)


def lively(network: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in network.parameters() if parameter.requires_grad)


def passes(model: nn.Module, x: torch.Tensor, count: int = 2) -> list[torch.Tensor]:
    """Output, and gradients of x and of what is trained, after `count` passes that accumulate."""
    for _ in range(count):
        torch.manual_seed(7)
        y = model(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    return [y.detach(), *(t.grad for t in (x, *lively(model)) if t.grad is not None)]


def both(
    make: Callable[[], nn.Module],
    x: Callable[[], torch.Tensor],
    run: Callable[[nn.Module, torch.Tensor], list[torch.Tensor]] = passes,
    fused: int | None = None,
) -> viking.FusionReport:
    """Asserts that the model computes the same with and without; returns the report."""
    expected = run(make(), x())
    model = make()
    report = viking.fuse_lora(model)
    found = run(model, x())
    assert len(found) == len(expected) > 0
    assert [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not same_bits(a, b)] == []
    assert fused is None or len(report.fused) == fused
    return report


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sums of a Linear's output and a branch, in place."""
    calls: list[int] = []
    original = adding.add_product_
    monkeypatch.setattr("viking.lora.function.add_product_", lambda *given: (calls.append(1), original(*given))[1])
    return calls


# ---- the same numbers ----


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("style", LORA_STYLES)
def test_a_whole_training_is_the_same_in_every_style(style: str, checkpointing: str, attached: bool) -> None:
    outcomes, uses = [], []
    for fuses in (False, True):
        model, trained = build(
            style,
            lambda model: attached and viking.attach(model, "cpu", weights_budget=0, progress=False),
            checkpointing=checkpointing,
        )
        replaced = [m.forward.__self__ for m in model.modules() if isinstance(_owner(m), LoRA)]
        if fuses:
            assert len(viking.fuse_lora(nn.ModuleList(replaced) if replaced else model).fused) == 12
        outcomes.append(train(model, trained, 3, accumulate=2))
        if attached:
            managers = [vars(module).get("_layer_memory_manager") for module in model.modules()]
            uses.append(sum(manager.uses for manager in managers if manager is not None))
            viking.detach(model)

    assert_same(*outcomes)
    if attached:
        skipped = 3 * 6 if checkpointing == "early stop" else 0  # the last Linear of each block, in each of six passes
        assert uses[1] == uses[0] - skipped


def _owner(module: nn.Module) -> Any:
    return getattr(module.__dict__.get("forward"), "__self__", None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 4, 16, 200])
@pytest.mark.parametrize("make", [in_front, in_place])
def test_every_dtype_and_rank(make: Any, rank: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    width = 256 if rank == 200 else 32
    both(
        lambda: with_lora(Stack(1, width), make(rank), dtype),
        lambda: (leaf(2, 5, width, dtype=dtype)().detach() * 0.1).requires_grad_(),
        fused=4,
    )
    assert len(calls) == 8


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("make", [in_front, in_place])
def test_gradients_of_a_tensor_that_many_linears_read_are_added_in_the_same_order(make: Any, reentrant: Any) -> None:
    both(lambda: with_lora(Stack(3, reentrant=reentrant), make()), leaf(4, 9, 32), fused=12)


def _transposed() -> torch.Tensor:
    return leaf(32, 6)().t()


def _kept(view: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        x = view()
        x.retain_grad()
        return x

    return make


INPUTS = {
    "1-D": leaf(32), "2-D": leaf(7, 32), "one row": leaf(1, 32), "4-D": leaf(2, 3, 5, 32), "no rows": leaf(0, 32),
    "column-major": _kept(_transposed),
    "a slice": _kept(lambda: leaf(3, 8, 40)()[:, 1:7:2, 4:36]),
    "permuted": _kept(lambda: leaf(5, 3, 32)().transpose(0, 1)),
    "without a gradient": lambda: leaf(4, 32)().detach(),
}


@pytest.mark.parametrize("name", INPUTS)
def test_every_shape_and_layout_of_the_input(name: str) -> None:
    both(lambda: with_lora(Stack(), in_front()), INPUTS[name], fused=8)


@pytest.mark.parametrize("frozen", ["down", "up", "both"])
def test_frozen_factors(frozen: str) -> None:
    def make() -> nn.Module:
        model = with_lora(Stack(), in_front())
        for module in model.modules():
            if isinstance(module, Scaled):
                for name in ("down", "up"):
                    module.get_submodule(name).requires_grad_(frozen not in (name, "both"))
        return model

    both(make, leaf(4, 32), fused=8)


def test_a_trained_base() -> None:
    both(lambda: with_lora(Stack(), in_front()).requires_grad_(), leaf(4, 5, 32), fused=8)


def test_a_trained_base_that_the_host_steps() -> None:
    outcomes = []
    for fuses in (False, True):
        model, _ = build("wrapper", checkpointing="early stop")
        model.requires_grad_()
        if fuses:
            viking.fuse_lora(model)
        viking.attach(model, "cpu", weights_budget=0, progress=False, trained="host")
        outcomes.append(train(model, list(model.parameters()), 3, accumulate=2))
        viking.detach(model)

    assert_same(*outcomes)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("format", ["float8_e4m3fn", "int8"])
def test_an_8_bit_base(format: str, attached: bool) -> None:
    outcomes = []
    for fuses in (False, True):
        model, trained = build(
            "wrapper", lambda model: viking.quantize_(model, format), checkpointing="early stop", dtype=torch.bfloat16
        )
        if attached:
            viking.attach(model, "cpu", weights_budget=0, progress=False)
        if fuses:
            assert viking.fuse_lora(model).fused
        outcomes.append(train(model, trained, 3, torch.bfloat16))
        if attached:
            viking.detach(model)

    assert_same(*outcomes)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_sampling(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        with context():
            return [model(x).clone()]

    calls = counted(monkeypatch)
    both(lambda: with_lora(Stack(), in_front()), leaf(4, 5, 32), run, fused=8)
    assert len(calls) == 8


def test_second_derivatives() -> None:
    def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        parameters = list(lively(model))
        first = torch.autograd.grad(model(x).square().sum(), [x, *parameters], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, *parameters])
        return [t.detach() for t in (*first, *second)]

    def make() -> nn.Module:
        return with_lora(Stack(), in_front()).double()

    expected = run(make(), leaf(4, 32)().detach().double().requires_grad_())
    model = make()
    viking.fuse_lora(model)
    found = run(model, leaf(4, 32)().detach().double().requires_grad_())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_autocast(reentrant: bool | None, kept: torch.dtype) -> None:
    def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return passes(model, x)

    both(lambda: with_lora(Stack(reentrant=reentrant), in_place(), kept), leaf(4, 5, 32), run, fused=8)


# ---- what a forward does beside ----


@pytest.mark.parametrize("kind", ["dropout", "rank_dropout", "module_dropout"])
def test_dropout(kind: str) -> None:
    def make() -> nn.Module:
        model = with_lora(Stack(reentrant=False), in_place())
        for lora in model.network:
            setattr(lora, kind, 0.5)
        return model

    both(make, leaf(4, 5, 32), fused=8)


@pytest.mark.parametrize("multiplier", [0, 1, True, torch.tensor(0.3), torch.tensor([[[0.1]], [[2.0]]])], ids=repr)
def test_multipliers(multiplier: Any) -> None:
    def make() -> nn.Module:
        model = with_lora(Stack(), in_place())
        for lora in model.network:
            lora.multiplier = multiplier
        return model

    both(make, leaf(2, 5, 32), fused=8)


def test_strengths_may_change_from_call_to_call() -> None:
    def run(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
        results = passes(model, x)
        for lora in model.network:
            lora.multiplier, lora.scale = 0.11, 1.7
        return results + passes(model, x)

    both(lambda: with_lora(Stack(), in_place()), leaf(2, 5, 32), run)


@pytest.mark.parametrize("change", ["dora", "two adapters", "merged", "disabled", "dropout", "lora_bias", "rslora"])
def test_peft(change: str) -> None:
    import peft

    options = {
        "dora": {"use_dora": True}, "dropout": {"lora_dropout": 0.3}, "lora_bias": {"lora_bias": True},
        "rslora": {"use_rslora": True},
    }.get(change, {})
    config = peft.LoraConfig(r=4, target_modules=["q", "k", "v", "out"], init_lora_weights=False, **options)

    def make() -> nn.Module:
        torch.manual_seed(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(Stack(reentrant=False), config)
            if change == "two adapters":
                model.add_adapter("other", config)
                model.base_model.set_adapter(["default", "other"])
            if change == "merged":
                model.merge_adapter()
            if change == "disabled":
                model.base_model.disable_adapter_layers()
        return model

    report = both(make, leaf(4, 5, 32))
    assert len(report.kept if change == "lora_bias" else report.fused) == 8


class Peculiar(Scaled):
    """A forward that does something else with its parts."""

    how: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], Any]

    def forward(self, x: torch.Tensor) -> Any:
        return type(self).how(self, x, self.base(x), self.up(self.down(x)))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 2 + b

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 2, grad


PECULIAR = {
    "the base again": lambda self, x, y, p: y + p + y,
    "the branch again": lambda self, x, y, p: (y + p) * p,
    "a multiple and the branch": lambda self, x, y, p: y + p * 0.5 + p,
    "both multiples": lambda self, x, y, p: (y + p * 0.5) * (p * 0.25),
    "a difference": lambda self, x, y, p: y - p,
    "the branch first": lambda self, x, y, p: p + y,
    "torch.add": lambda self, x, y, p: torch.add(y, p),
    "torch.add with alpha": lambda self, x, y, p: torch.add(y, p, alpha=0.3),
    "in place": lambda self, x, y, p: y.add_(p),
    "+=": lambda self, x, y, p: y.__add__(p).mul_(3),
    "a slice": lambda self, x, y, p: torch.cat([y[..., :3] + p[..., :3], p[..., 3:]], -1),
    "a function of its own": lambda self, x, y, p: Twice.apply(y, p),
    "the base alone": lambda self, x, y, p: y,
    "the branch alone": lambda self, x, y, p: p,
    "twice the base": lambda self, x, y, p: self.base(x) + y + p,
    "a product": lambda self, x, y, p: (y @ p.transpose(-1, -2) @ p).tanh(),
    "comparisons": lambda self, x, y, p: y * (y > p) + p.where(p < 0, -y),
    "other types": lambda self, x, y, p: (y.double() + p.float()).to(y.dtype),
}


@pytest.mark.parametrize("name", PECULIAR)
def test_a_forward_that_does_something_else_computes_what_it_did(name: str) -> None:
    kind = type("Kind", (Peculiar,), {"how": staticmethod(PECULIAR[name])})
    both(
        lambda: with_lora(Stack(), lambda linear: kind(linear, 4, 1.0)),
        _kept(lambda: leaf(4, 5, 32)() * 1),
        lambda model, x: passes(model, x, 1),
    )


@pytest.mark.parametrize("write", ["mul_", "torch.mul", "numpy"])
def test_a_forward_that_writes_to_its_input_in_between(write: str) -> None:
    class Writing(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mine = x * 1
            y = self.base(mine)
            if write == "mul_":
                mine.mul_(2)
            elif write == "torch.mul":
                torch.mul(mine.detach(), 2, out=mine.detach())
            else:
                values = mine.detach().numpy()
                values *= 2
            return y + self.up(self.down(mine))

    both(lambda: with_lora(Stack(), lambda linear: Writing(linear, 4, 1.0)), leaf(4, 5, 32), fused=8)


def test_a_forward_that_cannot_be_fused_is_named() -> None:
    kind = type("Kind", (Peculiar,), {"how": staticmethod(PECULIAR["the base again"])})
    model = with_lora(Stack(1), lambda linear: kind(linear, 4, 1.0))
    report = viking.fuse_lora(model)
    assert len(report.fused) == 4

    model(leaf(4, 32)())

    assert report.fused == []
    assert "again" in report.kept["blocks.0.q"]
    assert "blocks.0.q: its forward uses" in str(report)


# ---- who watches ----


def _hook(where: str, kind: str) -> Callable[[nn.Module, list[Any]], None]:
    def add(model: nn.Module, seen: list[Any]) -> None:
        for module in model.modules():
            if isinstance(module, Scaled):
                target = module if where == "module" else module.get_submodule(where)
                if kind == "backward":
                    target.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
                else:
                    target.register_forward_hook(lambda m, args, out: seen.append(out.detach().clone()) or out * 2)

    return add


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("where", ["base", "down", "up", "module"])
def test_hooks_see_what_they_saw(where: str, kind: str) -> None:
    def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        _hook(where, kind)(model, seen)
        results = passes(model, x)
        assert len(seen) == 16
        return results + seen

    both(lambda: with_lora(Stack(), in_front()), lambda: leaf(4, 5, 32)(), run)


def test_global_hooks_see_what_they_saw() -> None:
    def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        handle = nn.modules.module.register_module_forward_hook(lambda m, a, out: seen.append(out.detach().clone()))
        with handle:
            return passes(model, x) + seen

    both(lambda: with_lora(Stack(), in_front()), leaf(4, 5, 32), run)


class Half(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


@pytest.mark.parametrize("where", ["base", "down", "up"])
@pytest.mark.parametrize("how", ["parametrized", "replaced"])
def test_changed_parts(where: str, how: str) -> None:
    def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        for module in list(model.modules()):
            if isinstance(module, Scaled):
                part = module.get_submodule(where)
                if how == "parametrized":
                    parametrize.register_parametrization(part, "weight", Half())
                else:
                    part.forward = lambda x, part=part: functional.linear(x, part.weight).sin()
        return passes(model, x)

    both(lambda: with_lora(Stack(), in_front()), leaf(4, 5, 32), run, fused=8)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "forward mode", "trace", "functional_call"])
def test_transforms(transform: str) -> None:
    def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if transform == "vmap":
                return [torch.func.vmap(model)(x).detach()]
            if transform == "grad":
                return [torch.func.grad(lambda x: model(x).sum())(x).detach()]
            if transform == "jvp":
                return [t.detach() for t in torch.func.jvp(model, (x,), (x,))]
            if transform == "forward mode":
                with torch.autograd.forward_ad.dual_level():
                    y = model(torch.autograd.forward_ad.make_dual(x, x * 2))
                    return [t.detach() for t in torch.autograd.forward_ad.unpack_dual(y)]
            if transform == "trace":
                return [torch.jit.trace(model, (x,))(x).detach()]
            lent = {name: parameter * 2 for name, parameter in model.named_parameters()}
            return [torch.func.functional_call(model, lent, (x,)).detach()]

    both(lambda: with_lora(Stack(), in_front()), leaf(4, 5, 32), run, fused=8)


def test_selective_checkpointing_keeps_the_output_of_the_linear() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def run(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            for block in model.blocks:
                x = checkpoint(
                    block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
                )
            return x

        y = forward(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in lively(model))]

    both(lambda: with_lora(Stack(), in_front()), leaf(4, 5, 32), run, fused=8)


# ---- what it is to a network ----


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("make", [in_front, in_place])
def test_no_tensor_waits_for_the_garbage_collector(make: Any, reentrant: Any) -> None:
    model = with_lora(Stack(reentrant=reentrant), make())
    assert len(viking.fuse_lora(model).fused) == 8
    x = leaf(4, 9, 32)()
    passes(model, x)  # what torch imports at its first backward leaves garbage of its own
    gc.collect()
    was_enabled, debug = gc.isenabled(), gc.get_debug()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        passes(model, x)
        with torch.no_grad():
            model(x)
        gc.collect()
        assert [o for o in gc.garbage if isinstance(o, (torch.Tensor, Deferred))] == []
    finally:
        gc.set_debug(debug)
        gc.garbage.clear()
        if was_enabled:
            gc.enable()


def test_a_second_call_changes_nothing() -> None:
    model = with_lora(Stack(), in_front())
    first = viking.fuse_lora(model)
    before = [dict(vars(module)) for module in model.modules()]

    again = viking.fuse_lora(model)

    assert again.fused == first.fused
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("make", [in_front, in_place])
@pytest.mark.parametrize("attach", ["never", "before", "after", "detached"])
def test_unfuse_leaves_nothing_behind(make: Any, attach: str) -> None:
    model = with_lora(Stack(), make())
    before = [sorted(vars(module)) for module in model.modules()]
    expected = passes(model, leaf(4, 32)())
    model.zero_grad()
    if attach == "before":
        viking.attach(model, "cpu", weights_budget=0, progress=False)
    viking.fuse_lora(model)
    if attach in ("after", "detached"):
        viking.attach(model, "cpu", weights_budget=0, progress=False)
    if attach == "detached":
        viking.detach(model)

    viking.unfuse_lora(model)

    viking.detach(model)
    assert [sorted(vars(module)) for module in model.modules()] == before
    forwards = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    assert all(isinstance(forward.__self__, Replacing) for forward in forwards)
    found = passes(model, leaf(4, 32)())
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    viking.unfuse_lora(model)


@pytest.mark.parametrize("make", [in_front, in_place])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_fused_and_their_own(make: Any, copied: Any) -> None:
    model = with_lora(Stack(), make())
    expected = passes(copy.deepcopy(model), leaf(4, 32)())
    state = model.state_dict()
    viking.fuse_lora(model)
    assert list(model.state_dict()) == list(state)

    twin = copied(model)

    for parameter in model.parameters():
        parameter.data.zero_()
    found = passes(twin, leaf(4, 32)())
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert len(viking.fuse_lora(twin).fused) == 8


def test_what_is_no_network_with_a_lora() -> None:
    with pytest.raises(ValueError, match="has no LoRA"):
        viking.fuse_lora(Stack())
    with pytest.raises(ValueError, match="this int has no LoRA"):
        viking.fuse_lora(3)


def test_what_stays_as_it_is_has_a_reason() -> None:
    class Conv(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.lora_down, self.lora_up = nn.Conv2d(3, 2, 3, bias=False), nn.Conv2d(2, 3, 1, bias=False)

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    linear, late = nn.Linear(8, 8), nn.Linear(8, 8)
    unapplied, biased, other, covered = (Replacing(nn.Linear(8, 8), 2, 1.0) for _ in range(4))
    del unapplied.org_forward
    biased.lora_up.bias = nn.Parameter(torch.zeros(8))
    other.lora_up.__class__ = Own
    covered.org_forward.__self__.forward = lambda x: x
    network = nn.ModuleDict({
        "good": Replacing(linear, 2, 1.0), "conv": Conv(late), "unapplied": unapplied, "biased": biased, "own": other,
        "covered": covered, "own base": Replacing(Own(8, 8), 2, 1.0),
    })

    report = viking.fuse_lora(network)

    assert report.fused == ["good"]
    assert report.kept == {
        "conv": "its factors are no Linear layers",
        "unapplied": "it was not applied to a layer",
        "biased": "its factors have a bias",
        "own": "its factors have a forward of their own",
        "covered": "it does not stand for its layer's forward",
        "own base": "its layer is a Own with a forward of its own",
    }


def test_a_network_in_the_layout_of_ai_toolkit() -> None:
    class Network:
        def __init__(self) -> None:
            self.unet_loras = [Replacing(nn.Linear(8, 8), 2, 1.0)]
            self.text_encoder_loras = [Replacing(nn.Linear(8, 8), 2, 1.0)]

    assert viking.fuse_lora(Network()).fused == ["unet_loras.0", "text_encoder_loras.0"]


def test_the_bench_lora_is_one() -> None:
    lora = Lora(nn.Linear(HIDDEN, HIDDEN), 4, torch.device("cpu"), torch.float32)
    assert viking.fuse_lora(nn.Sequential(lora)).fused == ["0"]


def test_a_feed_forward_part_is_no_lora() -> None:
    model, _ = build("wrapper")
    report = viking.fuse_lora(model)
    assert all(name.rpartition(".")[2] in ("qkv", "proj", "up", "down") for name in report.fused)


def test_compile() -> None:
    model = with_lora(Stack(), in_front())
    expected = model(inputs(0, shape=(4, 32)))
    viking.fuse_lora(model)

    found = torch.compile(model, backend="eager")(inputs(0, shape=(4, 32)))

    assert same_bits(found.detach(), expected.detach())
