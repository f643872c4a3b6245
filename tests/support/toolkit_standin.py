"""A network with the surface of ai-toolkit's that the adapter touches, written for these tests.

Names and order of events are the toolkit's: alpha is decided while the network is built, `.alpha` is dropped in PEFT's
format unless the adapter adds it, load_state_dict fills what it knows and computes no scale.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from viking.adapters import ai_toolkit as adapter


class StandInLora(nn.Module):
    def __init__(self, name: str, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.lora_name, self.lora_dim, self.org_module = name, rank, [linear]
        self.lora_down = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, linear.out_features, bias=False)
        self.register_buffer("alpha", torch.tensor(alpha))  # of ints where alpha is one
        self._set_runtime_scale(float(alpha) / rank)

    def _set_runtime_scale(self, value: float) -> None:
        self.scale = float(value)
        if not hasattr(self, "_runtime_scale"):
            self.register_buffer("_runtime_scale", torch.tensor(self.scale), persistent=False)
        else:
            self._runtime_scale.fill_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lora_up(self.lora_down(x.to(self.lora_down.weight.dtype))) * self._runtime_scale


class StandInNetwork(nn.Module):
    """LoRA over a few linears. `given` is the job's `network:` section, as a patched NetworkConfig keeps it."""

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 1.0,
        given: dict[str, Any] | None = None,
        peft_format: bool = True,
        network_type: str = "lora",
        base_model: Any = None,
    ) -> None:
        super().__init__()
        self.network_config = types.SimpleNamespace(type=network_type, layer_offloading=False)
        if given is not None:
            self.network_config.viking = given
            alpha = given.get("linear_alpha", alpha)
        self.network_type, self.peft_format = network_type, peft_format
        self.lora_dim, self.alpha, self.conv_lora_dim, self.conv_alpha = rank, alpha, None, None
        self.base_model_ref = None if base_model is None else lambda: base_model
        if not adapter.keeps_alpha(self) and self.peft_format:
            self.alpha = self.lora_dim
        generator = torch.Generator().manual_seed(0)
        self.unet_loras = []
        self.text_encoder_loras: list[StandInLora] = []
        for index in range(2):
            name = f"transformer$$blocks$${index}" if peft_format else f"lora_unet_blocks_{index}"
            lora = StandInLora(name, nn.Linear(6, 10), self.lora_dim, self.alpha)
            for parameter in lora.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator)
            self.unet_loras.append(lora)

    def force_to(self, device: Any, dtype: torch.dtype | None) -> None:
        for lora in self.unet_loras:
            lora.to(device, dtype)

    def parameters(self, recurse: bool = True) -> Any:
        for lora in self.unet_loras:
            yield from lora.parameters()

    def save(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        tensors = {}
        for lora in self.unet_loras:
            for key, value in lora.state_dict().items():
                if self.peft_format and key == "alpha":
                    continue
                name = f"{lora.lora_name}.{key}"
                if self.peft_format:
                    name = name.replace("lora_down", "lora_A").replace("lora_up", "lora_B").replace("$$", ".")
                tensors[name] = value.detach().clone().to(dtype)
        tensors = adapter.before_save(self, tensors)
        model = self.base_model_ref() if self.base_model_ref else None
        return model.convert_lora_weights_before_save(tensors) if model else dict(tensors)

    def load(self, file: dict[str, torch.Tensor]) -> None:
        model = self.base_model_ref() if self.base_model_ref else None
        file = model.convert_lora_weights_before_load(file) if model else file
        load = {}
        for key, value in file.items():
            if self.peft_format:
                if key.endswith(".alpha"):
                    continue
                key = key.replace("lora_A", "lora_down").replace("lora_B", "lora_up").replace(".", "$$")
                key = key.replace("$$lora_down$$", ".lora_down.").replace("$$lora_up$$", ".lora_up.")
            load[key] = value
        adapter.before_load(self, file, load)
        for lora in self.unet_loras:
            own = {k.removeprefix(lora.lora_name + "."): v for k, v in load.items() if k.startswith(lora.lora_name)}
            for key, blank in lora.state_dict().items():  # another rank: zeros are added or columns cut
                if key in own and own[key].dim() == 2 and own[key].shape != blank.shape:
                    resized = torch.zeros_like(blank)
                    rows, columns = (min(a, b) for a, b in zip(own[key].shape, blank.shape, strict=True))
                    resized[:rows, :columns] = own[key][:rows, :columns]
                    own[key] = resized
            lora.load_state_dict(own, strict=False)

    def output(self) -> torch.Tensor:
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return torch.stack([lora(x).float() for lora in self.unet_loras])


def job(network: StandInNetwork, optimizer: str = "adamw", **parameters: Any) -> Any:
    """The training process, as far as the adapter asks it."""
    return types.SimpleNamespace(
        network=network,
        network_config=network.network_config,
        train_config=types.SimpleNamespace(optimizer=optimizer, optimizer_params=parameters),
        device_torch=torch.device("cpu"),
    )
