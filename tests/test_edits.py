"""Edits of weights while they are streamed: the very next use sees them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.models import Net, build
from support.training import assert_same, inputs, train
from viking import _engine
from viking.nn import managing, storage
from viking.nn.device import DeviceEngine


def attach(model: nn.Module, budget: Any = 0) -> nn.Module:
    return viking.attach(model, "cpu", weights_budget=budget, progress=False)


def in_place(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight.mul_(1.5)


def bias_in_place(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.bias.add_(1)


def rows_in_place(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight[3:7] = 0


def load(linear: nn.Linear) -> None:
    linear.load_state_dict({name: t * 0.5 for name, t in linear.state_dict().items()})


def load_and_assign(linear: nn.Linear) -> None:
    linear.load_state_dict({name: t * 0.5 for name, t in linear.state_dict().items()}, assign=True)
    linear.requires_grad_(False)


def other_data(linear: nn.Linear) -> None:
    linear.weight.data = linear.weight.data * 0.5


def other_parameter(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.detach() * 0.25, requires_grad=False)


def other_bias(linear: nn.Linear) -> None:
    linear.bias = nn.Parameter(linear.bias.detach() + 2, requires_grad=False)


def no_bias(linear: nn.Linear) -> None:
    linear.bias = None


def other_strides(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter((linear.weight.detach() * 2).t().contiguous().t(), requires_grad=False)


def other_shape(linear: nn.Linear) -> None:
    """Twice the columns and an input that is put together twice would need both; half of the rows fits as it is."""
    linear.weight = nn.Parameter(torch.cat([linear.weight.detach(), linear.weight.detach()]), requires_grad=False)
    linear.bias = nn.Parameter(torch.cat([linear.bias.detach(), linear.bias.detach()]), requires_grad=False)


def as_a_view_of_another(linear: nn.Linear) -> None:
    storage = torch.arange(128 * 64, dtype=torch.float32).view(128, 64) / 9000
    linear.weight.data = storage[32:96]


EDITS = [in_place, bias_in_place, rows_in_place, load, load_and_assign, other_data, other_parameter, other_bias,
         no_bias, other_strides, other_shape, as_a_view_of_another]


@pytest.mark.parametrize("budget", [0, "1MB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("edit", EDITS)
def test_the_next_use_sees_the_edit(edit: Callable[[nn.Linear], None], budget: Any) -> None:
    def pair() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)

    streamed, resident = attach(pair(), budget), pair()
    x = inputs(0)
    for _ in range(3):
        assert torch.equal(streamed(x), resident(x))
    for target in (2, 1, 2):
        if edit is other_shape and target == 1:
            continue
        for model in (streamed, resident):
            edit(model[target])

        for _ in range(2):
            assert torch.equal(streamed(x), resident(x))
    viking.detach(streamed)
    assert torch.equal(streamed(x), resident(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_parameter_of_another_dtype(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    attach(model)
    x = inputs(0)
    model(x)
    model[1].weight = nn.Parameter(model[1].weight.to(dtype), requires_grad=False)
    model[1].bias = nn.Parameter(model[1].bias.to(dtype), requires_grad=False)
    expected = nn.functional.linear(model[0](x).to(dtype), model[1].weight, model[1].bias)

    assert torch.equal(model[1](model[0](x).to(dtype)), expected)


@pytest.mark.parametrize(
    "convert", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu", torch.half)])
def test_converting_an_attached_model_converts_what_is_streamed(convert: Callable[[nn.Module], nn.Module]) -> None:
    streamed, resident = Net(), Net()
    attach(streamed)
    streamed(inputs(0))

    identities = [id(p) for p in streamed.parameters()]
    for model in (streamed, resident):
        assert convert(model) is model

    x = inputs(1, resident.enter.weight.dtype)
    assert [id(p) for p in streamed.parameters()] == identities
    assert torch.equal(streamed(x), resident(x))
    assert streamed.enter.weight.dtype == x.dtype
    viking.detach(streamed)
    assert torch.equal(streamed(x), resident(x))


def test_moving_to_the_device_it_is_on_does_nothing() -> None:
    model = attach(Net())
    pointers = [p.data_ptr() for p in model.parameters()]
    expected = model(inputs(0))
    model(inputs(0))  # the first path is known now and has its layout
    stats = viking.stats(model)

    model.to("cpu").to(torch.device("cpu")).cpu().float().to(torch.float32)

    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert torch.equal(model(inputs(0)), expected)
    assert viking.stats(model).replans == stats.replans


def test_writes_that_torch_does_not_count_are_seen_after_refresh() -> None:
    model = attach(nn.Sequential(nn.Linear(64, 64)).requires_grad_(False), "1MB")
    x = inputs(0)
    model(x)
    model[0].weight.data.add_(1)
    expected = nn.functional.linear(x, model[0].weight, model[0].bias)
    assert not torch.equal(model(x), expected)  # what the resident copy still holds

    viking.refresh(model)

    assert torch.equal(model(x), expected)


def test_editing_refreshes_at_its_end_also_after_an_exception() -> None:
    model = attach(nn.Sequential(nn.Linear(64, 64)).requires_grad_(False), "1MB")
    x = inputs(0)
    model(x)
    for fail in (False, True):
        with pytest.raises(ZeroDivisionError) if fail else viking.editing(model):
            if fail:
                with viking.editing(model):
                    model[0].weight.data.copy_(torch.randn(64, 64))
                    raise ZeroDivisionError
            model[0].weight.data.copy_(torch.randn(64, 64))

        assert torch.equal(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))


def test_weights_that_were_scribbled_over_inside_editing_are_right_after_it() -> None:
    """Slow copies of the look-ahead are under way when it begins; whatever they have read is not used."""
    DeviceEngine.make_engine = lambda device: _engine.Engine(
        "host", bytes_per_second=20_000_000, delay_ns=500_000, seed=4)
    model, trained = build(checkpointing="early stop")
    attach(model)

    def scribble(step: int) -> None:
        with viking.editing(model):
            saved = {n: p.data.clone() for n, p in model.named_parameters() if not p.requires_grad}
            for name, p in model.named_parameters():
                if name in saved:
                    p.data.fill_(float("nan"))
                    p.data.copy_(saved[name])

    assert_same(train(model, trained, 3, before_step=scribble), train(*build(checkpointing="early stop"), 3))


def test_editing_waits_for_the_copies_that_read_the_homes() -> None:
    """Copies take 8 ms each, and the look-ahead has queued some when the step returns."""
    DeviceEngine.make_engine = lambda device: _engine.Engine("host", bytes_per_second=2_000_000, seed=1)
    model = attach(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6))).requires_grad_(False), 4 * 16384)
    for step in range(3):
        with torch.no_grad():
            model(inputs(step))

    with viking.editing(model):
        slab = model._memory_manager.device.slab
        before = slab.clone()
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            assert torch.equal(slab, before), "a copy was under way"


@pytest.mark.parametrize("checkpointing", ["off", "reentrant", "early stop"])
@pytest.mark.parametrize("budget", [0, 250_000, "1MB"])
def test_a_streamed_weight_that_begins_to_require_a_gradient_trains(checkpointing: str, budget: Any) -> None:
    outcomes = []
    for streamed in (True, False):
        model, trained = build(checkpointing=checkpointing)
        if streamed:
            attach(model, budget)
        train(model, trained, 3)
        linears = [model.enter, model.blocks[1].up.base_layer, model.leave]
        more = [p for linear in linears for p in (linear.weight, linear.bias)]
        more.append(model.blocks[2].down.base_layer.bias)
        for p in more:
            p.requires_grad_(True)
        outcomes.append(train(model, trained + more, 4))
        for p in more:
            p.requires_grad_(False)
        outcomes[-1].losses.extend(train(model, trained, 3).losses)

    assert_same(*outcomes)


def test_one_tied_weight_gets_the_gradients_of_both_its_uses() -> None:
    outcomes = []
    for streamed in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).requires_grad_(False)
        model[2].weight = model[0].weight
        if streamed:
            attach(model)
        model[0].weight.requires_grad_(True)
        outcomes.append(train(model, [model[0].weight], 4))

    assert_same(*outcomes)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(("owner", "name"), [(storage, "Home"), (managing, "_tensor_over"),
                                             (DeviceEngine, "relayout"), (DeviceEngine, "pin")])  # fmt: skip
def test_a_replaced_weight_that_could_not_be_brought_home_is_brought_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: type[BaseException]
) -> None:
    model = attach(Net(depth=2))
    with torch.no_grad():
        model(inputs(0))
        other_parameter(model.blocks[1].up)

        def fail(*args: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(error):
                model(inputs(0))

        result = model(inputs(0))

    viking.detach(model)
    with torch.no_grad():
        assert torch.equal(result, model(inputs(0)))
    assert not any("_layer_memory_manager" in m.__dict__ or "_apply" in m.__dict__ for m in model.modules())


def test_a_replaced_weight_leaves_nothing_of_the_old_one_in_host_memory() -> None:
    model = attach(nn.Sequential(nn.Linear(64, 64)).requires_grad_(False))
    home = model[0]._layer_memory_manager.home
    for _ in range(5):
        model[0].weight = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        model(inputs(0))

    assert model[0]._layer_memory_manager.home is not home
    assert model[0].weight.data_ptr() == model[0]._layer_memory_manager.home_ptr
    assert viking.stats(model).streamed_bytes + viking.stats(model).resident_bytes <= 64 * 64 * 4 + 512


def test_a_weight_edited_between_forward_and_backward_raises_as_torch_does() -> None:
    for streamed in (False, True):
        model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
        if streamed:
            attach(model)
        x = inputs(0).requires_grad_(True)
        loss = model(x).sum()
        with torch.no_grad():
            model[0].weight.add_(1)

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
