"""The Flux2-shaped transformer and its LoRA. Shapes: FLUX.2-dev's block linears; no biases, no modulation.

Attention never runs on cuDNN here: where the gradient of its output is a slice of a wider tensor, as in the single
blocks, cuDNN's backward (torch 2.11, found by compute-sanitizer) reads outside its inputs, which ends in an illegal
access where the memory beside them was given back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Size:
    """Of the transformer. `hidden` is a multiple of `heads`."""

    hidden: int = 6144
    heads: int = 48
    mlp: int = 18432
    double_blocks: int = 8
    single_blocks: int = 48
    image_tokens: int = 1024
    text_tokens: int = 512

    def at_depth(self, fraction: float) -> Size:
        """The same width, with this fraction of the blocks."""
        doubles, singles = max(1, round(self.double_blocks * fraction)), max(1, round(self.single_blocks * fraction))
        return Size(self.hidden, self.heads, self.mlp, doubles, singles, self.image_tokens, self.text_tokens)


def _attend(q: list[torch.Tensor], k: list[torch.Tensor], v: list[torch.Tensor]) -> torch.Tensor:
    """Joint attention over the streams: lists of (batch, heads, tokens, head) -> (batch, all tokens, hidden)."""
    joined = functional.scaled_dot_product_attention(torch.cat(q, 2), torch.cat(k, 2), torch.cat(v, 2))
    return joined.transpose(1, 2).flatten(2)


def _heads(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(batch, tokens, 3 hidden) -> three of (batch, heads, tokens, hidden / heads)."""
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


def _gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


class Stream(nn.Module):
    """One of the two streams of a double block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.proj = nn.Linear(size.hidden, size.hidden, bias=False)
        self.up = nn.Linear(size.hidden, 2 * size.mlp, bias=False)
        self.down = nn.Linear(size.mlp, size.hidden, bias=False)

    def attention_inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _heads(self.qkv(functional.rms_norm(x, x.shape[-1:])), self.heads)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(attended)
        return x + self.down(_gated(self.up(functional.rms_norm(x, x.shape[-1:]))))


class DoubleBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.image_tokens = size.image_tokens
        self.image, self.text = Stream(size), Stream(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image, text = x[:, : self.image_tokens], x[:, self.image_tokens :]
        parts = zip(self.image.attention_inputs(image), self.text.attention_inputs(text), strict=True)
        attended = _attend(*(list(pair) for pair in parts))
        image = self.image.finish(image, attended[:, : self.image_tokens])
        text = self.text.finish(text, attended[:, self.image_tokens :])
        return torch.cat((image, text), 1)


class SingleBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.widths = [3 * size.hidden, 2 * size.mlp]
        self.linear1 = nn.Linear(size.hidden, sum(self.widths), bias=False)
        self.linear2 = nn.Linear(size.hidden + size.mlp, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv, mlp = self.linear1(functional.rms_norm(x, x.shape[-1:])).split(self.widths, -1)
        q, k, v = _heads(qkv, self.heads)
        return x + self.linear2(torch.cat((_attend([q], [k], [v]), _gated(mlp)), -1))


class Transformer(nn.Module):
    """(batch, image + text tokens, hidden) -> the same shape. Each block is checkpointed, non-reentrant."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [DoubleBlock(size) for _ in range(size.double_blocks)]
            + [SingleBlock(size) for _ in range(size.single_blocks)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)
        return x


class Lora(nn.Module):
    """y = linear(x) + up(down(x)), in front of one Linear."""

    def __init__(self, linear: nn.Linear, rank: int, device: torch.device) -> None:
        super().__init__()
        dtype = linear.weight.dtype
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(rank, linear.out_features, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.down.weight, std=linear.in_features**-0.5)
        nn.init.normal_(self.up.weight, std=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(x))


def avoid_cudnn_attention() -> None:
    """For this process; see above."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def build(size: Size, rank: int, dtype: torch.dtype, weights_on: torch.device, device: torch.device) -> Transformer:
    """Random weights made on `device` one by one and kept on `weights_on`: never twice in memory. LoRA on `device`."""
    with torch.device("meta"):
        model = Transformer(size).to(dtype)
    model.requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fresh = torch.empty(module.weight.shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
            module.weight = nn.Parameter(fresh.to(weights_on), requires_grad=False)
    torch.manual_seed(1)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(module, Lora):
                setattr(module, name, Lora(child, rank, device))
    return model


def make_input(size: Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    tokens = size.image_tokens + size.text_tokens
    generator = torch.Generator(device).manual_seed(3)
    x = torch.randn(1, tokens, size.hidden, dtype=dtype, device=device, generator=generator)
    return x.requires_grad_()
