"""detach: everything is as before attach."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.models import LORA_STYLES, Net, build, hijack
from support.state import Snapshot
from support.training import assert_same, inputs, one_step, train
from viking.nn.device import DeviceEngine


def attach(model: nn.Module, **how: Any) -> nn.Module:
    return viking.attach(model, "cpu", progress=False, **{"weights_budget": 0, **how})


@pytest.mark.parametrize("budget", [0, "1MB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("style", [s for s in LORA_STYLES if s not in ("peft", "hijacked after")])
def test_nothing_of_the_model_has_changed(style: str, dtype: torch.dtype, budget: Any) -> None:
    model, _ = build(style, dtype=dtype)
    x = inputs(0, dtype)
    with torch.no_grad():
        for linear in (model.enter, model.leave):
            linear.weight.data = linear.weight.data.t().contiguous().t()  # strides of its own
        model.blocks[0].norm.weight.requires_grad_(True)
        storage = torch.randn(128, 64).to(dtype)
        model.a = nn.Linear(64, 64, bias=False).to(dtype).requires_grad_(False)
        model.b = nn.Linear(64, 64, bias=False).to(dtype).requires_grad_(False)
        model.a.weight.data, model.b.weight.data = storage[:64], storage[48:112]
        model.c = nn.Linear(64, 64).to(dtype).requires_grad_(False)
        model.c.weight = model.a.weight
    model.enter.register_forward_hook(lambda m, args, y: y * 1)
    model.register_forward_pre_hook(lambda m, args: None)
    before = Snapshot(model)
    expected = model(x).detach()

    attach(model, weights_budget=budget)
    assert model.b.weight.data_ptr() - model.a.weight.data_ptr() == 48 * 64 * dtype.itemsize
    for _ in range(3):
        one_step(model, x)
    for p in model.parameters():
        p.grad = None
    viking.detach(model)

    before.assert_unchanged()
    assert torch.equal(model(x), expected)
    assert not DeviceEngine._open


def test_a_forward_hijacked_after_attach_stays_and_leads_to_the_linears_own() -> None:
    model = attach(Net())
    network = hijack(model)
    mine = train(model, list(network.parameters()), 2)
    forwards = [m.forward for m in model.modules() if "forward" in m.__dict__ and isinstance(m, nn.Linear)
                and not isinstance(m.forward.__self__, viking.LinearLayerMemoryManager)]
    viking.detach(model)

    after = train(model, list(network.parameters()), 2)

    assert len(forwards) == 12
    assert [m.forward for m in model.modules() if "forward" in m.__dict__] == forwards
    fresh = Net()
    its_network = hijack(fresh)
    assert_same(mine, train(fresh, list(its_network.parameters()), 2))
    assert_same(after, train(fresh, list(its_network.parameters()), 2))


def test_detaching_twice_or_what_was_never_attached_does_nothing() -> None:
    model = Net()
    before = Snapshot(model)

    viking.detach(model)
    attach(model)
    viking.detach(model)
    viking.detach(model)

    before.assert_unchanged()


def test_a_state_dict_outlives_detach_and_the_model() -> None:
    model = Net()
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    attach(model)
    train(model, [model.blocks[0].norm.weight.requires_grad_(True)], 1)
    state = model.state_dict()
    expected["blocks.0.norm.weight"] = state["blocks.0.norm.weight"].clone()

    viking.detach(model)
    del model
    gc.collect()
    filler = [torch.full((1 << 16,), 7.0) for _ in range(16)]

    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], t) for name, t in expected.items())
    assert len(filler) == 16


def test_a_state_dict_taken_while_attached_is_an_ordinary_one() -> None:
    model = attach(Net())
    plain = Net()

    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)

    assert list(loaded) == list(plain.state_dict())
    assert all(torch.equal(loaded[name], t) for name, t in plain.state_dict().items())


@pytest.mark.parametrize("checkpointing", ["off", "reentrant", "early stop"])
def test_backward_through_a_graph_of_before_raises_one_clear_error(checkpointing: str) -> None:
    model, trained = build(checkpointing=checkpointing)
    attach(model)
    loss = model(inputs(0)).square().mean()
    viking.detach(model)

    with pytest.raises(RuntimeError, match=r"detached from Viking: .*run backward before viking\.detach"):
        loss.backward()

    model.zero_grad()
    assert_same(train(model, trained, 2), train(*build(checkpointing=checkpointing), 2))


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy.deepcopy of a part": lambda model: copy.deepcopy(model.blocks[0]),
    "pickle": pickle.dumps,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "torch.save of a Linear": lambda model: torch.save(model.enter, io.BytesIO()),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("style", ["wrapper", "hijacked before", "hijacked after"])
def test_copies_of_an_attached_model_are_refused_in_one_sentence(style: str, how: str) -> None:
    if "hijacked" in style and how in ("pickle", "torch.save"):
        pytest.skip("torch itself cannot pickle this")
    model, trained = build(style, attach)

    with pytest.raises(TypeError, match=r"streamed cannot be .*state_dict\(\), or call viking\.detach\(model\) first"):
        COPIES[how](model)

    assert_same(train(model, trained, 2), train(*build(style), 2))


def test_a_detached_model_can_be_copied_and_attached_again() -> None:
    model, _ = build()
    attach(model)
    train(model, [p for p in model.parameters() if p.requires_grad], 2)
    viking.detach(model)

    twin = copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    attach(model, weights_budget=200_000)
    attach(twin)

    parameters = [[p for p in m.parameters() if p.requires_grad] for m in (model, twin)]
    assert_same(train(model, parameters[0], 3), train(twin, parameters[1], 3))


def test_detach_in_the_middle_of_a_training_lets_it_go_on() -> None:
    model, trained = build(checkpointing="early stop")
    attach(model)

    def before(step: int) -> None:
        if step == 2:
            viking.detach(model)

    assert_same(train(model, trained, 4, before_step=before), train(*build(checkpointing="early stop"), 4))


def test_what_was_edited_while_attached_stays_edited() -> None:
    model = attach(Net())
    with torch.no_grad():
        model.enter.weight.fill_(0.5)
    replaced = nn.Parameter(torch.ones(64, 64), requires_grad=False)
    model.leave.weight = replaced
    model(inputs(0))

    viking.detach(model)

    assert bool((model.enter.weight == 0.5).all())
    assert model.leave.weight is replaced
    assert bool((replaced == 1).all())


def test_what_goes_back_to_a_device_keeps_strides_and_shared_storage() -> None:
    storage = torch.randn(128, 64)
    linears = [nn.Linear(64, 64, bias=bias).requires_grad_(False) for bias in (True, False)]
    linears[0].weight.data, linears[1].weight.data = storage[:64], storage[32:96].t()
    before = Snapshot(nn.ModuleList(linears))
    attached = attach(nn.ModuleList(linears))
    (weight,) = attached._memory_manager.weights.values()
    home = linears[0]._layer_memory_manager.home
    viking.detach(attached)

    for segment in weight.segments:
        weight.send_back(torch.frombuffer(home, dtype=torch.uint8), segment, torch.device("cpu"))

    before.assert_unchanged()
    at_home = range(weight.segments[0].offset, home.nbytes)
    address = torch.frombuffer(home, dtype=torch.uint8).data_ptr()
    assert all(p.data_ptr() - address not in at_home for linear in linears for p in linear.parameters())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_that_was_on_the_device_is_there_again() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.LayerNorm(512)).cuda().requires_grad_(False)
    model[1].weight = model[0].weight
    before = Snapshot(model)

    viking.attach(model, "cuda", weights_budget=0, progress=False)
    model(torch.ones(2, 512, device="cuda"))
    viking.detach(model)

    before.assert_unchanged()


def test_a_detach_works_when_what_stays_has_outgrown_its_budget() -> None:
    """The budget was enough for bf16; fp32 does not fit any more, and the next step is who says so."""
    staying, leaving = Net().bfloat16(), Net(seed=4).bfloat16()
    before = Snapshot(leaving)
    attach(staying, weights_budget=60_000)
    attach(leaving, weights_budget=60_000)
    staying.float()
    with pytest.raises(ValueError, match="is too small: the smallest that works is"):
        staying(inputs(0))

    viking.detach(leaving)

    before.assert_unchanged()
    with pytest.raises(ValueError, match="is too small: the smallest that works is"):
        staying(inputs(0))
    viking.detach(staying)
    assert not DeviceEngine._open
    assert torch.equal(staying(inputs(0)), Net().bfloat16().float()(inputs(0)))
