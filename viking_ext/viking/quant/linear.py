"""A Linear whose weight is 8-bit.

It is an `nn.Linear` by class and by the class's name, because adapters (LoRA in its many styles) look for one or the
other, and it has that class's forward: `nn.functional.linear` reads the weight, which dequantises itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from viking.quant.weight import QuantizedWeight, codes_of

SCALE = "weight_scale"


class Linear(nn.Linear):
    """y = x W^T + b with W in 8 bit; made of an nn.Linear by :func:`viking.quantize_`.

    `weight` is a :class:`~viking.quant.weight.QuantizedWeight`; its scale is the buffer `weight_scale`, where it has
    one. A state_dict has the codes under "weight" (an ordinary tensor of the 8-bit dtype) and "weight_scale". A cast
    (`.to(dtype)`, `.half()`) changes what the layer computes in; codes and scale stay.
    """

    @staticmethod
    def take_over(module: nn.Linear) -> None:
        """Make a plain Linear, whose weight is quantised already, one of this class."""
        module.__class__ = Linear
        weight = module._parameters["weight"]
        assert isinstance(weight, QuantizedWeight)
        if weight.scale is not None:
            module.register_buffer(SCALE, weight.scale)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == SCALE and SCALE in self._buffers and value is not self._buffers[SCALE]:
            raise AttributeError("weight_scale belongs to the weight: write into it in place, or load a state_dict")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        weight = self._parameters["weight"]
        kind = f", weight={weight.format.name}" if isinstance(weight, QuantizedWeight) else ""
        return super().extra_repr() + kind

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        weight = self._parameters["weight"]
        if not isinstance(weight, QuantizedWeight):
            return super()._apply(fn, recurse)
        with torch.no_grad():
            weight.compute_in(fn(torch.empty(0, dtype=weight.dtype)).dtype)
            # As integers, which a cast leaves alone.
            codes = fn(weight.data.view(torch.uint8)).to(torch.uint8).view(weight.data.dtype)
            scale = weight.scale
            if scale is not None:
                scale = fn(scale.view(torch.int32)).to(torch.int32).view(torch.float32)
            self._settle(weight, codes, scale)
        others = nn.Module()  # the bias, and whatever else somebody gave the module
        others._parameters = {name: p for name, p in self._parameters.items() if name != "weight"}
        others._buffers = {name: b for name, b in self._buffers.items() if name != SCALE}
        others._modules = self._modules if recurse else {}
        nn.Module._apply(others, fn)
        self._parameters.update(others._parameters)
        self._buffers.update(others._buffers)
        return self

    def _settle(self, weight: QuantizedWeight, codes: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Put codes and scale, as they are elsewhere, into the tensors that there are, where torch allows that."""
        if torch._has_compatible_shallow_copy_type(weight.data, codes):
            weight.data = codes
            if weight.scale is not None and scale is not None:
                weight.scale.data = scale
            return
        self._parameters["weight"] = QuantizedWeight(codes, scale, weight.dtype)  # to or from the meta device
        if scale is not None:
            self._buffers[SCALE] = scale

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        weight = self._parameters["weight"]
        if keep_vars or not isinstance(weight, QuantizedWeight):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
            if tensor is not None and name not in self._non_persistent_buffers_set:
                destination[prefix + name] = codes_of(tensor).detach()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:
        weight = self._parameters["weight"]
        if isinstance(weight, QuantizedWeight):
            found = state_dict.get(prefix + "weight")
            scaled = prefix + SCALE in state_dict
            if found is not None and (
                codes_of(found).dtype != weight.data.dtype or scaled != (weight.scale is not None)
            ):
                error_msgs.append(
                    f"{prefix}weight is {codes_of(found).dtype} {'with' if scaled else 'without'} scales, but this "
                    f"layer holds {weight!r}: load it before viking.quantize_, or into a model quantised alike"
                )
                return
            # Copied, never assigned: an assigned tensor would be a Parameter of codes alone.
            local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
