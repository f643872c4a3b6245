"""What users call: fuse_lora, unfuse_lora."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from viking.lora import adding
from viking.lora.branches import Branch, branch_of, modules_of
from viking.lora.deferred import BranchFirst, Unsuitable, computed


class FusedForward:
    """Stands as the forward of a LoRA's module, and runs that forward with its branch first."""

    __slots__ = ("branch", "original", "reason")

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.original: Callable[..., Any] | None = branch.module.__dict__.get("forward")
        self.reason = ""  # why it runs as it did

    @property
    def __self__(self) -> nn.Module:
        """As of the bound method that it replaces: by it, viking.attach finds where that keeps a Linear's forward."""
        return self.branch.module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        module = self.branch.module
        return self.original or type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.reason or _is_observed():
            return self.__wrapped__(*args, **kwargs)
        try:
            with BranchFirst(self.branch):
                result = self.__wrapped__(*args, **kwargs)
                return result if type(result) is torch.Tensor else computed(result)
        except Unsuitable as error:
            self.reason = str(error)
        return self.__wrapped__(*args, **kwargs)

    def install(self) -> None:
        self.branch.module.__dict__["forward"] = self
        if self.branch.replaces:
            self.branch.base.__dict__["forward"] = self

    def remove(self) -> None:
        module, base = self.branch.module.__dict__, self.branch.base.__dict__
        if base.get("forward") is self:
            base["forward"] = self.__wrapped__
        del module["forward"]
        if self.original is not None:
            module["forward"] = self.original


def _is_observed() -> bool:
    """Somebody records, transforms or keeps what is computed, operation by operation."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or _get_current_dispatch_mode() is not None
        or forward_ad._current_level >= 0
    )


@dataclass(frozen=True)
class FusionReport:
    """What :func:`viking.fuse_lora` did; printed, a short text. Asked later, it says what has shown since."""

    _fused: dict[str, FusedForward] = field(repr=False)
    _kept: dict[str, str] = field(repr=False)

    @property
    def fused(self) -> list[str]:
        """Names of the modules whose branch is computed first."""
        return [name for name, forward in self._fused.items() if not forward.reason]

    @property
    def kept(self) -> dict[str, str]:
        """LoRAs that stay as they are: name and reason."""
        return self._kept | {name: forward.reason for name, forward in self._fused.items() if forward.reason}

    @property
    def shapes(self) -> list[adding.FusedShape]:
        """How the products of each shape that this process met on a GPU are added."""
        return adding.shapes()

    def __str__(self) -> str:
        kept = [f"  {name}: {reason}" for name, reason in self.kept.items()]
        return "\n".join([
            f"{len(self.fused)} LoRAs are fused, {len(kept)} stay as they are", *kept, *(f"  {s}" for s in self.shapes)
        ])


def fuse_lora(network: Any) -> FusionReport:
    """Compute the branch of each LoRA before its Linear and add it to the output in place: same bits, less time.

    Backward then needs nothing that is computed after the branch, so that the recompute of a checkpointed block ends
    before the product of its last streamed Linear; and where Triton is installed, one kernel computes and adds the
    branch's last product, for the shapes for which its bits are those of torch. Parameters, state_dict, hooks and
    gradients stay as they are. What a LoRA's forward does beside (dropout, scales, casts, several adapters) it goes on
    doing; under torch.compile, torch.func and dispatch modes it runs as before.

    network: the model with its LoRAs, or their network; LoRAs in front of a Linear, PEFT's, and those that replace a
    Linear's forward, as kohya's scripts, musubi-tuner and ai-toolkit have them. Before or after `viking.attach`. What
    is fused already stays so.

    ValueError where there is no LoRA.

    >>> print(viking.fuse_lora(model))
    """
    fused: dict[str, FusedForward] = {}
    kept: dict[str, str] = {}
    for name, module in list(modules_of(network)):
        present = module.__dict__.get("forward")
        if isinstance(present, FusedForward):
            if present.branch.module is module:
                fused[name] = present
            continue
        branch = branch_of(module)
        if isinstance(branch, str):
            kept[name] = branch
        elif branch is not None:
            fused[name] = FusedForward(branch)
            fused[name].install()
    if not fused and not kept:
        raise ValueError(
            f"this {type(network).__name__} has no LoRA: give fuse_lora the model after its LoRA was added, or the "
            "network that holds the LoRA's modules"
        )
    return FusionReport(fused, kept)


def unfuse_lora(network: Any) -> None:
    """Undo :func:`fuse_lora`: every forward is what it was. What is not fused is left alone.

    >>> viking.unfuse_lora(model)
    """
    for _, module in list(modules_of(network)):
        present = module.__dict__.get("forward")
        if isinstance(present, FusedForward):
            present.remove()
