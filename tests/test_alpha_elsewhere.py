"""A file with `.alpha` has its strength in other programs too: by their own code, where it is installed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from support.toolkit_standin import StandInNetwork
from viking.adapters.ai_toolkit import bake as bake_command
from viking.adapters.ai_toolkit.alpha import bake


def tensors(
    name: str, rank: int = 8, alpha: float | None = 4.0, rows: int = 32, columns: int = 32
) -> dict[str, torch.Tensor]:
    """One LoRA as the toolkit writes it in PEFT's format, and Viking its alpha."""
    generator = torch.Generator().manual_seed(len(name))
    file = {
        f"{name}.lora_A.weight": torch.randn(rank, columns, generator=generator),
        f"{name}.lora_B.weight": torch.randn(rows, rank, generator=generator),
    }
    if alpha is not None:
        file[f"{name}.alpha"] = torch.tensor(alpha)
    return file


def update(file: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """What a file adds to a weight, by the convention of ComfyUI (comfy/weight_adapter/lora.py) and of kohya's
    sd-scripts (networks/lora*.py): `alpha / down.shape[0]`, 1 where there is no alpha."""
    down, up, alpha = (file.get(name + end) for end in (".lora_A.weight", ".lora_B.weight", ".alpha"))
    scale = 1.0 if alpha is None else alpha.item() / down.shape[0]
    return scale * (up @ down)


@pytest.mark.parametrize(("rank", "alpha"), [(8, 4), (10, 3), (1280, 64), (16, 20.3)])
@pytest.mark.parametrize("stabilized", [False, True])
def test_comfyui_and_kohya_compute_the_strength_that_was_trained(rank, alpha, stabilized):
    network = StandInNetwork(rank, given={"linear_alpha": alpha, "viking_rank_stabilized": stabilized})
    file = network.save(torch.float16)
    for lora in network.unet_loras:
        name = lora.lora_name.replace("$$", ".")
        assert file[f"{name}.alpha"].item() / file[f"{name}.lora_A.weight"].shape[0] == lora.scale
        assert lora.scale == pytest.approx(alpha / (math.sqrt(rank) if stabilized else rank), rel=1e-6)


def test_peft_scales_as_we_do():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    for stabilized in (False, True):
        network = StandInNetwork(8, given={"linear_alpha": 4, "viking_rank_stabilized": stabilized})
        lora = network.unet_loras[0]
        base = nn.Sequential(nn.Linear(6, 10, bias=False))
        nn.init.zeros_(base[0].weight)
        config = peft.LoraConfig(r=8, lora_alpha=4, use_rslora=stabilized, target_modules=["0"])
        model = peft.get_peft_model(base, config)
        layer = model.base_model.model[0]
        layer.lora_A["default"].weight.data = lora.lora_down.weight.data.clone()
        layer.lora_B["default"].weight.data = lora.lora_up.weight.data.clone()
        assert layer.scaling["default"] == pytest.approx(lora.scale, rel=1e-7)
        x = torch.randn(5, 6)
        assert torch.allclose(model(x), lora(x), rtol=1e-6, atol=1e-6)


# ---- diffusers' own loaders ----


@pytest.mark.parametrize(
    ("converter", "ours", "theirs"),
    [
        (
            "_convert_non_diffusers_wan_lora_to_diffusers",
            "diffusion_model.blocks.0.self_attn.q",
            "transformer.blocks.0.attn1.to_q",
        ),
        (
            "_convert_non_diffusers_qwen_lora_to_diffusers",
            "diffusion_model.transformer_blocks.0.attn.to_q",
            "transformer.transformer_blocks.0.attn.to_q",
        ),
        (
            "_convert_non_diffusers_z_image_lora_to_diffusers",
            "diffusion_model.layers.0.attention.to_q",
            "transformer.layers.0.attention.to_q",
        ),
    ],
)
@pytest.mark.parametrize("alpha", [4.0, 20.3, None])
def test_diffusers_converters_take_alpha_into_the_weights(converter, ours, theirs, alpha):
    conversion = pytest.importorskip("diffusers.loaders.lora_conversion_utils", reason="diffusers is not installed")
    file = tensors(ours, alpha=alpha)
    expected = update(file, ours)
    result = getattr(conversion, converter)(dict(file))
    assert torch.allclose(update(result, theirs), expected, rtol=1e-5, atol=1e-6)


def flux_transformer() -> nn.Module:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


@pytest.mark.parametrize("alpha", [4.0, 20.0, None])
def test_flux_1_in_diffusers_has_the_strength(alpha):
    transformer = flux_transformer()
    from diffusers.loaders import FluxLoraLoaderMixin

    name = "transformer.single_transformer_blocks.0.attn.to_q"
    file = tensors(name, alpha=alpha)
    weights, alphas, metadata = FluxLoraLoaderMixin.lora_state_dict(
        dict(file), return_alphas=True, return_lora_metadata=True
    )
    FluxLoraLoaderMixin.load_lora_into_transformer(weights, alphas, transformer, adapter_name="ours", metadata=metadata)
    layer = transformer.single_transformer_blocks[0].attn.to_q
    assert layer.scaling["ours"] == (1.0 if alpha is None else alpha / 8)
    x = torch.randn(3, 32)
    expected = layer.base_layer(x) + x @ update(file, name).T
    assert torch.allclose(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_flux_2_in_diffusers_refuses_alpha_and_takes_the_baked_file(tmp_path, capsys):
    """As of diffusers 0.42: the day the first half fails, docs/ai-toolkit.md can drop a paragraph."""
    conversion = pytest.importorskip("diffusers.loaders.lora_conversion_utils", reason="diffusers is not installed")
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    name = "diffusion_model.single_blocks.0.linear1"
    file = tensors(name)
    with pytest.raises(ValueError, match="should be empty"):
        conversion._convert_non_diffusers_flux2_lora_to_diffusers(dict(file))
    theirs = "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj"
    result = conversion._convert_non_diffusers_flux2_lora_to_diffusers(bake(file))
    assert torch.equal(update(result, theirs), update(file, name))

    original, baked = tmp_path / "lora.safetensors", tmp_path / "baked.safetensors"
    safetensors.save_file(file, original, {"step": "7"})
    assert bake_command.main([str(original), str(baked)]) == 0
    assert "1 strengths baked" in capsys.readouterr().out
    assert torch.equal(update(safetensors.load_file(baked), name), update(file, name))
    assert bake_command.main([str(tmp_path / "absent"), str(baked)]) == 1
    assert bake_command.main([]) == 2
