"""The adapter of ai-toolkit over a stand-in of its classes; tests/test_ai_toolkit_tree.py has the real ones."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

import viking
from support.toolkit_standin import StandInNetwork, job
from viking.adapters import ai_toolkit as adapter
from viking.adapters.ai_toolkit import precision
from viking.adapters.ai_toolkit.alpha import bake
from viking.adapters.ai_toolkit.optimizers import judge, judge_config, let_clipping_see_gradients
from viking.adapters.ai_toolkit.precision import choose
from viking.optim.rounding import is_rounding

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def factory(weights, name, learning_rate, optimizer_params):
    """A trainer's factory: some names, their parameters, and a word on the console."""
    print(f"Using {name}")
    kinds = {
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "lbfgs": torch.optim.LBFGS,
        "own": Adafactor,
        "stranger": Stranger,
    }
    if name not in kinds:
        raise ValueError(f"Unknown optimizer type {name}")
    optimizer_params.setdefault("lr", learning_rate)
    return kinds[name](weights, **optimizer_params)


class Stranger(torch.optim.SGD):
    """Of a library that nobody has looked at."""


class Adafactor(torch.optim.SGD):
    """The toolkit's class of that name, as far as it is looked at: a switch, and hooks on gradients."""

    __module__ = "toolkit.optimizers.adafactor"

    def __init__(self, weights, lr, stochastic_rounding=True):
        super().__init__(weights, lr=lr)
        self.stochastic_rounding = stochastic_rounding
        for group in self.param_groups:
            for weight in group["params"]:
                weight.register_post_accumulate_grad_hook(stochastic_grad_accummulation)


def stochastic_grad_accummulation(weight):
    weight._accum_grad = weight.grad.clone()
    del weight.grad


@pytest.fixture
def toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """`toolkit.optimizer` and `version` are there, as inside a checkout."""
    optimizer = types.ModuleType("toolkit.optimizer")
    optimizer.get_optimizer = factory
    version = types.ModuleType("version")
    version.VERSION = "0.0.1"
    monkeypatch.setitem(sys.modules, "toolkit", types.ModuleType("toolkit"))
    monkeypatch.setitem(sys.modules, "toolkit.optimizer", optimizer)
    monkeypatch.setitem(sys.modules, "version", version)
    module = types.ModuleType("toolkit.optimizers.adafactor")
    module.__file__ = __file__  # inspect looks there for the class's source
    monkeypatch.setitem(sys.modules, "toolkit.optimizers.adafactor", module)


# ---- alpha ----


def test_an_alpha_in_the_config_is_honoured_and_one_that_is_not_there_is_not(capsys):
    asked, silent = StandInNetwork(given={"linear_alpha": 4}), StandInNetwork(given={})
    assert {lora.scale for lora in asked.unet_loras} == {0.5}
    assert {lora.scale for lora in silent.unet_loras} == {1.0}
    assert "LoRA strength is 0.5" in capsys.readouterr().out
    assert {lora.scale for lora in StandInNetwork(given={"linear_alpha": 1}).unet_loras} == {0.125}


def test_without_a_patched_config_what_the_builder_passes_counts_unless_it_is_the_default():
    assert StandInNetwork(alpha=4).unet_loras[0].scale == 0.5
    assert StandInNetwork(alpha=1).unet_loras[0].scale == 1.0


@pytest.mark.parametrize("peft_format", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(("rank", "alpha"), [(8, 4), (10, 3), (12, 20.3), (16, 0.1), (8, 64)])
def test_a_file_reloads_to_the_same_bits(peft_format, dtype, rank, alpha):
    one = StandInNetwork(rank, given={"linear_alpha": alpha}, peft_format=peft_format)
    for parameter in one.parameters():
        parameter.data = parameter.data.to(dtype).float()
    other = StandInNetwork(rank, given={"linear_alpha": alpha + 1}, peft_format=peft_format)
    other.load(one.save(dtype))
    assert torch.equal(other.output(), one.output())
    again = StandInNetwork(rank, given={}, peft_format=peft_format)
    again.load(other.save(dtype))
    assert torch.equal(again.output(), one.output())


def test_strength_1_writes_no_alpha_into_a_peft_file():
    assert not [key for key in StandInNetwork(given={"linear_alpha": 8}).save() if key.endswith(".alpha")]
    assert not [key for key in StandInNetwork(given={}).save() if key.endswith(".alpha")]


def test_a_file_without_alpha_has_strength_1_whatever_the_config_says(capsys):
    stock = StandInNetwork(given={})
    resumed = StandInNetwork(given={"linear_alpha": 16})
    capsys.readouterr()
    resumed.load(stock.save())
    assert torch.equal(resumed.output(), stock.output())
    assert "2 LoRA modules have the file's strength 1 (no alpha, which means alpha = rank" in capsys.readouterr().out


@pytest.mark.parametrize("rank", [4, 16])
def test_another_rank_keeps_the_files_strength(rank):
    small = StandInNetwork(8, given={"linear_alpha": 4})
    other = StandInNetwork(rank, given={"linear_alpha": rank})
    other.load(small.save())
    assert {lora.scale for lora in other.unet_loras} == {0.5}
    assert {float(lora.alpha) for lora in other.unet_loras} == {rank / 2}
    if rank > 8:
        assert torch.allclose(other.output(), small.output(), atol=1e-5)


def test_rank_stabilised_strength_is_written_so_that_alpha_over_rank_gives_it():
    network = StandInNetwork(16, given={"linear_alpha": 8, "viking_rank_stabilized": True})
    assert network.unet_loras[0].scale == 2.0  # 8 / sqrt(16)
    file = network.save()
    assert float(file["transformer.blocks.0.alpha"]) / 16 == 2.0
    again = StandInNetwork(16, given={"linear_alpha": 8, "viking_rank_stabilized": True})
    again.load(file)
    assert torch.equal(again.output(), network.output())


@pytest.mark.parametrize("nothing", [0, None])
def test_an_alpha_of_nothing_means_the_rank(nothing):
    assert StandInNetwork(16, given={"linear_alpha": nothing}).unet_loras[0].scale == 1.0


def test_rank_stabilising_needs_an_alpha_that_was_asked_for(capsys):
    network = StandInNetwork(16, given={"viking_rank_stabilized": True})
    assert network.unet_loras[0].scale == 1.0
    assert "viking_rank_stabilized needs a linear_alpha" in capsys.readouterr().out


def test_a_baked_file_has_the_strength_in_its_weights():
    network = StandInNetwork(8, given={"linear_alpha": 4, "viking_alpha": "baked"})
    file = network.save()
    assert not [key for key in file if key.endswith(".alpha")]
    stock = StandInNetwork(given={})
    stock.load(file)
    assert torch.equal(stock.output(), network.output())


def test_a_model_that_cannot_carry_alpha_gets_a_baked_file(capsys):
    class Model:
        def convert_lora_weights_before_save(self, tensors):
            return {key.replace("transformer.", "model."): v for key, v in tensors.items() if ".lora_" in key}

        def convert_lora_weights_before_load(self, tensors):
            return {key.replace("model.", "transformer."): value for key, value in tensors.items()}

    network = StandInNetwork(8, given={"linear_alpha": 4}, base_model=Model())
    other = StandInNetwork(8, given={}, base_model=Model())
    other.load(network.save())
    assert torch.equal(other.output(), network.output())
    assert "Model does not keep .alpha in its files: the strength goes into lora_B" in capsys.readouterr().out


def test_bake_leaves_other_tensors_alone():
    file = {"x.lora_A.weight": torch.ones(2, 3), "x.lora_B.weight": torch.ones(4, 2), "y": torch.ones(1)}
    assert bake({**file, "x.alpha": torch.tensor(1.0)})["x.lora_B.weight"].unique() == 0.5
    assert bake(file) == file


@pytest.mark.parametrize("word", ["off", "0", "OFF", "never"])
def test_off_is_upstream(monkeypatch, word):
    monkeypatch.setenv("VIKING", word)
    network = StandInNetwork(given={"linear_alpha": 4})
    assert network.unet_loras[0].scale == 1.0
    assert not [key for key in network.save() if key.endswith(".alpha")]
    assert adapter.multiplier_dtype(BF16) == BF16


@pytest.mark.parametrize("key", ["viking_bf16", "viking_alpha"])
def test_an_unknown_word_is_an_error_that_names_the_key(key, toolkit):
    network = StandInNetwork(given={"linear_alpha": 4, key: "sometimes"})
    with pytest.raises(ValueError, match=f"network.{key} is 'sometimes'"):
        adapter.network_ready(job(network)) if key == "viking_bf16" else network.save()


# ---- which precision ----


def test_the_class_decides_and_its_parameters(toolkit, capsys):
    verdicts = {
        ("adamw", ()): "viking",
        ("adagrad", ()): "viking",
        ("own", ()): "own",
        ("own", (("stochastic_rounding", False),)): "viking",
        ("lbfgs", ()): None,
        ("stranger", ()): None,
        ("nobody", ()): None,
    }
    for (name, parameters), rounding in verdicts.items():
        assert judge_config(name, dict(parameters)).rounding == rounding, name
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("adamw", BF16, "AdamW (torch) rounds to nearest: Viking rounds for it"),
        ("lbfgs", torch.float32, "LBFGS computes one direction from all weights together, so that Viking cannot"),
        ("stranger", torch.float32, "Stranger of test_ai_toolkit is not known to Viking"),
        (
            "nobody",
            torch.float32,
            "nobody could not be built to be looked at (ValueError: Unknown optimizer type nobody)",
        ),
        ("own", torch.float32, "Adafactor rounds only weights that are on the GPU"),
    ],
)
def test_the_choice_has_a_reason(toolkit, name, dtype, reason):
    choice = choose(name, {}, device=CPU)
    assert choice.dtype == dtype
    assert choice.reason.startswith(reason)


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), BF16), ((8, 9), BF16), ((12, 0), BF16)]
)
def test_cards_without_bf16_keep_fp32(toolkit, monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choice = choose("own", {}, device=torch.device("cuda:0"))
    assert choice.dtype == dtype
    if dtype == torch.float32:
        assert "NVIDIA Card has no bf16 arithmetic (compute capability 7.5" in choice.reason
    offloaded = choose("own", {}, device=torch.device("cuda:0"), offloaded=True)
    assert offloaded.dtype == torch.float32


@pytest.mark.parametrize("kind", ["dora", "locon", "lycoris", "lorm"])
def test_networks_that_are_not_proven_in_bf16_keep_fp32(toolkit, kind):
    choice = choose("adamw", {}, device=CPU, network_type=kind)
    assert choice.dtype == torch.float32
    assert choose("adamw", {}, device=CPU, network_type=kind, mode="always", source="VIKING_BF16").dtype == BF16


def test_parameters_become_bf16_alpha_and_scale_stay_exact(toolkit, capsys):
    network = StandInNetwork(10, given={"linear_alpha": 20.3})
    expected = network.unet_loras[0].scale
    process = job(network)
    adapter.network_ready(process)
    assert {p.dtype for p in network.parameters()} == {BF16}
    lora = network.unet_loras[0]
    assert lora._runtime_scale.dtype == torch.float32
    assert float(lora._runtime_scale) == pytest.approx(expected, rel=1e-7)
    assert lora._runtime_scale.shape == (1,)  # not a bf16 number: the product is computed in fp32
    assert float(lora.alpha) == pytest.approx(20.3, rel=1e-7)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(
        f"Viking is active (Viking {viking.__version__}, ai-toolkit 0.0.1, torch {torch.__version__})"
    )
    optimizer = torch.optim.AdamW(network.parameters())
    adapter.optimizer_ready(process, optimizer)
    assert is_rounding(optimizer)


def test_an_adapter_that_was_cast_before_it_is_loaded_has_its_strength_exactly():
    """As the toolkit loads accuracy recovery and assistant adapters: force_to(bf16), then the file."""
    file = StandInNetwork(10, given={"linear_alpha": 3}).save()
    adapter_network = StandInNetwork(10, given={"linear_alpha": 10})
    adapter_network.force_to(CPU, BF16)
    adapter_network.load(file)
    lora = adapter_network.unet_loras[0]
    assert lora._runtime_scale.dtype == torch.float32
    assert float(lora._runtime_scale) == pytest.approx(0.3, rel=1e-7)


def test_a_strength_that_bf16_holds_needs_no_fp32_product(toolkit):
    network = StandInNetwork(8, given={"linear_alpha": 4})
    adapter.network_ready(job(network))
    assert network.unet_loras[0]._runtime_scale.shape == ()


@pytest.mark.parametrize(
    ("environment", "given", "words"),
    [
        ({"VIKING": "off"}, {}, "Viking is off"),
        ({"VIKING_BF16": "never"}, {}, "trained in fp32: VIKING_BF16=never"),
        ({"VIKING_BF16": "never"}, {"viking_bf16": "always"}, "trained in fp32: VIKING_BF16=never"),
        ({}, {"viking_bf16": "never"}, "trained in fp32: network.viking_bf16=never"),
        ({}, {"viking_bf16": False}, "trained in fp32: network.viking_bf16=never"),
    ],
)
def test_off_and_never_are_upstream_and_say_so(toolkit, monkeypatch, capsys, environment, given, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    network = StandInNetwork(given=given)
    process = job(network)
    adapter.network_ready(process)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert words in capsys.readouterr().out
    optimizer = torch.optim.AdamW(network.parameters())
    adapter.optimizer_ready(process, optimizer)
    assert not is_rounding(optimizer)


def test_a_job_without_a_network_is_left_alone():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    adapter.optimizer_ready(types.SimpleNamespace(), optimizer)
    assert not is_rounding(optimizer)


def test_hidden_gradients_are_found_by_clipping_again(toolkit, monkeypatch, capsys):
    weights = [nn.Parameter(torch.ones(4, dtype=BF16)) for _ in range(2)]
    optimizer = Adafactor(weights, lr=0.1)
    (weights[0] * 2).sum().backward()
    assert weights[0].grad is None
    process = types.SimpleNamespace(viking_choice=precision.Choice(BF16, judge(optimizer), ""))
    adapter.optimizer_ready(process, optimizer)
    assert "Adafactor leaves gradients where clipping" in capsys.readouterr().out
    (weights[0] * 2).sum().backward()
    assert torch.equal(weights[0].grad, torch.full((4,), 2.0, dtype=BF16))
    assert let_clipping_see_gradients(optimizer) == 0
    assert not is_rounding(optimizer)
