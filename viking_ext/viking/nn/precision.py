"""Changing the precision of a network in place."""

from __future__ import annotations

from typing import Any

from viking import _engine


def force_to_bf16(network: Any) -> tuple[int, int]:
    """Convert the fp32 and fp16 parameters of `network` to bf16, in place and multi-threaded.

    Rounds to nearest even, bit for bit as `tensor.to(torch.bfloat16)`. Parameters keep their identity, their
    `requires_grad` and what storage they share; buffers, fp64, fp8, integer, complex and quantised parameters stay as
    they are. `network` is a module, or a LoRA network in the layout of ai-toolkit (`unet_loras`,
    `text_encoder_loras`), whose modules count although they are not its children.

    Returns (changed, kept): unique parameters. Raises ValueError, with nothing changed, where a parameter has a
    gradient: its dtype would no longer fit.

    >>> viking.force_to_bf16(torch.nn.Linear(4, 4))
    (2, 0)
    """
    return _engine.force_to_bf16(network)
