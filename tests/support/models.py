"""Small models with what real ones have: blocks under gradient checkpointing, and LoRA in four styles."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

HIDDEN = 64
CHECKPOINTING = ("off", "reentrant", "early stop", "no early stop")
LORA_STYLES = ("wrapper", "hijacked before", "hijacked after", "peft")


class Block(nn.Module):
    """Attention and a feed-forward part with a bare parameter and a norm, as in diffusion transformers."""

    def __init__(self, hidden: int = HIDDEN, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.proj = nn.Linear(hidden, hidden, bias=bias)
        self.up = nn.Linear(hidden, 2 * hidden, bias=bias)
        self.down = nn.Linear(2 * hidden, hidden, bias=bias)
        self.gate = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(x.shape[-1])
        x = x + self.proj(scores.softmax(-1) @ v) * self.gate
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """x: (batch, length, hidden) -> the same."""

    def __init__(
        self, depth: int = 3, hidden: int = HIDDEN, bias: bool = True, checkpointing: str = "off", seed: int = 1
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.enter = nn.Linear(hidden, hidden, bias=bias)
            self.blocks = nn.ModuleList(Block(hidden, bias) for _ in range(depth))
            self.leave = nn.Linear(hidden, hidden, bias=bias)
        self.checkpointing = checkpointing
        self.order: list[int] | None = None  # of the blocks; None: as they stand
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        if self.checkpointing == "reentrant" and torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_(True)  # without it, this mode gives no gradients at all
        for i in range(len(self.blocks)) if self.order is None else self.order:
            x = self._run(self.blocks[i], x)
        return self.leave(x)

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing == "off" or not torch.is_grad_enabled():
            return block(x)
        with set_checkpoint_early_stop(self.checkpointing != "no early stop"):
            return checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")


class LoRA(nn.Module):
    """A low-rank branch beside a Linear, in fp32; calls `original`, which is the Linear or what its forward was."""

    def __init__(self, linear: nn.Linear, original: Callable[[torch.Tensor], torch.Tensor], rank: int = 4) -> None:
        super().__init__()
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.rise = nn.Linear(rank, linear.out_features, bias=False)
        self.org_forward = original

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.org_forward(x) + self.rise(self.down(x.to(self.down.weight.dtype))).to(x.dtype)


class Wrapper(nn.Module):
    """As PEFT does it: stands in the Linear's place, and the Linear is its child."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.rise = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.rise(self.down(x.to(self.down.weight.dtype))).to(x.dtype)


def linears_of_blocks(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """(parent, name, Linear) of every Linear in a block."""
    return [
        (block, name, child)
        for block in model.modules()
        if isinstance(block, Block)
        for name, child in block.named_children()
        if isinstance(child, nn.Linear)
    ]


def wrap(model: nn.Module, seed: int = 2) -> nn.Module:
    """Put a Wrapper around every Linear of the blocks; returns the model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parent, name, linear in linears_of_blocks(model):
            setattr(parent, name, Wrapper(linear))
    return model


def hijack(model: nn.Module, seed: int = 2) -> nn.ModuleList:
    """As kohya's scripts and ai-toolkit do it: replace the forwards; returns the network that holds the LoRAs."""
    network = nn.ModuleList()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _, _, linear in linears_of_blocks(model):
            lora = LoRA(linear, linear.forward)
            linear.forward = lora.forward
            network.append(lora)
    return network


def with_peft(model: nn.Module, seed: int = 2) -> nn.Module:
    """The real PEFT; its second matrix, which starts as zeros, gets numbers, so that every gradient counts."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["qkv", "proj", "up", "down"])
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, config)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return wrapped


def build(
    style: str = "wrapper", attach: Callable[[nn.Module], Any] = lambda model: None, **net: Any
) -> tuple[nn.Module, list[nn.Parameter]]:
    """A Net with LoRA of that style, and `attach` called at its moment. Returns (model, trained parameters)."""
    dtype = net.pop("dtype", torch.float32)
    model: nn.Module = Net(**net).to(dtype)
    network: nn.Module = model
    if style == "wrapper":
        wrap(model)
    elif style == "peft":
        model = network = with_peft(model)
    elif style == "hijacked before":
        network = hijack(model)
    attach(model)
    if style == "hijacked after":
        network = hijack(model)
    return model, [p for p in network.parameters() if p.requires_grad]
