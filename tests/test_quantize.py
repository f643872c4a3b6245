"""8-bit weights: the bits, and everything that a training script does to a model that has them."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.models import Net, hijack, with_peft
from support.processes import measure
from support.training import assert_same, inputs, train
from viking import _engine
from viking.quant import dequantize, quantizing
from viking.quant.formats import FORMATS
from viking.quant.weight import QuantizedWeight

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizing, "SMALLEST_ELEMENTS", 64)


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a 16-bit type; of fp32 those, what is next to them, and random ones."""
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    if dtype != torch.float32:
        return halves.view(dtype)
    wide = torch.cat([halves.view(t).float().view(torch.int32) for t in (torch.bfloat16, torch.float16)])
    random = torch.randint(-(2**31), 2**31 - 1, (65536,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    return torch.cat([wide, wide + 1, wide - 1, random]).view(torch.float32)


def encode(matrix: torch.Tensor, format: str, scaled: bool) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    codes = torch.empty(matrix.shape, dtype=torch.uint8)
    scale = torch.empty(len(matrix)) if scaled else None
    error = _engine.encode_8bit(matrix, format, codes, scale)
    return codes, scale, error


def by_torch(matrix: torch.Tensor, format: str, scale: torch.Tensor | None) -> torch.Tensor:
    scaled = matrix.float() / (1.0 if scale is None else scale.unsqueeze(1))
    if format == "int8":
        scaled = scaled.round()
    return scaled.clamp(-LARGEST[format], LARGEST[format]).to(FORMATS[format].dtype).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_every_number_gets_the_code_that_torch_gives_it(format: str, dtype: torch.dtype) -> None:
    numbers = all_patterns(dtype)
    if format == "int8":
        numbers = numbers[~numbers.isnan()]
    fitting = numbers[~(numbers.abs() > LARGEST[format])]
    with_scale_one = torch.stack([torch.full_like(fitting, LARGEST[format]), fitting], 1)  # its largest is the code's
    rows = numbers[: len(numbers) // 256 * 256].view(-1, 256)

    for matrix in (rows, with_scale_one) if LARGEST[format] < 60000 or dtype != torch.float16 else (rows,):
        for scaled in (True,) if FORMATS[format].needs_scale else (True, False):
            codes, scale, _ = encode(matrix, format, scaled)

            assert torch.equal(codes, by_torch(matrix, format, scale))
            if matrix is with_scale_one and scale is not None:
                assert bool((scale == 1).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_the_way_back_is_torchs(format: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).repeat(64, 1).view(FORMATS[format].dtype)
    few_digits = 1 + 4 * torch.arange(64) / 256  # whose products are ties every so often
    for scale in (torch.logspace(-37, 10, 64), few_digits, None):
        mine = dequantize.dequantize(codes, scale, dtype, "c")

        theirs = (codes.float() * (1 if scale is None else scale.unsqueeze(1))).to(dtype)
        assert mine.dtype == dtype
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.nan_to_num(nan=0.5), theirs.nan_to_num(nan=0.5))
        assert torch.equal(dequantize.dequantize(codes, scale, dtype, "torch").nan_to_num(nan=0.5),
                           theirs.nan_to_num(nan=0.5))
    with pytest.raises(ValueError, match="no way 'triton'"):
        dequantize.dequantize(codes, None, dtype, "triton")


def test_the_error_of_a_weight_is_that_of_its_numbers() -> None:
    matrix = torch.randn(300, 70, generator=torch.Generator().manual_seed(4))

    codes, scale, error = encode(matrix, "float8_e4m3fn", True)

    back = codes.view(torch.float8_e4m3fn).double() * scale.double().unsqueeze(1)
    assert error == pytest.approx(float((matrix.double() - back).norm() / matrix.double().norm()), rel=1e-6)


# ---- a model ----


def make(format: str = "float8_e4m3fn", dtype: torch.dtype = torch.bfloat16, **how: Any) -> tuple[Net, Any]:
    model = Net(depth=2).to(dtype)
    return model, viking.quantize_(model, format, **how)


def plain_twin(model: nn.Module) -> nn.Module:
    """The same model with ordinary weights that hold what the 8-bit ones stand for."""
    twin = Net(depth=2).to(next(model.parameters()).dtype)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    return twin


@pytest.mark.parametrize("checkpointing", ["off", "early stop"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_training_is_that_of_a_plain_model_with_these_numbers(
    format: str, dtype: torch.dtype, checkpointing: str
) -> None:
    model, _ = make(format, dtype)
    outcomes = []
    for net in (model, plain_twin(model)):
        net.checkpointing = checkpointing
        network = hijack(net)
        outcomes.append(train(net, list(network.parameters()), 2, dtype))

    assert_same(*outcomes)


def test_identity_class_and_dtype_stay() -> None:
    model = Net(depth=2).to(torch.bfloat16)
    modules, parameters = list(model.modules()), list(model.parameters())

    report = viking.quantize_(model, "float8_e4m3fn")

    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    linear = model.blocks[0].up
    assert isinstance(linear, nn.Linear)
    assert linear.__class__.__name__ == "Linear"
    assert isinstance(linear.weight, nn.Parameter)
    assert linear.weight.dtype == torch.bfloat16
    assert linear.weight.data.dtype == torch.float8_e4m3fn
    assert (linear.weight.element_size(), linear.weight.is_floating_point()) == (1, True)
    assert "weight=float8_e4m3fn" in repr(linear)
    assert len(report.layers) == 10
    assert report.kept == {}


def test_the_report_names_layers_bytes_and_the_worst() -> None:
    model = Net(depth=2)
    with torch.no_grad():
        model.blocks[1].down.weight[:, 0] = 1.0  # coarsens the scale of its rows

    report = viking.quantize_(model, "int8", ignore=[model.leave, model.blocks[0].qkv.weight])

    assert report.worst.name == "blocks.1.down"
    assert set(report.kept) == {"blocks.0.qkv"}
    up = next(layer for layer in report.layers if layer.name == "blocks.0.up")
    assert (up.bytes_before, up.bytes_after) == (128 * 64 * 4, 128 * 64 + 4 * 128)
    assert 0.001 < up.relative_error < 0.02
    assert report.bytes_after < report.bytes_before / 3
    assert "blocks.1.down" in str(report)
    assert "1 Linears stay" in str(report)
    assert "no layer" in str(viking.quantize_(model, "int8", ignore=[model]))


def test_only_frozen_plain_linears_of_some_size_are_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizing, "SMALLEST_ELEMENTS", 64 << 10)
    model = nn.ModuleDict({
        "good": nn.Linear(256, 256), "small": nn.Linear(255, 256), "trained": nn.Linear(256, 256),
        "attention": nn.MultiheadAttention(256, 4),
    }).requires_grad_(False)
    model["trained"].requires_grad_(True)

    report = viking.quantize_(model, "bf8")

    assert report.format == "float8_e5m2"
    assert [layer.name for layer in report.layers] == ["good"]
    assert report.kept["small"] == "it is small"
    assert report.kept["trained"] == "it is trained"
    assert "attention.out_proj" in report.kept
    again = viking.quantize_(model, "bf8")
    assert again.kept["good"] == "it is quantised"


def test_ties_stay_ties_and_other_sharing_is_left_alone() -> None:
    model = nn.ModuleList([nn.Linear(64, 64) for _ in range(5)] + [nn.Embedding(64, 64)]).requires_grad_(False)
    model[1].weight = model[0].weight
    model[3].weight = nn.Parameter(model[2].weight.data[:32], requires_grad=False)
    model[4].weight = model[5].weight

    report = viking.quantize_(model, "int8")

    assert model[1].weight is model[0].weight
    assert model[1].weight_scale is model[0].weight_scale
    assert [(layer.name, layer.bytes_before > 0) for layer in report.layers] == [("0", True), ("1", False)]
    assert set(report.kept) == {"2", "3", "4"}
    copied = copy.deepcopy(model)
    assert copied[1].weight is copied[0].weight
    assert copied[0].weight.scale is copied[1].weight_scale


# ---- saving, loading, copying ----


def test_a_state_dict_goes_through_torch_and_safetensors(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = make()
    x = inputs(0, torch.bfloat16)
    state = model.state_dict()
    assert state["blocks.0.up.weight"].dtype == torch.float8_e4m3fn
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    assert state["blocks.0.up.weight"].data_ptr() == model.blocks[0].up.weight.data_ptr()
    safetensors.save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")

    for read in (safetensors.load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.pt")):
        for assign in (False, True):
            other = Net(depth=2, seed=9).to(torch.bfloat16)
            viking.quantize_(other, "float8_e4m3fn")
            assert not torch.equal(other(x), model(x))
            weight = other.blocks[0].up.weight

            other.load_state_dict(read, assign=assign)

            assert torch.equal(other(x), model(x))
            assert other.blocks[0].up.weight is weight


def test_a_state_dict_of_another_format_is_refused_in_one_sentence() -> None:
    model, _ = make("float8_e4m3fn")
    states = [Net(depth=2).state_dict(), make("int8")[0].state_dict(), make("float8_e5m2")[0].state_dict()]
    before = model.blocks[0].up.weight.data.clone()
    for state in states:
        with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight is torch\.\w+ with.*quantised alike"):
            model.load_state_dict(state, strict=False)
    unscaled, _ = make("float8_e5m2")
    with pytest.raises(RuntimeError, match="with scales, but this layer"):
        unscaled.load_state_dict(make("float8_e5m2", scale=True)[0].state_dict(), strict=False)
    assert torch.equal(model.blocks[0].up.weight.data.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS)
def test_copies_and_pickles_are_models_of_their_own(format: str) -> None:
    model, _ = make(format)
    x = inputs(0, torch.bfloat16)
    y = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]

    for twin in twins:
        assert torch.equal(twin(x), y)
        weight = twin.blocks[0].up.weight
        assert isinstance(weight, QuantizedWeight)
        assert weight.data_ptr() != model.blocks[0].up.weight.data_ptr()
        assert weight.scale is twin.blocks[0].up._buffers.get("weight_scale")


# ---- what code does to weights ----


def test_casts_change_what_the_layer_computes_in_and_nothing_else() -> None:
    model, _ = make()
    weight = model.blocks[0].up.weight
    before, scale = weight.data.clone(), weight.scale.clone()

    model.to(torch.float16)

    up = model.blocks[0].up
    assert up.weight is weight
    assert (weight.dtype, weight.dequantize().dtype, up.bias.dtype) == (torch.float16,) * 3
    assert torch.equal(weight.data.view(torch.uint8), before.view(torch.uint8))
    assert torch.equal(up.weight_scale, scale)
    assert up.weight_scale is weight.scale
    assert model(inputs(0, torch.float16)).dtype == torch.float16
    with pytest.raises(TypeError, match="not in torch"):
        model.double()
    meta = copy.deepcopy(model).to("meta").blocks[0].up
    assert (meta.weight.device.type, meta.weight_scale.device.type, meta.bias.device.type) == ("meta",) * 3


def test_reading_a_weight_gives_its_numbers() -> None:
    model, _ = make()
    weight, x = model.blocks[0].up.weight, inputs(0, torch.bfloat16)
    dense = weight.dequantize()

    assert type(dense) is torch.Tensor
    assert torch.equal(x @ weight.T, x @ dense.T)
    assert torch.equal(nn.functional.linear(x, weight), nn.functional.linear(x, dense))
    assert torch.equal(torch.cat([weight, weight]), torch.cat([dense, dense]))
    assert torch.equal(weight.float(), dense.float())
    assert torch.equal(weight + dense, dense + dense)
    assert torch.equal(weight.detach(), dense)
    assert torch.equal(torch.empty_like(dense).copy_(weight), dense)


def test_writes_to_a_weight_are_refused_in_one_sentence() -> None:
    model, _ = make("int8")
    weight = model.blocks[0].up.weight
    before = weight.data.clone()
    delta = torch.ones(weight.shape, dtype=torch.bfloat16)
    writes: list[Any] = [
        lambda: weight.add_(delta), lambda: weight.zero_(), lambda: weight.__setitem__(0, 1),
        lambda: weight.__iadd__(delta), lambda: setattr(weight, "data", weight.data + delta),
        lambda: weight.data.add_(delta), lambda: weight.copy_(delta), lambda: weight.requires_grad_(True),
        lambda: model.requires_grad_(True), lambda: torch.add(delta, delta, out=weight),
        lambda: nn.init.zeros_(weight), lambda: setattr(model.blocks[0].up, "weight_scale", torch.ones(128)),
    ]
    for write in writes:
        with pytest.raises((RuntimeError, TypeError, AttributeError)):
            write()
    model.requires_grad_(False)
    assert torch.equal(weight.data, before)


def test_peft_finds_the_layers() -> None:
    pytest.importorskip("peft")
    model, _ = make()
    twin = with_peft(plain_twin(model))
    wrapped = with_peft(model)

    mine = train(wrapped, [p for p in wrapped.parameters() if p.requires_grad], 2, torch.bfloat16)

    assert_same(mine, train(twin, [p for p in twin.parameters() if p.requires_grad], 2, torch.bfloat16))


# ---- refusals ----


def test_what_cannot_be_done_is_refused_and_changes_nothing() -> None:
    model = Net(depth=2)
    model.blocks[1].up.weight[77, 3] = float("nan")

    with pytest.raises(ValueError, match=r"blocks\.1\.up\.weight holds a NaN in row 77"):
        viking.quantize_(model, "int8")
    with pytest.raises(ValueError, match="float8_e4m3fn, float8_e5m2, int8, bf8"):
        viking.quantize_(model, "fp4")
    with pytest.raises(ValueError, match="needs a scale"):
        viking.quantize_(model, "int8", scale=False)
    viking.attach(model, "cpu", weights_budget=0, progress=False)
    with pytest.raises(RuntimeError, match="is attached"):
        viking.quantize_(model, "bf8")
    viking.detach(model)

    assert not any(isinstance(p, QuantizedWeight) for p in model.parameters())
    assert viking.quantize_(model, "bf8").worst.relative_error < 0.1  # which keeps the NaN
    assert bool(model.blocks[1].up.weight.dequantize()[77, 3].isnan())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_originals_are_given_back_as_it_goes() -> None:
    found = measure("""
        side, count = 2048, 18
        empty = status("VmRSS")
        model = make(count, side)
        built = status("VmHWM")
        viking.quantize_(model, "float8_e4m3fn")
        gc.collect()
        print(json.dumps({"model": count * side * side * 4, "built": built - empty,
                          "peak": status("VmHWM") - empty, "after": status("VmRSS") - empty}))
    """)

    assert found["model"] > 300 * 1000**2
    assert found["peak"] < found["built"] + 2 * 2048 * 2048 + 32 * MIB  # one layer's codes at a time
    assert found["after"] < 0.25 * found["model"] + 48 * MIB
