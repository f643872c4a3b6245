"""Standing in for a module's forward, and stepping aside again.

A Linear's own forward is reached in two ways: as `module.forward`, and through whoever replaced that before us and
kept the original to call it (LoRA in the style of kohya and ai-toolkit, accelerate's hooks). Both must lead to the
manager. What replaces the forward after us keeps ours, which does what the module's own would do once detached.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless

from viking._engine import LinearLayerMemoryManager
from viking.nn import refusals
from viking.quant.weight import QuantizedWeight

_RESTORE = "_viking_restore"
#: What of ours is in the __dict__ of a managed Linear, beside its forward.
_OURS = ("_layer_memory_manager", "_apply", "__prepare_scriptable__")
_LENDING = getattr(getattr(stateless, "_functional_call", None), "__code__", None)


def are_lent(module: nn.Module) -> bool:
    """Its tensors are not its own: torch.func.functional_call or torch.export lends them for one call."""
    return any(t is not None and not isinstance(t, nn.Parameter) for t in module._parameters.values()) or is_lending()


def is_lending() -> bool:
    """This thread is in a call for which modules have tensors that are not their own."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return True
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _LENDING:
            return True
    return False


def _is_own(module: nn.Module, value: Any) -> bool:
    """The module's own forward, or that of a former manager of it, which calls the module's own."""
    owner = getattr(value, "__self__", None)
    if isinstance(owner, LinearLayerMemoryManager):
        return owner.module is module and owner.home is None
    return inspect.ismethod(value) and value.__self__ is module and value.__func__ is type(module).forward


def _keepers(
    module: nn.Module, replacement: Any, is_sought: Callable[[Any], bool], seen: set[int] | None = None
) -> Iterator[tuple[Any, str]]:
    """Where the functions behind a replaced forward keep what is sought, the module's own say: (object, attribute)."""
    seen = set() if seen is None else seen
    if id(replacement) in seen:
        return
    seen.add(id(replacement))
    holders: list[tuple[Any, str, Any]] = []
    if hasattr(replacement, "func"):  # functools.partial: what it calls is behind it, not in it
        yield from _keepers(module, replacement.func, is_sought, seen)
        holders += [(module, name, value) for name, value in vars(module).items() if name != "forward"]
    owner = getattr(replacement, "__self__", None)
    if owner is not None and hasattr(owner, "__dict__"):
        holders += [(owner, name, value) for name, value in vars(owner).items()]
    for cell in getattr(getattr(replacement, "__func__", replacement), "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a variable that was never set
            holders.append((cell, "cell_contents", cell.cell_contents))
    for holder, name, value in holders:
        if is_sought(value):
            yield holder, name
        elif inspect.ismethod(value) or inspect.isfunction(value) or hasattr(value, "func"):
            yield from _keepers(module, value, is_sought, seen)


def _keepers_of_own(module: nn.Module, replacement: Any) -> list[tuple[Any, str]]:
    return list(_keepers(module, replacement, lambda value: _is_own(module, value)))


def is_hidden(module: nn.Module) -> bool:
    """Its forward was replaced, and we cannot find where the original went."""
    replacement = module.__dict__.get("forward")
    if replacement is None or _is_own(module, replacement):
        return False
    if isinstance(getattr(replacement, "__self__", None), LinearLayerMemoryManager):
        return False
    return not _keepers_of_own(module, replacement) and not _leads_to_manager(module)


def _leads_to_manager(module: nn.Module) -> bool:
    return "_layer_memory_manager" in module.__dict__


def install(module: nn.Module, manager: LinearLayerMemoryManager) -> None:
    """Make every call of the module's own forward one of the manager's, and its `_apply` leave the home alone."""
    replacement = module.__dict__.get("forward")
    keepers = [] if replacement is None or _is_own(module, replacement) else _keepers_of_own(module, replacement)
    # How to undo a change is written down before it is made: an interrupt may come in between.
    undo: list[Callable[[], None]] = []
    module.__dict__[_RESTORE] = undo
    if keepers:
        for holder, name in keepers:
            undo.append(_restorer(holder, name, getattr(holder, name), manager))
            setattr(holder, name, manager.forward)
    else:
        undo.append(_forward_remover(module, replacement, manager))
        module.__dict__["forward"] = manager.forward
    module.__dict__["_apply"] = _Apply(manager)
    module.__dict__["__prepare_scriptable__"] = refusals.refuse_scripting


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
    """Undo install; nothing of ours is left on the module, nor with who replaced our forward and kept it to call it."""
    for undo in module.__dict__.pop(_RESTORE, ()):
        undo()
    for name in _OURS:
        module.__dict__.pop(name, None)
    replacement = module.__dict__.get("forward")
    if replacement is not None:
        own = type(module).forward.__get__(module)
        for holder, name in list(_keepers(module, replacement, lambda value: value == manager.forward)):
            setattr(holder, name, own)


class _Apply:
    """`module._apply` of a managed Linear: what `.to`, `.cuda`, `.half` of it and of its parents come down to.

    The home stays where it is; a change of dtype changes its bytes, which the next use notices. What goes to the meta
    device is not managed any more.
    """

    def __init__(self, manager: LinearLayerMemoryManager) -> None:
        self.manager = manager

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self.manager.module
        with torch.inference_mode(False), torch.no_grad():
            own = [p for p in module._parameters.values() if p is not None]
            probes = {p: fn(torch.empty(0, dtype=p.dtype, device="cpu")) for p in own}
        if any(probe.is_meta for probe in probes.values()):
            self.manager.manager.abandon(self.manager)
            return module._apply(fn, recurse)
        if any(probe.device.type == "cpu" and probe.is_shared() for probe in probes.values()):
            raise RuntimeError(
                "the weights of a streamed Linear cannot be put into shared memory: call viking.detach(model) first"
            )
        for child in module.children() if recurse else ():
            child._apply(fn)
        with torch.inference_mode(False), torch.no_grad():
            for parameter, probe in probes.items():
                if probe.dtype == parameter.dtype:
                    continue
                if isinstance(parameter, QuantizedWeight):
                    parameter.compute_in(probe.dtype)
                    self.manager.forget_views()
                else:
                    parameter.data = parameter.data.to(probe.dtype)
            at_home = getattr(module._parameters["weight"], "scale", None)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer is not at_home:
                    module._buffers[name] = fn(buffer)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.manager, memo)
