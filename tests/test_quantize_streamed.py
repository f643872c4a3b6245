"""Streamed 8-bit weights: the same bits as those of the quantised model that is not attached."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.models import CHECKPOINTING, Net, hijack, with_peft
from support.training import assert_same, inputs, train
from viking.nn import linear
from viking.quant import quantizing
from viking.quant.formats import FORMATS
from viking.shapes import ALIGNMENT, Layer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizing, "SMALLEST_ELEMENTS", 64)


BUDGETS = {"smallest": 0, "some": 0.5, "all": 2.0}


def outcomes(
    format: str, dtype: torch.dtype, share: float, style: str = "hijacked", change: Any = None, steps: int = 3,
    **net: Any,
) -> tuple[Any, Any, nn.Module]:
    """The same training of a quantised model, attached and not; and the attached model."""
    found = []
    for attached in (True, False):
        model: nn.Module = Net(depth=2, **net).to(dtype)
        report = viking.quantize_(model, format)
        network = model = with_peft(model) if style == "peft" else model
        if attached:
            streamed = viking.attach(
                model, "cpu", weights_budget=int(share * report.bytes_after), progress=False
            )
        if style != "peft":
            network = hijack(model)
        trained = [p for p in network.parameters() if p.requires_grad]
        more = {} if change is None else {"before_step": change(model)}
        found.append(train(model, trained, steps, dtype, **more))
    return found[0], found[1], streamed


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_streamed_8_bit_model_trains_as_one_that_is_not_attached(
    format: str, dtype: torch.dtype, checkpointing: str, budget: str
) -> None:
    bias = checkpointing != "reentrant"
    mine, theirs, model = outcomes(format, dtype, BUDGETS[budget], bias=bias, checkpointing=checkpointing)

    assert_same(mine, theirs)
    weights = viking.stats(model).weights
    up = next(w for w in weights if w.name == "blocks.0.up")
    rounded = 128 * 64 + (512 if format != "float8_e5m2" else 0)
    assert up.nbytes == rounded + (128 * dtype.itemsize if bias else 0)
    paths = {w.path for w in weights if w.nbytes > 4096}
    assert paths == {"smallest": {"streamed"}, "some": paths, "all": {"resident"}}[budget]


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_autocast_gives_the_same(dtype: torch.dtype, autocast: torch.dtype) -> None:
    found = []
    for attached in (True, False):
        model = Net(depth=2, checkpointing="early stop").to(dtype)
        viking.quantize_(model, "float8_e4m3fn")
        if attached:
            viking.attach(model, "cpu", weights_budget=0, progress=False)
        network = hijack(model)

        def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", autocast):
                loss = model(x).float().square().mean()
            loss.backward()
            return loss.detach()

        found.append(train(model, list(network.parameters()), 2, dtype, step_with=step))

    assert_same(*found)


def test_peft_on_a_streamed_8_bit_model() -> None:
    pytest.importorskip("peft")
    mine, theirs, _ = outcomes("float8_e4m3fn", torch.bfloat16, 0, style="peft", checkpointing="early stop")

    assert_same(mine, theirs)


@pytest.mark.parametrize("budget", [0, 2.0])
def test_edits_of_codes_and_scales_are_seen_by_the_next_use(budget: float) -> None:
    def edits(model: nn.Module) -> Any:
        state = {k: v.clone() for k, v in model.state_dict().items() if not k.endswith(("bias", "gate"))}
        up, down = model.blocks[0].up, model.blocks[1].down

        def before(step: int) -> None:
            if step == 1:
                up.weight_scale.mul_(1.5)
            elif step == 2:
                down.weight_scale.data = down.weight_scale * 0.5
            elif step == 3:
                model.load_state_dict(state, strict=False)
            elif step == 4:
                model.blocks[0].proj.weight = nn.Parameter(torch.eye(64, dtype=torch.bfloat16), requires_grad=False)
            elif step == 5:
                up.weight.data = down.weight.data.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)

        return before

    mine, theirs, _ = outcomes("float8_e4m3fn", torch.bfloat16, budget, change=edits, steps=7)

    assert_same(mine, theirs)
    assert len({float(loss) for loss in mine.losses}) == 7


def test_casts_of_an_attached_8_bit_model_are_seen() -> None:
    results = []
    for attached in (True, False):
        model = Net(depth=2, bias=False)  # a bias would be brought home again, and the weight with it
        viking.quantize_(model, "int8")
        if attached:
            viking.attach(model, "cpu", weights_budget=0, progress=False)
        results += [model.to(dtype)(inputs(0, dtype)) for dtype in DTYPES]
        assert model.enter.weight_scale is model.enter.weight.scale
        assert model.enter.weight_scale.dtype == torch.float32

    assert tuple(y.dtype for y in results[:3]) == DTYPES
    assert all(torch.equal(a, b) for a, b in zip(results[:3], results[3:], strict=True))


@pytest.mark.parametrize("quantised", [True, False])
def test_the_span_is_free_before_the_product(quantised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(depth=1)
    if quantised:
        viking.quantize_(model, "int8")
    viking.attach(model, "cpu", weights_budget=0, progress=False)
    device, products = model._memory_manager.device, []

    def probe(function: Any) -> Any:
        def product(*args: Any) -> Any:
            products.append(function.__name__)
            device.relayout()  # which no use in progress allows
            return function(*args)

        return product

    monkeypatch.setattr(linear.functional, "linear", probe(linear.functional.linear))
    monkeypatch.setattr(linear, "_input_gradient", probe(linear._input_gradient))
    x = inputs(0).requires_grad_(True)
    if not quantised:
        with pytest.raises(RuntimeError, match="in use"):
            model(x)
        return

    model(x).sum().backward()

    assert sorted(set(products)) == ["_input_gradient", "linear"]
    assert len(products) == 12


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_a_plan_counts_the_same_bytes(format: str, bias: bool) -> None:
    model = nn.Sequential(nn.Linear(96, 200, bias=bias)).to(torch.bfloat16).requires_grad_(False)
    viking.quantize_(model, format)
    viking.attach(model, "cpu", weights_budget=0, progress=False)

    planned = Layer("0", 200, 96, tokens=1, block=0, bias=bias).nbytes(format)

    assert planned == -(-viking.stats(model).weights[0].nbytes // ALIGNMENT) * ALIGNMENT


def test_detach_leaves_a_quantised_model() -> None:
    model = Net(depth=2).to(torch.bfloat16)
    viking.quantize_(model, "float8_e4m3fn")
    x = inputs(0, torch.bfloat16)
    y, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    parameters = list(model.parameters())
    viking.attach(model, "cpu", weights_budget=0, progress=False)
    assert torch.equal(model(x), y)
    held = model.state_dict()

    viking.detach(model)

    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert torch.equal(model(x), y)
    for name, tensor in model.state_dict().items():
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor.float(), state[name].float())
        assert torch.equal(held[name].float(), state[name].float())
    assert "_apply" not in model.enter.__dict__
    assert torch.equal(copy.deepcopy(model)(x), y)
