"""Which modules are worth streaming, and why the others are not."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from viking.nn import forwards
from viking.nn.sharing import spans_outside
from viking.nn.storage import is_dense, overlap, span_bytes, spans_of, tensors_of
from viking.quant.weight import QuantizedWeight

#: Smaller weights become ordinary tensors on the device: a copy of less than this cannot use the link.
SMALLEST_BYTES = {"cuda": 256 << 10, "cpu": 4 << 10}
#: Of tensors with memory of their own; the last is a scale's, which is a buffer.
KINDS = (nn.Parameter, QuantizedWeight, torch.Tensor)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: These read the weights of their Linear children without calling them.
READS_ITS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass
class Verdict:
    """On one Linear: why it is not streamed, "" if it is."""

    name: str
    module: nn.Module
    reason: str


def judge(
    root: nn.Module, ignored: set[int], device: torch.device, whole: bool = True, trained: bool = False
) -> list[Verdict]:
    """A verdict on each Linear of `root` that is not managed yet, in the order of its modules.

    `whole`: judge a model that is about to be attached; else `root` is the one Linear in question, however small, and
    managed or not. `trained`: stream what requires a gradient, too.
    """
    verdicts = []
    direct: set[int] = set()  # Linears whose parent reads their weights
    for name, module in root.named_modules():
        if isinstance(module, READS_ITS_CHILDREN):
            direct.update(id(child) for child in module.children())
        if id(module) in ignored:
            continue
        if not isinstance(module, nn.Linear) or (whole and "_layer_memory_manager" in module.__dict__):
            continue
        reason = _why_not(module, ignored, device if whole else None, trained)
        if not reason and id(module) in direct:
            reason = "its parent reads the weight without calling it"
        verdicts.append(Verdict(name, module, reason))
    if whole:
        _leave_what_others_share(root, [v for v in verdicts if not v.reason])
        _keep_ties_together(root, verdicts, ignored)
    return verdicts


def judge_again(root: nn.Module, modules: Sequence[nn.Module], ignored: set[int]) -> list[Verdict]:
    """A verdict on each of these managed Linears of `root`, whose tensors are other ones now, however small."""
    verdicts = [Verdict("", module, _why_not(module, ignored, None, True)) for module in modules]
    _keep_ties_together(root, verdicts, ignored)
    return verdicts


def refuse_missing_data(root: nn.Module, ignored: set[int]) -> None:
    """ValueError that names the first tensor on the meta device."""
    for name, module in root.named_modules():
        if id(module) not in ignored:
            _refuse_missing_data(name, module, ignored)


def _refuse_missing_data(name: str, module: nn.Module, ignored: set[int]) -> None:
    for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and tensor.is_meta and id(tensor) not in ignored:
            raise ValueError(
                f"{name + '.' if name else ''}{own} is on the meta device and has no data: load the model's "
                "weights before viking.attach"
            )


def _why_not(module: nn.Module, ignored: set[int], device: torch.device | None, trained: bool) -> str:
    tensors = tensors_of(module)
    weight = module._parameters.get("weight")
    if weight is None:
        return "it has no weight parameter of its own (parametrized?)"
    if "bias" not in module._parameters:
        return "it has no bias parameter of its own (parametrized?)"
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} has a forward of its own"
    if any(id(t) in ignored for t in tensors):
        return "a parameter of it is ignored"
    for tensor in tensors:
        if type(tensor) not in KINDS or type(tensor.data) is not torch.Tensor:
            return f"its weight is a {type(tensor.data).__name__}, which has no plain memory"
        if tensor.layout != torch.strided:
            return "its weight is sparse"
        if tensor.is_meta:
            return "it is on the meta device and has no data"
        if tensor.is_inference():
            return "it was made in inference mode"
        if tensor.dtype not in DTYPES:
            return f"its dtype is {tensor.dtype}"
        if tensor.numel() == 0 or tensor.data_ptr() == 0:
            return "it is empty"
        if not is_dense(tensor):
            return "its memory has gaps"
        if tensor.data_ptr() % tensor.element_size() != 0:
            return "its memory is misaligned"
    if device is not None:
        if not trained and any(t.requires_grad for t in tensors):
            return "it is trained"
        if sum(span_bytes(t) for t in tensors) < SMALLEST_BYTES[device.type]:
            return "it is small"
    if forwards.is_hidden(module):
        return "its forward was replaced by one that hides the original"
    return ""


def _leave_what_others_share(root: nn.Module, verdicts: list[Verdict]) -> None:
    """A weight in a home is no view any more of what a module outside has beside it in memory."""
    outside = spans_outside(root, [t for v in verdicts for t in tensors_of(v.module)])
    shared = [v for v in verdicts if overlap(spans_of(tensors_of(v.module)), outside)]
    for verdict in shared:
        verdict.reason = "its memory is shared with a module outside the attached one"
    if shared:
        warnings.warn(
            f"{len(shared)} Linears are not streamed, as modules outside the attached one share their memory (the "
            f'first: "{shared[0].name}"): attach a module that holds both, or give one of them a copy',
            stacklevel=6,
        )


def _keep_ties_together(root: nn.Module, verdicts: list[Verdict], ignored: set[int]) -> None:
    """A weight whose bytes something else uses too (a tied embedding) is not streamed, nor is what shares them."""
    judged = {id(v.module): not v.reason for v in verdicts}
    others: list[tuple[int, int]] = []
    for module in root.modules():
        if judged.get(id(module), "_layer_memory_manager" in module.__dict__):
            continue
        others += spans_of(t for t in [*module._parameters.values(), *module._buffers.values()] if t is not None)
    others.sort()
    changed = True
    while changed:
        changed = False
        for verdict in verdicts:
            if not verdict.reason and overlap(spans := spans_of(tensors_of(verdict.module)), others):
                verdict.reason = "its memory is shared with a module that is not streamed"
                others += spans
                changed = True
