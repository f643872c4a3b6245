"""The adapter in ai-toolkit's own classes, patched. Runs where VIKING_AI_TOOLKIT names a checkout; on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support import toolkit_tree
from viking.adapters import ai_toolkit as adapter
from viking.adapters.ai_toolkit.optimizers import judge_config, let_clipping_see_gradients
from viking.adapters.ai_toolkit.precision import choose

pytestmark = pytest.mark.skipif(
    toolkit_tree.tree() is None, reason=f"{toolkit_tree.VARIABLE} does not name an ai-toolkit checkout"
)

CPU = torch.device("cpu")


class TinyTransformer(nn.Module):
    """Two linears and a convolution, named so that the toolkit finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(12, 24), "down": nn.Linear(24, 12)})])
        self.patch = nn.Conv2d(3, 12, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = tokens + block["down"](torch.nn.functional.gelu(block["up"](tokens)))
        return tokens


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> types.SimpleNamespace:
    source = toolkit_tree.tree()
    assert source is not None
    root = toolkit_tree.patched_copy(source, tmp_path_factory.mktemp("toolkit"))
    toolkit_tree.enter(root)
    from toolkit.config_modules import NetworkConfig
    from toolkit.lora_special import LoRASpecialNetwork
    from toolkit.optimizer import get_optimizer

    return types.SimpleNamespace(
        root=root, Network=LoRASpecialNetwork, NetworkConfig=NetworkConfig, get_optimizer=get_optimizer
    )


def model() -> TinyTransformer:
    torch.manual_seed(0)
    return TinyTransformer().requires_grad_(False)


def build(toolkit: Any, transformer: bool = True, config: dict[str, Any] | None = None, **overrides: Any) -> Any:
    """A network over a model of its own, as the trainer builds it; `config` is the job's `network:` section."""
    unet = model()
    arguments: dict[str, Any] = {"lora_dim": 8, "alpha": 4, "conv_lora_dim": 4, "conv_alpha": 1, "network_type": "lora"}
    if config is not None:
        network_config = toolkit.NetworkConfig(**config)
        arguments = {
            "lora_dim": network_config.linear,
            "alpha": network_config.linear_alpha,
            "conv_lora_dim": network_config.conv,
            "conv_alpha": network_config.conv_alpha,
            "network_config": network_config,
            "network_type": network_config.type,
        }
    arguments.update(overrides)
    torch.manual_seed(1)
    network = toolkit.Network(
        text_encoder=None,
        unet=unet,
        train_text_encoder=False,
        is_transformer=transformer,
        target_lin_modules=["TinyTransformer"],
        target_conv_modules=["TinyTransformer"],
        **arguments,
    )
    network.force_to(CPU, dtype=torch.float32)
    network._update_torch_multiplier()
    network.apply_to(None, unet, False, True)
    network.unet = [unet]
    return network


def randomize(network: Any, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.3


def output(network: Any) -> torch.Tensor:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(4))
    network.is_active = True
    with torch.no_grad():
        return network.unet[0](x)


def scales(network: Any) -> dict[str, float]:
    return {module.lora_name.replace("$$", ".").replace("_", "."): module.scale for module in network.unet_loras}


# ---- alpha ----


@pytest.mark.parametrize("transformer", [True, False], ids=["PEFT format", "kohya format"])
def test_rank_8_alpha_4_is_a_half_and_conv_rank_4_alpha_1_a_quarter(toolkit, transformer):
    network = build(toolkit, transformer)
    assert sorted({module.scale for module in network.unet_loras}) == [0.25, 0.5]
    for module in network.unet_loras:
        conv = isinstance(module.lora_down, nn.Conv2d)
        assert module.scale == (0.25 if conv else 0.5)
        assert module._runtime_scale == module.scale
        assert float(module.alpha) == (1 if conv else 4)


@pytest.mark.parametrize("transformer", [True, False], ids=["PEFT format", "kohya format"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rank", "alpha"), [(8, 4), (16, 1), (12, 20.3), (10, 64), (8, 8)])
def test_a_saved_file_reloads_to_the_same_bits(toolkit, tmp_path, transformer, dtype, rank, alpha):
    network = build(toolkit, transformer, lora_dim=rank, alpha=alpha)
    randomize(network)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype).float()  # what the file can hold
    file = str(tmp_path / "lora.safetensors")
    network.save_weights(file, dtype=dtype)
    again = build(toolkit, transformer, lora_dim=rank, alpha=alpha)
    again.load_weights(file)
    assert scales(again) == scales(network)
    assert torch.equal(output(again), output(network))
    # Under a config that asks for something else, the file wins.
    other = build(toolkit, transformer, lora_dim=rank, alpha=alpha * 2, conv_alpha=3)
    other.load_weights(file)
    assert torch.equal(output(other), output(network))


def test_a_file_of_peft_format_holds_alpha_in_fp32(toolkit):
    tensors = build(toolkit).get_state_dict(dtype=torch.bfloat16)
    alphas = {key: value for key, value in tensors.items() if key.endswith(".alpha")}
    assert alphas["transformer.blocks.0.up.alpha"].dtype == torch.float32
    assert {key: float(value) for key, value in alphas.items()} == {
        "transformer.blocks.0.up.alpha": 4.0,
        "transformer.blocks.0.down.alpha": 4.0,
        "transformer.patch.alpha": 1.0,
    }
    assert tensors["transformer.blocks.0.up.lora_A.weight"].dtype == torch.bfloat16


def test_strength_1_leaves_the_file_as_the_toolkit_writes_it(toolkit):
    tensors = build(toolkit, alpha=8, conv_alpha=4).get_state_dict(dtype=torch.bfloat16)
    assert not [key for key in tensors if key.endswith(".alpha")]


@pytest.mark.parametrize(
    ("config", "linear", "conv"),
    [
        ({"linear": 8}, 1.0, None),
        ({"linear": 8, "conv": 4}, 1.0, 1.0),
        ({"linear": 8, "linear_alpha": 1}, 0.125, None),
        ({"linear": 8, "alpha": 2}, 0.25, None),
        ({"rank": 8, "linear_alpha": 16, "conv": 4, "conv_alpha": 8}, 2.0, 2.0),
        ({"linear": 8, "conv": 4, "conv_alpha": 1}, 1.0, 0.25),
        ({"linear": 8, "linear_alpha": 4, "conv": 4}, 0.5, 1.0),
        ({"linear": 16, "linear_alpha": 4, "viking_rank_stabilized": True}, 1.0, None),
        ({"type": "lokr", "lokr_full_rank": True, "linear": 8, "linear_alpha": 4}, 1.0, 1.0),
        ({"type": "fullrank", "linear": 4, "linear_alpha": 2}, 1.0, None),
        ({"type": "dora", "linear": 8, "linear_alpha": 4}, 1.0, None),
    ],
    ids=str,
)
def test_only_an_alpha_that_stands_in_the_config_counts(toolkit, config, linear, conv):
    network = build(toolkit, True, config)
    for module in network.unet_loras:
        is_conv = module.org_module[0].__class__.__name__ == "Conv2d"
        assert module.scale == pytest.approx(conv if is_conv else linear, rel=1e-7)


def test_without_viking_everything_is_as_upstream_has_it(toolkit, monkeypatch, tmp_path):
    monkeypatch.setenv("VIKING", "off")
    network = build(toolkit)
    assert {module.scale for module in network.unet_loras} == {1.0}
    assert not [key for key in network.get_state_dict() if key.endswith(".alpha")]


def test_a_kohya_file_with_alpha_4_under_a_config_with_alpha_8(toolkit, tmp_path, capsys):
    trained = build(toolkit, False, alpha=4)
    randomize(trained)
    file = str(tmp_path / "kohya.safetensors")
    trained.save_weights(file, dtype=torch.float32)
    loaded = build(toolkit, False, alpha=8)
    assert {module.scale for module in loaded.unet_loras} == {1.0, 0.25}
    loaded.load_weights(file)
    assert {module.scale for module in loaded.unet_loras} == {0.5, 0.25}
    assert torch.equal(output(loaded), output(trained))
    assert "the file's strength 0.5 (alpha 4 at rank 8) and not the 1" in capsys.readouterr().out


def test_a_file_without_alpha_means_alpha_is_its_rank(toolkit, tmp_path):
    """What the toolkit wrote before: trained at strength 1, whatever the config said."""
    stock = build(toolkit, alpha=8, conv_alpha=4)
    randomize(stock)
    file = str(tmp_path / "stock.safetensors")
    stock.save_weights(file, dtype=torch.float32)
    resumed = build(toolkit, True, {"linear": 8, "linear_alpha": 16, "conv": 4, "conv_alpha": 4})
    assert 2.0 in scales(resumed).values()
    resumed.load_weights(file)
    assert set(scales(resumed).values()) == {1.0}
    assert torch.equal(output(resumed), output(stock))


@pytest.mark.parametrize("transformer", [True, False], ids=["PEFT format", "kohya format"])
def test_a_change_of_rank_keeps_the_strength(toolkit, tmp_path, transformer):
    small = build(toolkit, transformer, conv_lora_dim=None)
    randomize(small)
    file = str(tmp_path / "small.safetensors")
    small.save_weights(file, dtype=torch.float32)
    large = build(toolkit, transformer, lora_dim=16, alpha=16, conv_lora_dim=None)
    large.load_weights(file)
    assert set(scales(large).values()) == {0.5}
    assert {float(module.alpha) for module in large.unet_loras} == {8.0}
    assert torch.allclose(output(large), output(small), atol=1e-6)


def test_an_alpha_that_is_no_integer_survives_an_integer_buffer(toolkit, tmp_path):
    trained = build(toolkit, alpha=2.5)
    randomize(trained)
    file = str(tmp_path / "fraction.safetensors")
    trained.save_weights(file, dtype=torch.bfloat16)
    loaded = build(toolkit, alpha=4)
    loaded.load_weights(file)
    assert 2.5 / 8 in scales(loaded).values()


def test_merging_uses_the_same_strength(toolkit):
    network = build(toolkit)
    randomize(network)
    expected = output(network)
    network.merge_in(1.0)
    assert torch.allclose(output(network), expected, atol=1e-5)


def test_doras_magnitudes_come_back(toolkit, tmp_path):
    trained = build(toolkit, conv_lora_dim=None, network_type="dora")
    randomize(trained)
    file = str(tmp_path / "dora.safetensors")
    trained.save_weights(file, dtype=torch.float32)
    loaded = build(toolkit, conv_lora_dim=None, network_type="dora")
    loaded.load_weights(file)
    for one, other in zip(trained.unet_loras, loaded.unet_loras, strict=True):
        assert torch.equal(one.magnitude, other.magnitude)
        assert other.scale == 1.0
    assert torch.equal(output(loaded), output(trained))


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lokr_reloads_to_the_same_bits(toolkit, tmp_path, full, dtype):
    config = {"type": "lokr", "lokr_full_rank": full, "lokr_factor": 2, "linear": 2, "linear_alpha": 1}
    trained = build(toolkit, True, config, conv_lora_dim=None)
    randomize(trained)
    for parameter in trained.parameters():
        parameter.data = parameter.data.to(dtype).float()
    file = str(tmp_path / "lokr.safetensors")
    trained.save_weights(file, dtype=dtype)
    loaded = build(toolkit, True, config, conv_lora_dim=None)
    loaded.load_weights(file)
    assert set(scales(loaded).values()) == ({1.0} if full else {0.5})
    assert all(torch.isfinite(module._runtime_scale).all() for module in loaded.unet_loras)
    assert torch.equal(output(loaded), output(trained))


def test_full_rank_reloads_to_the_same_bits(toolkit, tmp_path):
    config = {"type": "fullrank", "linear": 4}
    trained = build(toolkit, True, config)
    randomize(trained)
    file = str(tmp_path / "full.safetensors")
    trained.save_weights(file, dtype=torch.float32)
    loaded = build(toolkit, True, config)
    loaded.load_weights(file)
    assert set(scales(loaded).values()) == {1.0}
    assert torch.equal(output(loaded), output(trained))


def test_a_model_that_renames_weights_only_gets_the_strength_in_the_weights(toolkit, tmp_path):
    class Renaming:
        use_old_lokr_format = False
        arch = "tiny"

        def convert_lora_weights_before_save(self, tensors):
            return {key.replace("transformer.", "diffusion_model."): value for key, value in tensors.items()}

        def convert_lora_weights_before_load(self, tensors):
            assert all(".lora_" in key for key in tensors), "only weights are known here"
            return {key.replace("diffusion_model.", "transformer."): value for key, value in tensors.items()}

        def get_transformer_block_names(self):
            return None

    base = Renaming()
    trained = build(toolkit, base_model=base)
    randomize(trained)
    file = str(tmp_path / "baked.safetensors")
    trained.save_weights(file, dtype=torch.float32)
    loaded = build(toolkit, base_model=base)
    loaded.load_weights(file)
    assert set(scales(loaded).values()) == {1.0}
    assert torch.allclose(output(loaded), output(trained), atol=1e-6)


# ---- LoRA first ----


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_same_sum_and_the_same_gradients(toolkit, kind):
    network = build(toolkit, conv_lora_dim=None if kind == "dora" else 4, network_type=kind)
    randomize(network)
    network.is_active = True
    module = network.unet_loras[0]
    x = torch.randn(3, 5, 12, requires_grad=True)

    def stock(x: torch.Tensor) -> torch.Tensor:  # what upstream's forward computes, in its order
        base = module.org_forward(x)
        branch = module._call_forward(x.to(module.lora_down.weight.dtype)) * network.torch_multiplier[:, None, None]
        total = branch.to(base.dtype)
        if kind == "dora":
            weight = (module.lora_up.weight @ module.lora_down.weight) * network.torch_multiplier.mean()
            total = total + module.apply_dora(x, weight).to(base.dtype)
        return base + total

    results = []
    for forward in (stock, module.forward):
        x.grad = None
        network.zero_grad()
        out = forward(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad.clone(), *(p.grad.clone() for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recompute_leaves_out_the_original_product(toolkit):
    network = build(toolkit, conv_lora_dim=None)
    network.is_active = True
    module = next(m for m in network.unet_loras if m.lora_name.endswith("down"))
    calls = []
    original = module.org_forward
    module.org_forward = lambda x: (calls.append(len(calls)), original(x), calls.append("done"))[1]
    x = torch.randn(2, 5, 24, requires_grad=True)
    torch.utils.checkpoint.checkpoint(module.forward, x, use_reentrant=False).sum().backward()
    assert calls.count("done") == 1  # in forward; when recomputing, what backward needs is there before it


@pytest.mark.parametrize("multiplier", [1.0, 1, 0.7, [1.0, 0.5]])
def test_multipliers_mean_the_same(toolkit, multiplier):
    network = build(toolkit)
    randomize(network)
    full = output(network)
    network.multiplier = multiplier
    x = torch.randn(2, 5, 12)
    module = network.unet_loras[0]
    network.is_active = True
    strength = torch.tensor(multiplier).reshape(-1, 1, 1)
    expected = module.org_forward(x) + module._call_forward(x) * strength
    assert torch.allclose(module.forward(x), expected, atol=1e-6)
    network.multiplier = 1.0
    assert torch.equal(output(network), full)


# ---- bf16 ----

NAMES: dict[str, tuple[str | None, str]] = {
    "dadaptationlion": (None, "could not be built"),  # the factory passes an argument that the class does not take
    "dadaptationadam": (None, "could not be built"),
    "dadaptation": (None, "one step size from all weights"),
    "prodigy8bit": ("own", "Prodigy8bit rounds stochastically itself"),
    "prodigy": (None, "one step size from all weights"),
    "adam8": ("own", "Adam8bit rounds stochastically itself"),
    "adamw8": ("own", "Adam8bit rounds stochastically itself"),
    "adam8bit": ("viking", "Adam8bit .bitsandbytes. rounds to nearest"),
    "adamw8bit": ("viking", "AdamW8bit .bitsandbytes. rounds to nearest"),
    "ademamix8bit": ("viking", "AdEMAMix8bit .bitsandbytes. rounds to nearest"),
    "lion8bit": ("viking", "Lion8bit .bitsandbytes. rounds to nearest"),
    "adam": ("viking", "Adam .torch. rounds to nearest"),
    "adamw": ("viking", "AdamW .torch. rounds to nearest"),
    "lion": ("viking", "Lion .lion_pytorch. rounds to nearest"),
    "adagrad": ("viking", "Adagrad .torch. rounds to nearest"),
    "adafactor": ("own", "Adafactor rounds stochastically itself"),
    "automagic": ("own", "Automagic rounds stochastically itself"),
    "automagic2": ("own", "Automagic2 rounds stochastically itself"),
    "automagic3": ("own", "Automagic3 rounds stochastically itself"),
    "automagicexperiment": ("own", "AutomagicEXPERIMENT rounds stochastically itself"),
}
NEEDS = {"dadaptation": "dadaptation", "prodigy": "prodigyopt", "lion": "lion_pytorch"}


def needed(name: str) -> str | None:
    if name.endswith("8bit") and name != "prodigy8bit":
        return "bitsandbytes"
    return next((package for start, package in NEEDS.items() if name.startswith(start) and "8bit" not in name), None)


def test_the_table_has_every_name_of_the_factory(toolkit):
    source = (toolkit.root / "toolkit" / "optimizer.py").read_text()
    named = set(re.findall(r"lower_type == ['\"](\w+)['\"]", source)) | set(
        re.findall(r"lower_type\.startswith\(\"(\w+)\"\)", source)
    )
    assert named <= set(NAMES), named - set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_of_the_factory_gets_its_dtype_and_a_reason(toolkit, name, capsys):
    if needed(name):
        pytest.importorskip(needed(name))
    rounding, reason = NAMES[name]
    verdict = judge_config(name, {}, toolkit.get_optimizer)
    assert verdict.rounding == rounding, verdict
    assert re.search(reason, verdict.reason), verdict.reason
    choice = choose(name, {}, device=CPU, factory=toolkit.get_optimizer)
    assert choice.dtype == (torch.bfloat16 if rounding == "viking" else torch.float32)
    if rounding == "own":
        assert "rounds only weights that are on the GPU" in choice.reason
    assert capsys.readouterr().out == ""  # building the throw-away optimizer is not seen


def test_the_parameters_decide_too_and_stay_as_they_were(toolkit):
    parameters = {"stochastic_rounding": False}
    verdict = judge_config("adafactor", parameters, toolkit.get_optimizer)
    assert verdict.rounding == "viking"
    assert "stochastic_rounding off" in verdict.reason
    assert parameters == {"stochastic_rounding": False}


def test_a_name_that_the_factory_does_not_know_is_fp32_with_its_reason(toolkit):
    choice = choose("muon9000", {}, device=CPU, factory=toolkit.get_optimizer)
    assert choice.dtype == torch.float32
    assert "muon9000 could not be built" in choice.reason


def process(toolkit: Any, optimizer: str, config: dict[str, Any] | None = None, **params: Any) -> Any:
    network = build(toolkit, True, {"linear": 10, "linear_alpha": 3, **(config or {})})
    return types.SimpleNamespace(
        network=network,
        network_config=network.network_config,
        train_config=types.SimpleNamespace(optimizer=optimizer, optimizer_params=params),
        device_torch=CPU,
    )


def test_the_network_is_bf16_and_its_strength_exact(toolkit, capsys):
    job = process(toolkit, "adamw")
    parameters = list(job.network.parameters())
    adapter.network_ready(job)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("Viking is active (Viking ")
    assert "trained in bf16: AdamW (torch) rounds to nearest: Viking rounds for it" in said
    assert {p.dtype for p in job.network.parameters()} == {torch.bfloat16}
    assert [id(p) for p in job.network.parameters()] == [id(p) for p in parameters]
    for module in job.network.unet_loras:
        assert module._runtime_scale.dtype == torch.float32
        assert float(module._runtime_scale) == pytest.approx(0.3, rel=1e-7)
        assert float(module.alpha) == 3
    job.network.multiplier = 0.7
    assert job.network.torch_multiplier.dtype == torch.float32
    assert float(job.network.torch_multiplier) == pytest.approx(0.7, rel=1e-7)


def test_a_job_trains_saves_and_resumes_in_bf16(toolkit, tmp_path):
    job = process(toolkit, "adamw")
    network = job.network
    adapter.network_ready(job)
    network._update_torch_multiplier()
    groups = network.prepare_optimizer_params(1e-3, 1e-3, 1e-3)
    optimizer = toolkit.get_optimizer(groups, "adamw", learning_rate=1e-3, optimizer_params={})
    adapter.optimizer_ready(job, optimizer)
    assert viking.optim.rounding.is_rounding(optimizer)
    network.is_active = True
    x, target = torch.randn(4, 3, 4, 4), torch.randn(4, 16, 12)
    losses = []
    for _ in range(60):
        loss = (network.unet[0](x) - target).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.97
    file = str(tmp_path / "job.safetensors")
    network.save_weights(file, dtype=torch.bfloat16)
    resumed = process(toolkit, "adamw")
    adapter.network_ready(resumed)
    resumed.network._update_torch_multiplier()
    resumed.network.load_weights(file)
    assert torch.equal(output(resumed.network), output(network))


def test_dora_never_and_off_stay_in_fp32(toolkit, monkeypatch, capsys):
    for config, environment, words in (
        ({"type": "dora"}, {}, "DoRA's magnitudes"),
        ({"viking_bf16": "never"}, {}, "network.viking_bf16=never"),
        ({}, {"VIKING_BF16": "never"}, "VIKING_BF16=never"),
        ({}, {"VIKING": "off"}, "Viking is off"),
    ):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            job = process(toolkit, "adamw", config)
            adapter.network_ready(job)
        assert {p.dtype for p in job.network.parameters()} == {torch.float32}
        assert words in capsys.readouterr().out


def test_always_is_always(toolkit, monkeypatch, capsys):
    pytest.importorskip("prodigyopt")
    monkeypatch.setenv("VIKING_BF16", "always")
    job = process(toolkit, "prodigy")
    adapter.network_ready(job)
    assert {p.dtype for p in job.network.parameters()} == {torch.bfloat16}
    assert "VIKING_BF16=always" in capsys.readouterr().out


def test_the_toolkits_own_optimizers_leave_gradients_for_clipping(toolkit):
    weights = [nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = toolkit.get_optimizer(weights, "adafactor", learning_rate=1e-3, optimizer_params={})
    assert let_clipping_see_gradients(optimizer) == 3
    sum((w * w).sum() for w in weights).backward()
    assert all(w.grad is not None for w in weights)
    assert torch.nn.utils.clip_grad_norm_(weights, 1.0) > 1


@pytest.mark.parametrize("name", ["adafactor", "automagic"])
def test_the_toolkits_own_optimizers_can_be_wrapped_on_the_cpu(toolkit, name):
    """Their own rounding refuses weights on the CPU; with Viking's they never see one in bf16."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = toolkit.get_optimizer([weight], name, learning_rate=1e-4, optimizer_params={})
    let_clipping_see_gradients(optimizer)
    viking.stochastic_rounding(optimizer)
    for _ in range(5):
        weight.grad = torch.randn(weight.shape).to(torch.bfloat16)
        optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert not torch.equal(weight, torch.ones_like(weight))


# ---- off ----

A_RUN = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from support import toolkit_tree
toolkit_tree.enter(Path({root!r}))
import torch
from toolkit.config_modules import NetworkConfig
from toolkit.lora_special import LoRASpecialNetwork

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(12, 24), torch.nn.Linear(24, 12)

digest = hashlib.sha256()
for transformer in (True, False):
    for kind in ("lora", "dora", "lokr", "fullrank"):
        torch.manual_seed(0)
        config = NetworkConfig(type=kind, linear=8, linear_alpha=4, lokr_full_rank=False, lokr_factor=2)
        tiny = Tiny().requires_grad_(False)
        network = LoRASpecialNetwork(
            None, tiny, lora_dim=config.linear, alpha=config.linear_alpha, train_text_encoder=False,
            is_transformer=transformer, target_lin_modules=["Tiny"], network_config=config, network_type=kind)
        network.force_to("cpu", dtype=torch.float32)
        network._update_torch_multiplier()
        network.apply_to(None, tiny, False, True)
        network.is_active = True
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        for step in range(4):
            network.multiplier = 1.0 if step < 3 else 0.7
            x = torch.randn(2, 5, 12)
            out = tiny.down(torch.nn.functional.gelu(tiny.up(x)))
            loss = (out - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            digest.update(out.detach().numpy().tobytes())
        saved = network.get_state_dict(dtype=torch.float16)
        for key in sorted(saved):
            digest.update(key.encode() + saved[key].numpy().tobytes())
        network.load_weights(saved)
        digest.update(tiny.up(x).detach().numpy().tobytes())
print("digest", digest.hexdigest())
"""


def test_off_trains_saves_and_loads_as_the_stock_toolkit_bit_for_bit(tmp_path):
    source = toolkit_tree.tree()
    assert source is not None
    digests = {}
    for name, patch in (("stock", False), ("off", True), ("on", True)):
        root = toolkit_tree.patched_copy(source, tmp_path / name, patch=patch)
        script = A_RUN.format(tests=str(Path(__file__).parent), root=str(root))
        environment = {**os.environ, "VIKING": "off" if name == "off" else "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        digests[name] = re.search(r"digest (\w+)", done.stdout)[1]
    assert digests["off"] == digests["stock"]
    assert digests["on"] != digests["stock"]  # alpha is honoured


# ---- the series for upstream: the same changes without Viking ----

UPSTREAM = Path(__file__).parent.parent / "patches" / "ai-toolkit" / "upstream"
WITHOUT_VIKING = """
import sys
sys.modules["viking"] = None  # importing it would raise
sys.path.insert(0, {tests!r})
from pathlib import Path
from support import toolkit_tree
toolkit_tree.enter(Path({root!r}))
import torch
from toolkit.config_modules import NetworkConfig
from toolkit.lora_special import LoRASpecialNetwork

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.patch = torch.nn.Linear(12, 24), torch.nn.Conv2d(3, 12, 3)

def build(transformer=True, **config):
    torch.manual_seed(0)
    config = NetworkConfig(**config)
    tiny = Tiny()
    network = LoRASpecialNetwork(
        None, tiny, lora_dim=config.linear, alpha=config.linear_alpha, conv_lora_dim=config.conv,
        conv_alpha=config.conv_alpha, train_text_encoder=False, is_transformer=transformer,
        target_lin_modules=["Tiny"], target_conv_modules=["Tiny"], network_config=config, network_type=config.type)
    network.force_to("cpu", dtype=torch.float32)
    network._update_torch_multiplier()
    network.apply_to(None, tiny, False, True)
    network.tiny, network.is_active = [tiny], True
    for parameter in network.parameters():
        parameter.data.normal_()
    return network

def scales(network):
    return [module.scale for module in network.unet_loras]

x = torch.randn(2, 12)
for transformer in (True, False):
    asked = build(transformer, linear=8, linear_alpha=4, conv=4, conv_alpha=1)
    assert scales(asked) == [0.5, 0.25], scales(asked)
    other = build(transformer, linear=8, linear_alpha=6.5, conv=4)
    other.load_weights(asked.get_state_dict(dtype=torch.float32))
    assert scales(other) == [0.5, 0.25]
    assert torch.equal(other.tiny[0].up(x), asked.tiny[0].up(x))
stock = build(linear=8)
assert scales(stock) == [1.0] and not [key for key in stock.get_state_dict() if key.endswith(".alpha")]
third = build(linear=9, linear_alpha=3)
third.force_to("cpu", dtype=torch.bfloat16)
assert third.unet_loras[0]._runtime_scale.dtype == torch.float32
assert NetworkConfig(linear=8, dtype="bf16").dtype == "bf16"
assert sys.modules["viking"] is None
"""


def test_the_series_for_upstream_does_the_same_without_viking(tmp_path):
    source = toolkit_tree.tree()
    assert source is not None
    root = toolkit_tree.patched_copy(source, tmp_path / "tree", patch=False)
    series = sorted(UPSTREAM.glob("*.patch"))
    assert len(series) == 3
    for patch in series:
        assert "viking." not in patch.read_text(encoding="utf-8").split("\ndiff --git", 1)[1]
        subprocess.run(["git", "apply", str(patch)], cwd=root, check=True)
    script = WITHOUT_VIKING.format(tests=str(Path(__file__).parent), root=str(root))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
