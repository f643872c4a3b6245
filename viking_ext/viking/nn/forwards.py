"""Standing in for a module's forward, and stepping aside again.

A Linear's own forward is reached in two ways: as `module.forward`, and through whoever replaced that before us and
kept the original to call it (LoRA in the style of kohya and ai-toolkit, accelerate's hooks). Both must lead to the
manager. What replaces the forward after us keeps ours, which does what the module's own would do once detached.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from viking._engine import LinearLayerMemoryManager

_RESTORE = "_viking_restore"


def _is_own(module: nn.Module, value: Any) -> bool:
    return inspect.ismethod(value) and value.__self__ is module and value.__func__ is type(module).forward


def _keepers(module: nn.Module, replacement: Any, seen: set[int]) -> Iterator[tuple[Any, str]]:
    """Where the functions behind a replaced forward keep the module's own: (object, attribute)."""
    if id(replacement) in seen:
        return
    seen.add(id(replacement))
    holders: list[tuple[Any, str, Any]] = []
    if hasattr(replacement, "func"):  # functools.partial: what it calls is behind it, not in it
        yield from _keepers(module, replacement.func, seen)
        holders += [(module, name, value) for name, value in vars(module).items() if name != "forward"]
    owner = getattr(replacement, "__self__", None)
    if owner is not None and hasattr(owner, "__dict__"):
        holders += [(owner, name, value) for name, value in vars(owner).items()]
    for cell in getattr(getattr(replacement, "__func__", replacement), "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a variable that was never set
            holders.append((cell, "cell_contents", cell.cell_contents))
    for holder, name, value in holders:
        if _is_own(module, value):
            yield holder, name
        elif inspect.ismethod(value) or inspect.isfunction(value) or hasattr(value, "func"):
            yield from _keepers(module, value, seen)


def is_hidden(module: nn.Module) -> bool:
    """Its forward was replaced, and we cannot find where the original went."""
    replacement = module.__dict__.get("forward")
    if replacement is None or _is_own(module, replacement):
        return False
    if isinstance(getattr(replacement, "__self__", None), LinearLayerMemoryManager):
        return False
    return next(_keepers(module, replacement, set()), None) is None and not _leads_to_manager(module)


def _leads_to_manager(module: nn.Module) -> bool:
    return "_layer_memory_manager" in module.__dict__


def install(module: nn.Module, manager: LinearLayerMemoryManager) -> None:
    """Make every call of the module's own forward one of the manager's, and its `_apply` leave the home alone."""
    replacement = module.__dict__.get("forward")
    keepers = [] if replacement is None or _is_own(module, replacement) else list(_keepers(module, replacement, set()))
    undo: list[Callable[[], None]] = []
    if keepers:
        for holder, name in keepers:
            original = getattr(holder, name)
            setattr(holder, name, manager.forward)
            undo.append(_restorer(holder, name, original, manager))
    else:
        module.__dict__["forward"] = manager.forward
        undo.append(_forward_remover(module, replacement, manager))
    module.__dict__["_apply"] = _Apply(manager)
    module.__dict__[_RESTORE] = undo


def _restorer(holder: Any, name: str, original: Any, manager: LinearLayerMemoryManager) -> Callable[[], None]:
    def undo() -> None:
        if getattr(holder, name, None) == manager.forward:
            setattr(holder, name, original)

    return undo


def _forward_remover(module: nn.Module, before: Any, manager: LinearLayerMemoryManager) -> Callable[[], None]:
    def undo() -> None:
        if module.__dict__.get("forward") == manager.forward:
            if before is None:
                del module.__dict__["forward"]
            else:
                module.forward = before

    return undo


def remove(module: nn.Module, manager: LinearLayerMemoryManager) -> None:
    """Undo install; nothing of ours is left on the module."""
    for undo in module.__dict__.pop(_RESTORE, ()):
        undo()
    for name in ("_layer_memory_manager", "_apply"):
        module.__dict__.pop(name, None)


class _Apply:
    """`module._apply` of a managed Linear: what `.to`, `.cuda`, `.half` of it and of its parents come down to.

    The home stays where it is; a change of dtype changes its bytes, which the next use notices.
    """

    def __init__(self, manager: LinearLayerMemoryManager) -> None:
        self.manager = manager

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self.manager.module
        for child in module.children() if recurse else ():
            child._apply(fn)
        with torch.inference_mode(False), torch.no_grad():
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                dtype = fn(torch.empty(0, dtype=parameter.dtype)).dtype
                if dtype != parameter.dtype:
                    parameter.data = parameter.data.to(dtype)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.manager, memo)
