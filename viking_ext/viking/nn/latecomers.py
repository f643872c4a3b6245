"""Modules and parameters that are registered after attach: a LoRA that is injected, a layer that is replaced.

torch calls its registration hooks for every module there is, so they only mark: a manager looks at the next entry of
its root module.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules import module as torch_module

if TYPE_CHECKING:
    from viking.nn.managing import MemoryManager

_watched: weakref.WeakValueDictionary[int, MemoryManager] = weakref.WeakValueDictionary()
_hooks: list[Any] = []


def watch(manager: MemoryManager) -> None:
    """From now on the manager hears of registrations, by its `stale`."""
    if not _hooks:
        _hooks.append(torch_module.register_module_module_registration_hook(_registered))
        _hooks.append(torch_module.register_module_parameter_registration_hook(_registered))
    _watched[id(manager)] = manager


def unwatch(manager: MemoryManager) -> None:
    """The last one takes our hooks out of torch."""
    _watched.pop(id(manager), None)
    if not _watched:
        for hook in _hooks:
            hook.remove()
        _hooks.clear()


def look_again() -> None:
    """Every manager looks for modules that nobody manages at its next entry."""
    for manager in list(_watched.values()):
        manager.stale = True


def _registered(module: nn.Module, name: str, value: Any) -> None:
    look_again()
