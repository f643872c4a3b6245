"""Training with streamed weights gives the same bits as training without Viking."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.models import CHECKPOINTING, LORA_STYLES, Net, build, wrap
from support.training import Outcome, assert_same, inputs, one_step, train
from viking import _engine
from viking.nn.device import DeviceEngine

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: of a Net of depth 3 in fp32, its weights are 540 kB
BUDGETS = {"smallest": 0, "some": 0.5, "all": 2.0}

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


def attach(model: nn.Module, share: float = 0.0) -> nn.Module:
    """Attach with a budget of that share of all Linear bytes."""
    total = sum(
        p.numel() * p.element_size()
        for m in model.modules()
        if isinstance(m, nn.Linear)
        for p in m.parameters(recurse=False)
    )
    viking.attach(model, "cpu", weights_budget=int(total * share), progress=False)
    assert any("_layer_memory_manager" in m.__dict__ for m in model.modules())
    return model


@functools.cache
def resident(style: str, dtype: torch.dtype, checkpointing: str, bias: bool) -> Outcome:
    return train(*build(style, dtype=dtype, checkpointing=checkpointing, bias=bias, depth=2), dtype=dtype)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("style", [pytest.param(s, marks=needs_peft if s == "peft" else ()) for s in LORA_STYLES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_losses_gradients_and_lora_weights_are_the_same(
    checkpointing: str, budget: str, dtype: torch.dtype, style: str, bias: bool
) -> None:
    model, trained = build(
        style, lambda m: attach(m, BUDGETS[budget]), dtype=dtype, checkpointing=checkpointing, bias=bias, depth=2
    )

    mine = train(model, trained, dtype=dtype)

    assert_same(mine, resident(style, dtype, checkpointing, bias))
    paths = {w.path for w in viking.stats(model).weights} - {"unmanaged"}
    assert paths == {"smallest": {"streamed"}, "some": {"streamed"}, "all": {"resident"}}[budget] or budget == "some"


# ---- what happens around a step ----


def both(change: Any = lambda model: None, budget: float = 0.0, **how: Any) -> tuple[Outcome, Outcome, nn.Module]:
    """The same training streamed and resident. `change(model)` returns what is called before each step, or None."""
    net = {key: how.pop(key) for key in ("checkpointing", "depth", "style", "dtype", "bias") if key in how}
    style = net.pop("style", "wrapper")
    outcomes = []
    for attaching in (lambda model: attach(model, budget), lambda model: None):
        model, trained = build(style, attaching, **net)
        before = change(model)
        more = {} if before is None else {"before_step": before}
        outcomes.append(train(model, trained, dtype=net.get("dtype", torch.float32), **how, **more))
        if len(outcomes) == 1:
            streamed = model
    return outcomes[0], outcomes[1], streamed


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_gradients_accumulate(checkpointing: str) -> None:
    mine, theirs, _ = both(checkpointing=checkpointing, accumulate=3)

    assert_same(mine, theirs)


def test_two_forwards_may_come_before_two_backwards() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first, second = model(x).square().mean(), model(x + 1).square().mean()
        second.backward()
        first.backward()
        return (first + second).detach()

    mine, theirs, _ = both(step_with=step, checkpointing="early stop")

    assert_same(mine, theirs)


@pytest.mark.parametrize("around", ["forward", "forward and backward"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_autocast_gives_the_same(checkpointing: str, dtype: torch.dtype, autocast: torch.dtype, around: str) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", autocast):
            loss = model(x).float().square().mean()
            if around != "forward":
                loss.backward()
        if around == "forward":
            loss.backward()
        return loss.detach()

    mine, theirs, _ = both(checkpointing=checkpointing, dtype=dtype, step_with=step, steps=3)

    assert_same(mine, theirs)


def test_train_and_eval_take_turns() -> None:
    def turns(model: nn.Module) -> Any:
        model.blocks[0].norm.register_forward_hook(
            lambda m, args, y: nn.functional.dropout(y, 0.5, training=m.training)
        )

        def before(step: int) -> None:
            torch.manual_seed(step)
            model.train(step % 2 == 0)

        return before

    mine, theirs, _ = both(turns, steps=6, checkpointing="reentrant")

    assert_same(mine, theirs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_sampling_between_steps_changes_nothing(mode: Any, budget: float) -> None:
    samples: list[torch.Tensor] = []

    def sampling(model: nn.Module) -> Any:
        def before(step: int) -> None:
            with mode():
                samples.append(model(inputs(step + 50)).clone())

        return before

    mine, theirs, _ = both(sampling, budget, checkpointing="early stop", steps=5)

    assert_same(mine, theirs)
    assert all(torch.equal(a, b) for a, b in zip(samples[:5], samples[5:], strict=True))


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_nothing_is_learned_twice_when_sampling_and_training_take_turns(budget: float) -> None:
    model, trained = build(checkpointing="early stop")
    attach(model, budget)

    def sample() -> None:
        with torch.inference_mode():
            for _ in range(3):
                model(inputs(0))

    train(model, trained, 3)
    sample()
    train(model, trained, 3)
    sample()
    learned = viking.stats(model)
    for _ in range(4):
        train(model, trained, 3)
        sample()

    after = viking.stats(model)
    assert after.steps > learned.steps
    assert after.demand_fetches == learned.demand_fetches
    assert after.replans == learned.replans


def test_a_steady_step_fetches_what_the_plan_must_and_writes_nothing() -> None:
    model, trained = build(checkpointing="early stop", depth=6)
    attach(model, 0.5)
    train(model, trained, 6)

    steady = viking.stats(model)
    train(model, trained, 6)

    after = viking.stats(model)
    assert after.demand_fetches == steady.demand_fetches
    assert after.written_bytes == 0
    assert 1.0 <= after.plan_ratio < 1.25
    assert after.slab_bytes <= after.weights_budget_bytes


def test_layers_skipped_repeated_and_reversed_give_the_same() -> None:
    def orders(model: nn.Module) -> Any:
        choose = random.Random(7)

        def before(step: int) -> None:
            model.order = choose.choice(
                [None, [0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 1, 2, 3, 3], [2], choose.sample(range(4), 3)]
            )

        return before

    for checkpointing, budget in itertools.product(CHECKPOINTING, (0.0, 0.4)):
        mine, theirs, model = both(orders, budget, checkpointing=checkpointing, depth=4, steps=8)

        assert_same(mine, theirs)
        viking.detach(model)


def test_slow_copies_with_random_delays_give_the_same() -> None:
    for seed, (checkpointing, budget) in enumerate(itertools.product(CHECKPOINTING, (0.0, 0.3, 0.7))):
        DeviceEngine.make_engine = lambda device, seed=seed: _engine.Engine(
            "host", bytes_per_second=200_000_000, delay_ns=300_000, seed=seed + 1
        )

        mine, theirs, model = both(budget=budget, checkpointing=checkpointing, depth=3, steps=4)

        assert_same(mine, theirs)
        viking.detach(model)


def test_orders_that_change_under_delays_give_the_same() -> None:
    def orders(model: nn.Module) -> Any:
        choose = random.Random(3)

        def before(step: int) -> None:
            model.order = choose.sample(range(4), choose.randrange(1, 5))
            with torch.no_grad():
                model(inputs(step))

        return before

    DeviceEngine.make_engine = lambda device: _engine.Engine(
        "host", bytes_per_second=500_000_000, delay_ns=200_000, seed=5
    )

    mine, theirs, _ = both(orders, 0.3, checkpointing="early stop", depth=4, steps=12)

    assert_same(mine, theirs)


def test_edits_under_delays_are_seen_by_the_very_next_use() -> None:
    def edits(model: nn.Module) -> Any:
        linears = [m for m in model.modules() if isinstance(m, nn.Linear) and not m.weight.requires_grad]

        def before(step: int) -> None:
            with torch.no_grad():
                for linear in linears[step % 3 :: 2]:
                    linear.weight.mul_(0.9)

        return before

    DeviceEngine.make_engine = lambda device: _engine.Engine(
        "host", bytes_per_second=500_000_000, delay_ns=200_000, seed=6
    )

    mine, theirs, _ = both(edits, 0.3, checkpointing="reentrant", steps=6)

    assert_same(mine, theirs)


# ---- one Linear ----


def grids() -> list[tuple[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    return [
        ("1-d", randn(64)),
        ("2-d", randn(7, 64)),
        ("3-d", randn(2, 7, 64)),
        ("4-d", randn(2, 3, 5, 64)),
        ("one row", randn(1, 64)),
        ("one row of three dimensions", randn(1, 1, 64)),
        ("square and column-major", randn(64, 64).t()),
        ("column-major", randn(64, 9).t()),
        ("transposed batch", randn(7, 2, 64).transpose(0, 1)),
        ("transposed 3-d", randn(2, 64, 7).transpose(1, 2)),
        ("transposed 4-d", randn(2, 3, 64, 5).transpose(2, 3)),
        ("attention heads put together", randn(2, 4, 6, 16).transpose(1, 2).reshape(2, 6, 64)),
        ("expanded rows", randn(1, 64).expand(6, 64)),
        ("expanded batch", randn(1, 5, 64).expand(3, 5, 64)),
        ("every second column", randn(4, 128)[:, ::2]),
        ("every second row", randn(8, 64)[::2]),
        ("a chunk of columns", randn(2, 5, 192)[..., 64:128]),
        ("zero rows", randn(0, 64)),
        ("zero rows of three dimensions", randn(2, 0, 64)),
    ]


def like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in another dtype, with its strides."""
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(dtype, copy=True)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("layout", ["row-major", "column-major"])
def test_inputs_of_any_shape_and_stride(layout: str, bias: bool, dtype: torch.dtype) -> None:
    for out_features in (96, 64):
        linear = nn.Linear(64, out_features, bias=bias).requires_grad_(False).to(dtype)
        if layout == "column-major":
            linear.weight.data = linear.weight.data.t().contiguous().t()
        model = nn.Sequential(linear)
        for name, x in grids():
            results = []
            for attached in (False, True):
                if attached:
                    attach(model)
                leaf = like(x, dtype)
                leaf = leaf.detach().requires_grad_(True)
                y = model(leaf)
                g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
                (gradient,) = torch.autograd.grad(y, leaf, g)
                results.append((y.detach(), gradient, y.stride()))
                viking.detach(model)
            (y, gradient, stride), (streamed_y, streamed_gradient, streamed_stride) = results
            assert torch.equal(y, streamed_y), f"{name}: outputs differ"
            assert stride == streamed_stride, f"{name}: strides of the output differ"
            assert torch.equal(gradient, streamed_gradient), f"{name}: gradients differ"


def test_an_incoming_gradient_of_any_stride() -> None:
    def loss_of(y: torch.Tensor, kind: str) -> torch.Tensor:
        if kind == "expanded":
            return y.sum()
        if kind == "transposed":
            return (y.transpose(-1, -2).contiguous() * weights).sum()
        return (y[..., ::2] * y[..., 1::2]).sum()

    weights = torch.randn(2, 96, 7, generator=torch.Generator().manual_seed(2))
    model = nn.Sequential(nn.Linear(64, 96)).requires_grad_(False)
    for kind in ("expanded", "transposed", "strided"):
        gradients = []
        for attached in (False, True):
            if attached:
                attach(model)
            x = inputs(0, shape=(2, 7, 64)).requires_grad_(True)
            gradients.append(torch.autograd.grad(loss_of(model(x), kind), x)[0])
            viking.detach(model)
        assert torch.equal(*gradients), kind


def test_the_input_may_come_by_keyword_and_need_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    x = inputs(0)
    expected = model[0](input=x)
    attach(model)

    y = model[0](input=x)

    assert torch.equal(y, expected)
    assert not y.requires_grad


def test_a_wrong_call_raises_what_a_linear_raises_and_leaves_no_use_open() -> None:
    model, trained = build()
    linear = model.enter
    attach(model)

    with pytest.raises(TypeError):
        linear()
    with pytest.raises(TypeError):
        linear(1, 2)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        linear(torch.zeros(2, 7))

    viking.detach(model)  # refuses while a use is open
    assert_same(train(model, trained), train(*build()))


@pytest.mark.parametrize("budget", [0.0, 2.0])
def test_hooks_on_linears_see_the_same(budget: float) -> None:
    seen: list[tuple[str, torch.Tensor]] = []

    def watch(model: nn.Module) -> None:
        for linear in (model.enter, model.blocks[1].up.base_layer, model.leave):
            linear.register_forward_pre_hook(
                lambda m, args: seen.append(("in", args[0].detach().clone())) or (args[0] * 1.5,))
            linear.register_forward_hook(lambda m, args, y: seen.append(("out", y.detach().clone())) or y + 0.25)
            linear.register_full_backward_hook(
                lambda m, grad_in, grad_out: seen.extend(
                    ("grad", g.clone()) for g in (*grad_in, *grad_out) if g is not None
                )
            )
            linear.register_full_backward_pre_hook(lambda m, grad_out: (grad_out[0] * 2,))

    mine, theirs, _ = both(watch, budget)

    assert_same(mine, theirs)
    half = len(seen) // 2
    assert half > 12
    for (kind, a), (other, b) in zip(seen[:half], seen[half:], strict=True):
        assert kind == other
        assert torch.equal(a, b)


def test_a_block_whose_input_needs_no_gradient() -> None:
    class Free(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = self._run(block, x)
            return x

    for checkpointing in ("off", "early stop", "no early stop"):
        outcomes = []
        for streamed in (True, False):
            model = wrap(Free(checkpointing=checkpointing))
            if streamed:
                attach(model)
            outcomes.append(train(model, [p for p in model.parameters() if p.requires_grad]))
        assert_same(*outcomes)


def test_gradients_of_the_models_input_are_the_same() -> None:
    model, _ = build(checkpointing="early stop")
    x = inputs(0).requires_grad_(True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    attach(model)

    (gradient,) = torch.autograd.grad(model(x).square().sum(), x)

    assert torch.equal(gradient, expected)


def test_a_graph_may_be_run_backward_twice() -> None:
    model, _ = build()
    x = inputs(0).requires_grad_(True)
    expected = torch.autograd.grad(model(x).square().sum(), x)[0]
    attach(model)
    loss = model(x).square().sum()

    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    second = torch.autograd.grad(loss, x)[0]

    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


# ---- exceptions in the middle of a step ----


class Failure(Exception):
    pass


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Failure


@pytest.mark.parametrize("where", ["forward", "recompute", "backward", "inside a Linear"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_after_an_exception_in_a_step_the_next_step_is_right(checkpointing: str, where: str) -> None:
    if where == "recompute" and checkpointing == "off":
        pytest.skip("nothing is computed again")

    def failing(model: nn.Module) -> Any:
        block = model.blocks[1]
        calls = itertools.count()

        def fail(module: nn.Module, args: Any) -> Any:
            count = next(calls)
            if where == "backward":
                return (RaisesInBackward.apply(args[0]),)
            if where == "inside a Linear":
                return (args[0][..., :3],)
            if where == "forward" or count == 1:
                raise Failure
            return None

        def before(step: int) -> None:
            nonlocal calls
            if step in (0, 3):
                calls = itertools.count()
                handle = block.up.base_layer.register_forward_pre_hook(fail)
                with pytest.raises((Failure, RuntimeError)), contextlib.suppress(AttributeError):
                    one_step(model, inputs(90))
                handle.remove()
                model.zero_grad()

        return before

    mine, theirs, model = both(failing, 0.3, checkpointing=checkpointing, steps=5)

    assert_same(mine, theirs)
    viking.detach(model)  # refuses while a use is open


def test_a_keyboard_interrupt_in_a_step_leaves_no_use_open() -> None:
    model, trained = build(checkpointing="early stop")
    attach(model)

    def interrupt(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[2].norm.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        one_step(model, inputs(0))
    handle.remove()

    assert_same(train(model, trained), train(*build(checkpointing="early stop")))


def test_attaching_in_the_middle_of_a_training_changes_nothing() -> None:
    def attach_at_step_2(model: nn.Module) -> Any:
        def before(step: int) -> None:
            if step == 2:
                attach(model, 0.4)
            if step == 4:
                viking.detach(model)

        return before

    model, trained = build(checkpointing="reentrant")
    mine = train(model, trained, 6, before_step=attach_at_step_2(model))

    assert_same(mine, train(*build(checkpointing="reentrant"), 6))


# ---- under whatever context ----


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        torch.enable_grad,
    ],
    ids=["no_grad", "inference_mode", "autocast", "default device", "enable_grad"],
)
def test_attach_detach_and_the_first_uses_may_happen_in_any_context(context: Any) -> None:
    model, trained = build(checkpointing="early stop")
    with torch.inference_mode():
        expected = model(inputs(0)).clone()
    with context():
        attach(model, 0.5)
    with torch.inference_mode():
        assert torch.equal(model(inputs(0)), expected)
    mine = train(model, trained)
    with context():
        viking.detach(model)

    fresh, its_trained = build(checkpointing="early stop")
    assert_same(mine, train(fresh, its_trained))
    assert_same(train(model, trained), train(fresh, its_trained))


def test_a_part_may_be_called_without_its_root() -> None:
    model, trained = build()
    attach(model)

    def step(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = m.leave(m.blocks[2](m.blocks[0](m.enter(x)))).square().mean()
        loss.backward()
        return loss.detach()

    assert_same(train(model, trained, step_with=step), train(*build(), step_with=step))


def test_what_is_found_while_sampling_in_inference_mode_can_be_trained() -> None:
    """A wrapped Linear that comes late, and a replaced weight, are taken in inside inference_mode."""
    outcomes = []
    for streamed in (True, False):
        model, trained = build()
        if streamed:
            attach(model)
        late = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            late.weight.copy_(model.leave.weight)
        model.leave = late.requires_grad_(False)
        model.enter.weight = nn.Parameter(model.enter.weight.detach().clone(), requires_grad=False)
        with torch.inference_mode():
            model(inputs(0))
        model.enter.weight.requires_grad_(True)
        model.leave.weight.requires_grad_(True)
        outcomes.append(train(model, [*trained, model.enter.weight, model.leave.weight]))

    assert_same(*outcomes)
