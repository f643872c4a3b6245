"""Everything about a model that attach may touch and detach must bring back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

HOOKS = [name for name in nn.Linear(1, 1).__dict__ if "_hooks" in name]


class Snapshot:
    """Attributes, hooks, forwards, and every tensor's identity, bytes, strides, dtype, device and shared storage."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = [self._of(m) for m in model.modules()]
        self.tensors = {name: (t, t.detach().clone(), self._traits(t)) for name, t in self._tensors().items()}
        self.pointers = {name: t.data_ptr() for name, t in self._tensors().items() if not t.is_meta}
        self.shared = self._shared()

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.model.named_parameters(remove_duplicate=False)),
                **dict(self.model.named_buffers(remove_duplicate=False))}

    @staticmethod
    def _of(module: nn.Module) -> Any:
        hooks = {name: list(getattr(module, name).values()) for name in HOOKS}
        return module, list(module.__dict__), hooks, module.__dict__.get("forward"), type(module)

    @staticmethod
    def _traits(t: torch.Tensor) -> Any:
        return type(t), t.dtype, t.device, t.stride(), t.shape, t.requires_grad, t.is_leaf

    def _shared(self) -> dict[tuple[str, str], int]:
        """Distance in bytes of tensors that lie in one storage."""
        found = {}
        real = [(name, t) for name, t in self._tensors().items() if not t.is_meta]
        for i, (a, first) in enumerate(real):
            for b, second in real[i + 1 :]:
                low, high = sorted((first, second), key=torch.Tensor.data_ptr)
                if high.data_ptr() < low.data_ptr() + low.nbytes:
                    found[a, b] = second.data_ptr() - first.data_ptr()
        return found

    def assert_unchanged(self, pointers: bool = False) -> None:
        """`pointers`: not even the addresses of the tensors changed."""
        for then, now in zip(self.modules, (self._of(m) for m in self.model.modules()), strict=True):
            for a, b in zip(then, now, strict=True):
                assert a is b or a == b
        now_tensors = self._tensors()
        assert now_tensors.keys() == self.tensors.keys()
        for name, (identity, value, traits) in self.tensors.items():
            t = now_tensors[name]
            assert t is identity, f"{name} is another object"
            assert self._traits(t) == traits, name
            assert t.is_meta or torch.equal(t, value), f"{name} has other bytes"
        assert self._shared() == self.shared
        if pointers:
            assert self.pointers == {name: t.data_ptr() for name, t in now_tensors.items() if not t.is_meta}
