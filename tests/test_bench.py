"""The benchmark: its models are the shapes that the planner knows, its rows are right, peers run from checkouts."""

from __future__ import annotations

import json
import textwrap
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import viking
from viking import shapes
from viking.bench import command, engines, memory, models, overhead, peer_weights, peers
from viking.bench.engines import Reference
from viking.bench.measure import Floor, train_step
from viking.bench.models import Lora, Model
from viking.bench.models.weights import Weights, dequantize_at_each_use
from viking.bench.rows import Row, table
from viking.quant.formats import FORMATS

CPU = torch.device("cpu")
SMALL = {
    "flux1": Model("flux1", Fraction(1, 19), 48),
    "flux2": Model("flux2", Fraction(1, 24), 96),
    "sdxl": Model("sdxl", Fraction(1, 10), 128),
    "wan14b": Model("wan14b", Fraction(1, 20), 80),
}


@pytest.fixture(params=sorted(SMALL))
def small(request: pytest.FixtureRequest) -> Model:
    return SMALL[request.param]


def recorded_order(model: nn.Module, layers: list[nn.Linear]) -> list[int]:
    """Indices into `layers`, as the engine has seen their uses in the last complete pass."""
    numbers = {layer._layer_memory_manager.weight: index for index, layer in enumerate(layers)}
    return [numbers[weight] for weight, *_ in model._memory_manager.device.engine.last_trace()]


@pytest.mark.parametrize("mode", ["checkpointed", "forward"])
def test_a_step_uses_the_linears_in_the_order_of_the_shape(small: Model, mode: str) -> None:
    model, x = small.build(2, Weights("float32"), CPU, CPU), small.make_input(torch.float32, CPU)
    called: list[nn.Linear] = []
    layers = [module.linear for module in model.modules() if isinstance(module, Lora)]
    hooks = [layer.register_forward_hook(lambda module, *_: called.append(module)) for layer in layers]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    shape = small.shape
    assert [(m.out_features, m.in_features, m.bias is not None) for m in called] == [
        (layer.outputs, layer.inputs, layer.bias) for layer in shape.layers
    ]

    viking.attach(model, "cpu", weights_budget=0, progress=False)
    for _ in range(3):
        if mode == "forward":
            with torch.no_grad():
                model(x)
        else:
            train_step(model, x)

    # Nothing of a block is left out of its recompute where the LoRA comes after the base linear.
    assert recorded_order(model, called) == [layer for layer, _, _ in shape.order(mode)]


@pytest.mark.parametrize(
    ("name", "layers", "billions"),
    [("flux1", 304, 11.8), ("flux2", 160, 31.4), ("sdxl", 722, 2.2), ("wan14b", 400, 14.1)],
)
def test_shapes_have_the_published_sizes(name: str, layers: int, billions: float) -> None:
    shape = shapes.get(name)
    assert len(shape.layers) == layers
    assert round(shape.parameters / 1e9, 1) == billions


@pytest.mark.parametrize("weights", ["bfloat16", "float8_e4m3fn", "int8"])
def test_the_model_is_built_the_same_every_time(small: Model, weights: str) -> None:
    first, second = (small.build(2, Weights(weights), CPU, CPU) for _ in range(2))

    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert {p.requires_grad for p in first.parameters()} == {True, False}


@pytest.mark.parametrize("weights", FORMATS)
def test_weights_in_8_bit_are_those_of_quantize(weights: str) -> None:
    there, mine = nn.Linear(512, 256, bias=False, dtype=torch.bfloat16), nn.Linear(512, 256, bias=False)
    there.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    there.weight.normal_(0, 0.02, generator=generator)
    viking.quantize_(there, weights)

    Weights(weights).fill([mine], CPU, CPU)

    for found, expected in zip(mine.state_dict().values(), there.state_dict().values(), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert memory.candidate_bytes(mine) == memory.candidate_bytes(there)


@pytest.mark.parametrize("weights", FORMATS)
def test_a_run_with_8_bit_weights_is_that_of_the_resident_model(weights: str, tmp_path: Path) -> None:
    model = SMALL["flux2"]
    status, rows = run(tmp_path, *arguments_of(model)[:-1], weights, "--verify", "--weights-budget", "1MB", "2MB")

    assert status == 0
    resident, *ours = rows
    elements = model.shape.parameters
    assert elements <= resident["weight_bytes"] <= elements + 4 * sum(layer.outputs for layer in model.shape.layers)
    assert [row["identical"] for row in ours] == [True, True]


def test_the_resident_model_keeps_codes_for_backward_and_not_the_weights_in_16_bit() -> None:
    model = SMALL["flux2"].build(2, Weights("int8"), CPU, CPU)
    dequantize_at_each_use(model)
    linear = next(module for module in model.modules() if isinstance(module, Lora)).linear
    x = torch.randn(3, linear.in_features, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        kept: list[torch.Tensor] = []
        y = linear(x)
    y.sum().backward()

    expected = torch.autograd.grad(nn.functional.linear(x, linear.weight.dequantize()).sum(), x)[0]
    assert kept == []
    assert torch.equal(x.grad, expected)


def run(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    path = tmp_path / "rows.json"
    status = command.main([*arguments, "--device", "cpu", "--steps", "2", "--rank", "2", "--json", str(path)])
    return status, json.loads(path.read_text(encoding="utf-8"))


def arguments_of(model: Model) -> list[str]:
    return [model.name, "--depth", str(model.depth), "--width", str(model.width), "--weights", "float32"]


def test_a_run_measures_and_verifies_each_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = run(tmp_path, *arguments_of(SMALL["flux2"]), "--weights-budget", "0", "1GB", "--verify")

    assert status == 0
    resident, smallest, everything = rows
    assert [row["engine"] for row in rows] == ["resident", "viking", "viking"]
    assert smallest["identical"] is everything["identical"] is True
    assert smallest["streamed"] > 0 == everything["streamed"]
    assert smallest["fetched"] > 0 == everything["fetched"]
    assert smallest["written"] == 0
    assert resident["weight_bytes"] == smallest["weight_bytes"]
    assert smallest["time_ratio"] == pytest.approx(smallest["step_s"] / smallest["floor_s"])
    assert 1 <= smallest["bytes_ratio"] < 3
    out = capsys.readouterr().out
    assert "flux2 depth 1/24 width 96" in out
    assert "peak host memory" in out


def test_a_model_that_is_not_what_it_was_serves_no_further_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    detach = viking.detach

    def careless(model: nn.Module) -> None:
        detach(model)
        next(p for p in model.parameters() if not p.requires_grad).data[0, 0] += 1

    monkeypatch.setattr(viking, "detach", careless)

    assert command.main([*arguments_of(SMALL["flux2"]), "--device", "cpu", "--weights-budget", "0", "0"]) == 2
    assert "not what it was before attach" in capsys.readouterr().err


def test_a_fused_lora_is_compared_with_the_model_as_it_was(tmp_path: Path) -> None:
    given = [*arguments_of(SMALL["flux2"]), "--weights-budget", "0", "--verify", "--fuse-lora"]
    status, rows = run(tmp_path, *given)

    assert status == 0
    assert [row["setting"] for row in rows] == ["LoRA fused"] * 2
    assert rows[1]["identical"] is True


def test_a_slower_link_is_paced_in_the_steps_and_in_their_floor(tmp_path: Path) -> None:
    given = [*arguments_of(SMALL["flux2"]), "--weights-budget", "0", "--verify", "--link", "20MB/s"]
    status, rows = run(tmp_path, *given)

    assert status == 0
    resident, paced = rows
    assert resident["setting"] == ""
    assert paced["setting"] == "link paced to 20.0 MB/s"
    assert paced["identical"] is True
    assert paced["step_s"] > 0.8 * paced["fetched"] / 20e6  # what is on the device when the clock starts comes free
    travel = (paced["weight_bytes"] - paced["budget"]) / 20e6
    assert paced["floor_s"] >= 2 * travel


def test_a_difference_from_the_resident_run_is_said_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("viking.bench.engines._same", lambda found, expected: False)

    status, rows = run(tmp_path, *arguments_of(SMALL["flux2"]), "--weights-budget", "0", "--verify")

    assert status == 1
    assert rows[1]["identical"] is False
    assert "NO" in capsys.readouterr().out


def test_where_the_model_does_not_fit_the_floor_is_scaled_from_a_depth_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model("wan14b", Fraction(1, 10), 80)
    half = Model("wan14b", Fraction(1, 20), 80).shape.parameters * 4
    monkeypatch.setattr(memory, "device_free", lambda device: half + command.BESIDE_WEIGHTS + 1)

    status, rows = run(tmp_path, *arguments_of(model), "--weights-budget", "0", "--verify")

    assert status == 0
    assert rows[0]["model"] == "wan14b depth 1/20 width 80"
    assert "scaled" in rows[0]["note"]
    assert rows[1]["weight_bytes"] == 2 * rows[0]["weight_bytes"]


def test_a_model_that_host_memory_cannot_hold_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "memory_available", lambda: 24_000_000_000)
    monkeypatch.setattr(Model, "build", lambda *args: pytest.fail("it was built"))

    assert command.main(["flux2", "--device", "cpu"]) == 2

    error = capsys.readouterr().err
    assert "flux2 in bfloat16 takes 62.8 GB of host memory and 24.0 GB are free: measure a part" in error


def test_all_quick_measures_a_few_blocks_of_each_model_with_room_for_a_quarter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(model: Model, options: Any, steps: int, budgets: list[int]) -> list[Row]:
        asked.append((model, steps, budgets))
        return [Row(model.title, "viking")]

    monkeypatch.setattr(command, "_measure", measure)
    status, rows = run(tmp_path, "all", "--quick")

    assert status == 0
    assert [row["model"].split()[0] for row in rows] == models.names() == [model.name for model, *_ in asked]
    for model, steps, budgets in asked:
        assert model.depth < 1
        assert steps == 3
        assert budgets == [model.shape.parameters * 2 // 4]


def test_overhead_compares_with_plain_torch() -> None:
    found = overhead.measure(CPU, [], layers=3, passes=2)

    assert [each.engine.split(",")[0] for each in found] == ["torch", "viking", "viking"]
    for each in found:
        assert each.each_us > 0
        assert each.beyond_us == each.each_us - found[0].each_us
        assert "us per linear" in str(each)


def test_the_floor_is_the_longer_of_compute_and_travel_in_each_sweep() -> None:
    floor = Floor(candidate_bytes=300, bandwidth=100.0, forward=0.5, backward=4.0, sample=0.4)
    assert floor.step(100) == 2.0 + 4.0
    assert floor.step(300) == 0.5 + 4.0
    assert floor.sampling(100) == 2.0
    assert floor.fetched_bytes(100) == 400


def test_the_table_lines_up_and_leaves_out_what_was_not_measured() -> None:
    lines = table(
        [Row("m", "viking", vram=1 << 30, step_s=0.5, identical=True), Row("longer", "peer", note="no setting fits")]
    )
    assert lines.splitlines()[1].startswith("m       viking")
    assert "500.0" in lines
    assert "no setting fits" in lines
    assert str(Row("m", "viking", step_s=0.5, link=5e9)) == "model=m  engine=viking  step=500.0ms  link=5.0GB/s"


# ---- peers ----

TOOLKIT = """
    import torch

    class MemoryManager:
        @classmethod
        def attach(cls, module, device, offload_percent=1.0, ignore_modules=[]):
            if offload_percent < 0.9:
                raise torch.OutOfMemoryError("too much")
            module.seen = (offload_percent, len(ignore_modules))

        @classmethod
        def detach(cls, module):
            del module.seen
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "peer" / "toolkit"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "memory_management.py").write_text(textwrap.dedent(TOOLKIT), encoding="utf-8")
    for name in ("toolkit", "toolkit.memory_management"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return tmp_path / "peer"


def test_a_peer_runs_with_the_first_setting_that_fits(tmp_path: Path, checkout: Path) -> None:
    engine = f"ai-toolkit:{checkout}"
    status, rows = run(tmp_path, *arguments_of(SMALL["flux2"]), "--vram", "1GB", "--engine", engine, "--verify")

    assert status == 0
    assert [row["engine"] for row in rows] == ["resident", "ai-toolkit"]
    assert rows[1]["setting"] == "offload 90%"
    assert rows[1]["identical"] is True
    assert rows[1]["step_s"] > 0


def test_without_a_cap_a_peer_offloads_everything(tmp_path: Path, checkout: Path) -> None:
    _, rows = run(tmp_path, *arguments_of(SMALL["flux2"]), "--engine", f"ai-toolkit:{checkout}")
    assert rows[1]["setting"] == "offload 100%"


def test_a_setting_that_is_named_is_the_only_one_tried(tmp_path: Path, checkout: Path) -> None:
    _, rows = run(tmp_path, *arguments_of(SMALL["flux2"]), "--vram", "1GB", "--engine", f"ai-toolkit:{checkout}@0.5")
    assert [(row["setting"], row["note"]) for row in rows[1:]] == [("offload 50%", "out of memory")]


def test_settings_that_cannot_fit_are_not_tried() -> None:
    model = SMALL["flux2"].build(1, Weights("int8"), CPU, CPU)
    every = sum(memory.candidate_bytes(block) for block in model.blocks)
    musubi = peers.Musubi.__new__(peers.Musubi)
    toolkit = peers.Toolkit.__new__(peers.Toolkit)

    swapped_less = [musubi.kept_bytes(model, (share, 1)) for share in (0.2, 0.6, 1.0)]
    offloaded_less = [toolkit.kept_bytes(model, share) for share in (0.3, 0.7, 1.0)]

    assert swapped_less == sorted(swapped_less, reverse=True)
    assert offloaded_less == sorted(offloaded_less, reverse=True)
    assert swapped_less[0] <= every + max(map(peers._computed_bytes, model.blocks))
    room = toolkit.kept_bytes(model, 0.7)
    reference = Reference(Floor(every, 1.0, 1.0, 1.0, 1.0), None, Row("", ""), beside_weights=9)
    assert engines._promising(toolkit, model, reference, room + 9) == [0.7, 0.8, 0.9, 0.96, 1.0]
    assert engines._promising(toolkit, model, reference, 9) == [1.0]


def in_the_form_of(peer: str, weights: str) -> tuple[nn.Linear, nn.Module, torch.Tensor]:
    """An 8-bit Linear, the same as that peer has it, and an input."""
    model = SMALL["flux2"].build(1, Weights(weights), CPU, CPU)
    lora = next(module for module in model.modules() if isinstance(module, Lora))
    ours = lora.linear
    make = peer_weights.Linear if peer == "ai-toolkit" else partial(peer_weights.CodesLinear, device=CPU)
    peer_weights.replace(model, make)
    assert lora.linear is not ours
    return ours, lora.linear, torch.randn(2, ours.in_features, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("peer", ["ai-toolkit", "musubi"])
def test_a_peers_form_of_an_8_bit_linear_computes_the_same(peer: str, weights: str) -> None:
    ours, theirs, x = in_the_form_of(peer, weights)

    results = []
    for layer in (ours, theirs):
        y = layer(x)
        results += [y, *torch.autograd.grad(y.square().sum(), x)]

    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert type(theirs).__name__.endswith("Linear")  # by which both find what they offload


def test_musubi_gets_8_bit_weights_as_plain_codes() -> None:
    ours, theirs, _ = in_the_form_of("musubi", "float8_e4m3fn")
    assert theirs.weight.dtype == torch.float8_e4m3fn
    assert theirs.weight.data_ptr() == ours.weight.data_ptr()
    assert [name for name, _ in theirs.named_parameters()] == ["weight"]


@pytest.mark.parametrize("weights", ["int8", "float8_e5m2"])
def test_ai_toolkit_gets_8_bit_weights_as_tensors_that_move_as_codes(weights: str) -> None:
    ours, theirs, _ = in_the_form_of("ai-toolkit", weights)
    weight = theirs.weight
    assert weight.dtype == torch.bfloat16
    assert not torch.overrides.has_torch_function_unary(weight)
    names, _ = weight.__tensor_flatten__()
    assert sum(getattr(weight, name).nbytes for name in names) == memory.candidate_bytes(ours)

    theirs.to("meta")

    assert {getattr(theirs.weight, name).device.type for name in names} == {"meta"}
    assert theirs.weight._codes.dtype == ours.weight.data.dtype
    with pytest.raises(NotImplementedError, match="dequantise it first"):
        weight + 1


def test_ai_toolkit_is_measured_with_8_bit_weights(tmp_path: Path, checkout: Path) -> None:
    given = [*arguments_of(SMALL["flux2"])[:-1], "int8", "--engine", f"ai-toolkit:{checkout}", "--verify"]
    _, rows = run(tmp_path, *given)
    assert rows[1]["identical"] is True
    assert rows[1]["weight_bytes"] == rows[0]["weight_bytes"]


def test_what_shares_a_ring_has_one_class() -> None:
    model = SMALL["flux2"].build(1, Weights("float32"), CPU, CPU)
    runs = peers._runs(model.blocks)
    assert [kind for kind, _ in runs] == ["DoubleBlock", "SingleBlock"]
    assert sum(len(run) for _, run in runs) == len(model.blocks)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["flux2", "--engine", "kohya:there"], "'kohya' is unknown; there are viking, resident, ai-toolkit:PATH"),
        (["flux2", "--engine", "musubi"], "'musubi' is unknown"),
        (["flux2", "--engine", "musubi:nowhere"], "nowhere/src is no checkout that can be used"),
        (["flux2", "--engine", "musubi:there@half"], "a setting of musubi is the share of the blocks"),
        (["flux2", "--width", "97"], "multiple of 96, not 97"),
        (["flux2", "--depth", "0"], "--depth: 0 is not above 0"),
        (["flux2", "--steps", "0"], "at least 1"),
        (["flux2", "--link", "fast"], "--link: 'fast' cannot be read"),
        (["flux2", "--link", "9GB/s", "--engine", "viking", "--engine", "musubi:there"], "--link or --engine musubi"),
        (["flux2", "--weights-budget", "lots"], "--weights-budget: 'lots'"),
        (["flux2", "--width", "96", "--depth", "1/48", "--weights-budget", "3"], "too small"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [] if "--width" in arguments else ["--width", "96"]
    assert command.main([*arguments, *small, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.startswith("viking.bench: ")
    assert error.count("\n") == 1
