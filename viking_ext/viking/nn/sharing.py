"""Memory that a model shares with modules outside of it: views of one storage, of which one is in another model."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from viking.nn.storage import spans_of


def _tensors(modules: Iterable[nn.Module]) -> dict[int, torch.Tensor]:
    """The parameters and buffers that are registered on these modules themselves, by id."""
    found: dict[int, torch.Tensor] = {}
    for module in modules:
        for kind in ("_parameters", "_buffers"):
            found.update((id(t), t) for t in module.__dict__.get(kind, {}).values() if t is not None)
    return found


def _storage(tensor: torch.Tensor) -> int | None:
    if type(tensor.data) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return None
    return tensor.untyped_storage()._cdata


def _held_elsewhere(inside: Iterable[torch.Tensor], tensors: Iterable[torch.Tensor]) -> set[int]:
    """Storages of these tensors that somebody holds beside the tensors inside."""
    known = Counter(_storage(t) for t in inside)
    storages = {storage for t in tensors if (storage := _storage(t)) is not None}
    alone = torch.empty(1)  # in some releases torch counts the storage's Python object as well
    unseen = torch._C._storage_Use_Count(alone.untyped_storage()._cdata) - 1
    return {storage for storage in storages if torch._C._storage_Use_Count(storage) > known[storage] + unseen}


def _all_modules() -> Iterator[nn.Module]:
    """Of the process, by their type: what only says that it is a module may answer with code of its own.

    The loop is in C, for there are hundreds of thousands of objects to ask.
    """
    objects = gc.get_objects()
    return itertools.compress(objects, map(partial(type.__subclasscheck__, nn.Module), map(type, objects)))


def spans_outside(root: nn.Module, tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Where tensors of modules outside `root` lie, in the storages of these tensors, which are of `root`.

    Who else holds a storage is looked for among all modules there are, which takes a moment; mostly nobody does.
    """
    inside = _tensors(root.modules())
    held = _held_elsewhere(inside.values(), tensors)
    if not held:
        return []
    gc.collect()  # what is garbage shares nothing
    outside = [t for key, t in _tensors(_all_modules()).items() if key not in inside]
    return spans_of(t for t in outside if _storage(t) in held)
