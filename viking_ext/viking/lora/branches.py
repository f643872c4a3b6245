"""Where the LoRAs of a network are: recognised by what a module has, not by its class.

Two factors without a bias, one after the other, as modules in front of a Linear have them (children of any name), as
PEFT has them (`lora_A`, `lora_B`, by adapter), or as kohya's scripts, musubi-tuner and ai-toolkit have them
(`lora_down`, `lora_up`), whose module replaces the forward of a Linear and keeps the original as `org_forward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from torch import nn
from torch.nn.modules import module as calls

from viking._engine import LinearLayerMemoryManager

_NAMED = (("lora_down", "lora_up"), ("lora_A", "lora_B"))
_WATCHERS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, eq=False)
class Branch:
    """A module whose forward adds up(down(x)) to the output of `base`."""

    module: nn.Module
    base: nn.Linear
    ups: tuple[nn.Linear, ...]  # of PEFT's adapters, else one
    replaces: bool  # the forward of `base`, which is not its child

    def is_unwatched(self) -> bool:
        """Nobody but the module's forward sees the products of `base` and of `ups`."""
        if any(getattr(calls, f"_global{kind}") for kind in _WATCHERS):
            return False
        if not (self.replaces or (_calls_its_own(self.base) and not _is_watched(self.base))):
            return False
        return all("forward" not in up.__dict__ and not _is_watched(up) for up in self.ups)


def _is_watched(module: nn.Module) -> bool:
    return any(getattr(module, kind) for kind in _WATCHERS)


def _calls_its_own(base: nn.Linear) -> bool:
    """Its forward is the class's or that of its manager."""
    forward = base.__dict__.get("forward")
    return forward is None or isinstance(getattr(forward, "__self__", None), LinearLayerMemoryManager)


def modules_of(network: Any) -> Iterator[tuple[str, nn.Module]]:
    """All modules with their names; those of a network in the layout of ai-toolkit need not be its children."""
    seen: set[int] = set()
    roots = [("", network)]
    roots += [
        (f"{kind}.{i}", module)
        for kind in ("unet_loras", "text_encoder_loras")
        for i, module in enumerate(getattr(network, kind, ()))
    ]
    for prefix, root in roots:
        for name, module in root.named_modules(prefix=prefix) if isinstance(root, nn.Module) else ():
            if id(module) not in seen:
                seen.add(id(module))
                yield name, module


def branch_of(module: nn.Module) -> Branch | str | None:
    """The LoRA that this module is; a sentence's end that says why it cannot be fused; None where it is no LoRA."""
    named = next((pair for pair in _NAMED if all(isinstance(getattr(module, n, None), nn.Module) for n in pair)), None)
    if named is not None:
        downs, ups = (_unpacked(getattr(module, name)) for name in named)
        base = _base_beside(module, named)
    else:
        found = _three_children(module)
        if found is None:
            return None
        base, downs, ups = found[0], [found[1]], [found[2]]
    if not downs or not all(isinstance(factor, nn.Linear) for factor in (*downs, *ups)):
        return "its factors are no Linear layers"
    linears: tuple[nn.Linear, ...] = tuple(up for up in ups if isinstance(up, nn.Linear))
    if any(factor.bias is not None for factor in (*downs, *linears)):
        return "its factors have a bias"
    if any(type(factor).forward is not nn.Linear.forward for factor in linears):
        return "its factors have a forward of their own"
    if base is None:
        return "it was not applied to a layer"
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        return f"its layer is a {type(base).__name__} with a forward of its own"
    replaces = not any(child is base for child in module.children())
    if replaces and base.__dict__.get("forward") != module.forward:
        return "it does not stand for its layer's forward"
    return Branch(module, base, linears, replaces)


def _unpacked(factors: nn.Module) -> list[nn.Module]:
    return list(factors.values()) if isinstance(factors, nn.ModuleDict) else [factors]


def _base_beside(module: nn.Module, factors: tuple[str, str]) -> nn.Module | None:
    """The layer in front of which, or in whose place, a module with factors of these names stands."""
    inner = getattr(module, "base_layer", None)
    return inner if isinstance(inner, nn.Module) else _replaced_by(module)


def _replaced_by(module: nn.Module) -> nn.Module | None:
    owner = getattr(getattr(module, "org_forward", None), "__self__", None)
    if isinstance(owner, LinearLayerMemoryManager):
        owner = owner.module
    return owner if isinstance(owner, nn.Module) else None


def _three_children(module: nn.Module) -> tuple[nn.Module, nn.Linear, nn.Linear] | None:
    """(base, down, up) of a module that has these and nothing else that has parameters."""
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    outside = _replaced_by(module)
    bases = [outside] if outside is not None and len(children) == 2 else children if len(children) == 3 else []
    found = [
        (base, down, up)
        for base in bases
        for down, up in permutations([child for child in children if child is not base], 2)
        if _is_low_rank(base, down, up)
    ]
    return found[0] if len(found) == 1 else None  # type: ignore[return-value]


def _is_low_rank(base: Any, down: Any, up: Any) -> bool:
    return (
        all(isinstance(each, nn.Linear) for each in (base, down, up))
        and down.bias is None
        and up.bias is None
        and down.in_features == base.in_features
        and up.out_features == base.out_features
        and down.out_features == up.in_features <= min(base.in_features, base.out_features)
    )
