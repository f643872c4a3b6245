"""What attach refuses: with one sentence that says what to do, and with the model untouched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.models import Net, build
from support.state import Snapshot
from support.training import assert_same, train
from viking.nn.device import DeviceEngine

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def attach(model: Any, device: Any = "cpu", **how: Any) -> nn.Module:
    return viking.attach(model, device, progress=False, **how)


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A model that must be as before at the end of the test, and can be attached then."""
    model, trained = build()
    before = Snapshot(model)
    yield model
    before.assert_unchanged(pointers=True)
    assert not DeviceEngine._open
    attach(model)
    mine = train(model, trained, 2)
    viking.detach(model)
    assert_same(mine, train(*build(), 2))


@pytest.mark.parametrize("device", ["tpu", "", "cpu:x", None, 3.5, object()])
def test_what_is_no_device(model: nn.Module, device: Any) -> None:
    with pytest.raises(ValueError, match=r'is not a device: use "cuda", "cuda:1" or "cpu"'):
        attach(model, device)


@pytest.mark.parametrize("device", ["mps", "meta", "xpu"])
def test_devices_of_other_kinds(model: nn.Module, device: str) -> None:
    with pytest.raises(ValueError, match=f'Viking streams to "cuda" devices, and to "cpu" .*, not to \'{device}\''):
        attach(model, device)


@needs_no_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), 0])
def test_cuda_where_there_is_none_says_what_runs_without(model: nn.Module, device: Any) -> None:
    with pytest.raises(
        RuntimeError, match=r'cannot be used: .*CUDA.*viking\.attach\(model, "cpu"\) runs without a GPU'
    ):
        attach(model, device)


@pytest.mark.parametrize("name", ["vram", "weights_budget", "pin"])
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("x", "cannot be read"),
        ("20 elephants", "unknown unit"),
        ("", "is empty"),
        (-1, "is negative"),
        ("-2GiB", "is negative"),
        (float("nan"), "is not a finite number"),
        (float("inf"), "is not a finite number"),
        ("nan", "cannot be read"),
        (2**70, "is too large"),
    ],
)
def test_sizes_that_cannot_be_read(model: nn.Module, name: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*{sentence}.*; accepted is .*GiB"):
        attach(model, **{name: value})


@pytest.mark.parametrize("name", ["vram", "weights_budget", "pin"])
@pytest.mark.parametrize("value", [[], b"1GB", object(), 1j])
def test_sizes_of_another_type(model: nn.Module, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}: .*accepted is"):
        attach(model, **{name: value})


@pytest.mark.parametrize("name", ["vram", "weights_budget"])
def test_a_budget_that_is_too_small_names_the_smallest_that_works(model: nn.Module, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=1.00 kB is too small: the smallest that works is") as error:
        attach(model, **{name: 1000})
    smallest = int(re.search(r"smallest that works is (\d+) bytes", str(error.value)).group(1))

    with pytest.raises(ValueError, match="too small"):
        attach(model, **{name: smallest - 1})
    twin = attach(Net(), **{name: smallest})

    assert viking.stats(twin).weights_budget_bytes == smallest
    viking.detach(twin)


def test_the_sentence_goes_through_strings_too(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"weights_budget=2\.00 kB is too small"):
        attach(model, weights_budget="2kB")


@pytest.mark.parametrize("thing", [None, 3, {}, torch.zeros(3), "model", nn.Linear])
def test_what_is_no_module(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"attach needs a torch\.nn\.Module, not "):
        attach(thing)


@pytest.mark.parametrize("part", ["blocks.1.up.base_layer.weight", "blocks.0.norm.bias", "blocks.2.gate", "buffer"])
def test_a_tensor_on_the_meta_device_is_named(part: str) -> None:
    model, _ = build()
    model.register_buffer("buffer", torch.zeros(3))
    owner = model.get_submodule(part.rpartition(".")[0])
    name = part.rpartition(".")[2]
    if name == "buffer":
        owner.buffer = owner.buffer.to("meta")
    else:
        setattr(owner, name, nn.Parameter(getattr(owner, name).to("meta"), requires_grad=False))
    before = Snapshot(model)

    with pytest.raises(ValueError, match=f"^{re.escape(part)} is on the meta device and has no data: load"):
        attach(model)

    before.assert_unchanged(pointers=True)


@pytest.mark.parametrize("call", [viking.stats, viking.refresh, lambda m: viking.editing(m).__enter__()])
def test_a_model_that_is_not_attached_says_so(call: Any) -> None:
    with pytest.raises(ValueError, match=r"this model is not attached: call viking\.attach\(model, device\) first"):
        call(Net())


def test_attaching_again_with_the_same_arguments_does_nothing() -> None:
    model = Net()
    attach(model, weights_budget="150kB", ignore=[model.enter])
    before = {m: set(m.__dict__) for m in model.modules()}
    slab = viking.stats(model)

    assert attach(model, torch.device("cpu"), weights_budget=150_000, ignore=(model.enter,)) is model

    assert before == {m: set(m.__dict__) for m in model.modules()}
    assert viking.stats(model) == slab


@pytest.mark.parametrize(
    "other", [{"weights_budget": 0}, {"vram": "1GB"}, {"pin": False}, {"ignore": "leave"}], ids=str
)
def test_attaching_again_with_other_arguments_says_detach_first(other: dict[str, Any]) -> None:
    model = Net()
    if "ignore" in other:
        other = {"ignore": [model.leave]}
    attach(model, weights_budget=150_000)

    with pytest.raises(ValueError, match=r"attached already, with other arguments: call viking\.detach\(model\) first"):
        attach(model, **{"weights_budget": 150_000, **other})

    assert viking.stats(model).weights_budget_bytes == 150_000


def test_a_second_model_whose_budget_is_too_small_leaves_the_first_one_as_it_was() -> None:
    first, trained = build()
    attach(first, weights_budget=150_000)
    train(first, trained, 2)
    before = viking.stats(first)
    second = Net(hidden=128)
    snapshot = Snapshot(second)

    with pytest.raises(ValueError, match="weights_budget=150 kB is too small: the smallest that works is") as error:
        attach(second, weights_budget=150_000)
    smallest = int(re.search(r"smallest that works is (\d+) bytes", str(error.value)).group(1))

    snapshot.assert_unchanged(pointers=True)
    assert viking.stats(first).weights_budget_bytes == before.weights_budget_bytes
    fresh, its_trained = build()
    train(fresh, its_trained, 2)
    assert_same(train(first, trained, 2), train(fresh, its_trained, 2))
    with pytest.warns(UserWarning, match="the budget of cpu is now weights_budget="):
        attach(second, weights_budget=smallest)
    assert viking.stats(first).weights_budget_bytes == smallest


def test_a_refused_budget_does_not_stay_with_the_device() -> None:
    first = Net()
    attach(first, weights_budget=200_000)

    with (
        pytest.raises(ValueError, match="too small") as error,
        pytest.warns(UserWarning, match="the budget of cpu is now"),
    ):
        attach(Net(hidden=128), weights_budget=10)

    with pytest.raises(ValueError, match="too small") as again:
        attach(Net(hidden=128), weights_budget=200_000)
    smallest = [re.search(r"that works is (\d+) bytes", str(e.value)).group(1) for e in (error, again)]
    assert smallest[0] == smallest[1]
    assert viking.stats(first).weights_budget_bytes == 200_000
    viking.detach(first)
    assert not DeviceEngine._open
    attach(first, weights_budget=200_000)
    assert viking.stats(first).weights_budget_bytes == 200_000


@pytest.mark.parametrize("moment", range(8))
@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError])
def test_an_exception_while_attaching_leaves_the_model_as_it_was(exception: type[BaseException], moment: int) -> None:
    model, trained = build()
    model.blocks[1].up.base_layer.weight = model.blocks[0].up.base_layer.weight
    before = Snapshot(model)
    calls = 0

    def progress(done: int, total: int, what: str) -> None:
        nonlocal calls
        calls += 1
        if calls == moment + 1:
            raise exception

    with pytest.raises(exception):
        viking.attach(model, "cpu", weights_budget=0, progress=progress)

    before.assert_unchanged()
    assert model.blocks[1].up.base_layer.weight is model.blocks[0].up.base_layer.weight
    assert not DeviceEngine._open
    attach(model, weights_budget=0)
    train(model, trained, 2)
    viking.detach(model)


def test_progress_reaches_its_total() -> None:
    seen: list[tuple[int, int, str]] = []

    viking.attach(Net(), "cpu", progress=lambda *now: seen.append(now))

    moving = [(done, total) for done, total, what in seen if what == "moving weights to their homes"]
    assert moving == sorted(moving)
    assert len(moving) == 14
    assert (
        moving[-1][0]
        == moving[-1][1]
        == sum(linear.weight.nbytes + linear.bias.nbytes for linear in Net().modules() if isinstance(linear, nn.Linear))
    )


def test_a_linear_added_later_that_no_budget_holds_is_refused_at_the_entry_and_can_be_taken_out_again() -> None:
    model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    x = torch.randn(2, 64)
    expected = model(x)
    attach(model, weights_budget=40_000)
    model.append(nn.Linear(64, 640).requires_grad_(False))

    for _ in range(2):
        with pytest.raises(ValueError, match=r"weights_budget=40\.0 kB is too small"):
            model(x)
    del model[1]

    assert torch.equal(model(x), expected)
    viking.detach(model)
    assert torch.equal(model(x), expected)
