"""What the models here share: attention over sequences, and blocks that are computed again in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, tokens, hidden) -> (batch, heads, tokens, hidden / heads)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of (batch, heads, tokens, head) each -> (batch, tokens of q, hidden)."""
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def normalized(x: torch.Tensor) -> torch.Tensor:
    """RMS over the last dimension, without a weight."""
    return functional.rms_norm(x, x.shape[-1:])


class Checkpointed(nn.Module):
    """A block whose `compute` is checkpointed, non-reentrant, while gradients are recorded."""

    def compute(self, *args: Any) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, *args: Any) -> torch.Tensor:
        return checkpoint(self.compute, *args, use_reentrant=False) if torch.is_grad_enabled() else self.compute(*args)
