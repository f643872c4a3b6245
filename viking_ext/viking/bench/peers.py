"""The offloaders of other trainers, each from the user's own checkout, on the same model in the same process.

Each has its settings from the one that keeps most on the device to the one that keeps least; under a cap the first that
gets through its steps is its best.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from viking.bench import peer_weights
from viking.bench.memory import candidate_bytes
from viking.bench.models import LoraFactor
from viking.quant.weight import QuantizedWeight


class Peer(Protocol):
    """What a comparison needs of an offloader."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Sequence[Any]: ...

    def describe(self, setting: Any) -> str: ...

    def kept_bytes(self, model: nn.Module, setting: Any) -> int:
        """Of weights, on the device at any moment; about."""

    def attach(self, model: nn.Module, device: torch.device, setting: Any) -> None:
        """`model` is on the host, its LoRA on the device."""

    def detach(self, model: nn.Module) -> None:
        """Let go of what it holds of the model, which is thrown away afterwards."""


@contextlib.contextmanager
def _importing_from(path: str, probe: str) -> Iterator[Any]:
    """The module `probe` of a checkout. ImportError, naming the path, where it is not there."""
    sys.path.insert(0, path)
    try:
        yield importlib.import_module(probe)
    except ImportError as error:
        raise ImportError(f"{path} is no checkout that can be used: {error}") from error
    finally:
        sys.path.remove(path)


class Toolkit:
    """ai-toolkit's MemoryManager: a share of the linears is fetched at each use."""

    name = "ai-toolkit"
    settings: Sequence[Any] = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 1.0)
    form = "the share that it offloads, such as 0.7"
    slots = 4  # of each of its two rings, for forward and for backward: they hold weights as they are computed with

    read = float

    def __init__(self, path: str) -> None:
        with _importing_from(path, "toolkit.memory_management") as module:
            self.manager = module.MemoryManager

    def describe(self, setting: Any) -> str:
        return f"offload {setting:.0%}"

    def kept_bytes(self, model: nn.Module, setting: Any) -> int:
        wide = [_computed_bytes(module) for module in model.modules() if isinstance(module, nn.Linear)]
        wide = [nbytes for nbytes in wide if nbytes]
        ring = max(sum(wide[i : i + self.slots]) for i in range(len(wide)))
        return round((1 - setting) * candidate_bytes(model)) + 2 * ring - max(wide)  # which a resident run has, too

    def attach(self, model: nn.Module, device: torch.device, setting: Any) -> None:
        peer_weights.replace(model, peer_weights.Linear)
        random.seed(0)  # by which it picks what it offloads
        factors = [module for module in model.modules() if isinstance(module, LoraFactor)]
        self.manager.attach(model, device, offload_percent=setting, ignore_modules=factors)
        model.to(device)

    def detach(self, model: nn.Module) -> None:
        self.manager.detach(model)


class Musubi:
    """musubi-tuner's block swap, host to device only: what is not resident goes round a ring of a few blocks."""

    name = "musubi"
    settings: Sequence[Any] = tuple((share / 100, ring) for share in range(20, 101, 4) for ring in (4, 3, 2))
    form = "the share of the blocks that it swaps and the blocks of its ring, such as 0.6,2"

    @staticmethod
    def read(text: str) -> tuple[float, int]:
        share, _, ring = text.partition(",")
        return float(share), int(ring)

    def __init__(self, path: str) -> None:
        with _importing_from(f"{path}/src", "musubi_tuner.modules.custom_offloading_utils") as module:
            self.module = module
        self.handles: list[Any] = []

    def describe(self, setting: Any) -> str:
        return f"swap {setting[0]:.0%} of the blocks, ring {setting[1]}"

    def kept_bytes(self, model: nn.Module, setting: Any) -> int:
        share, ring = setting
        blocks = _blocks(model)
        kept = max(map(_computed_bytes, blocks)) if _in_8_bit(model) else 0  # from a block's recompute to its backward
        for _, run in _runs(blocks):
            swapped = round(share * len(run))
            kept += (len(run) if swapped <= ring else len(run) - swapped + ring) * candidate_bytes(run[0])
        return kept

    def attach(self, model: nn.Module, device: torch.device, setting: Any) -> None:
        share, ring = setting
        blocks = _blocks(model)
        peer_weights.replace(model, partial(peer_weights.CodesLinear, device=device))
        config = self.module.BlockSwapConfig(
            device=device, supports_backward=True, use_pinned_memory=True, h2d_only=True, ring_size=ring
        )
        for kind, run in _runs(blocks):
            swapped = round(share * len(run))
            if swapped <= ring:  # its ring would hold as much
                for block in run:
                    block.to(device)
                continue
            offloader = self.module.create_offloader(kind, run, len(run), swapped, config)
            offloader.prepare_block_devices_before_forward(run)
            for index, block in enumerate(run):
                self.handles += _around(block, offloader, run, index)

    def detach(self, model: nn.Module) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def _computed_bytes(module: nn.Module) -> int:
    """Of what is frozen, in the type that it computes in."""
    return sum(p.numel() * p.dtype.itemsize for p in module.parameters() if not p.requires_grad)


def _in_8_bit(model: nn.Module) -> bool:
    return any(isinstance(p, QuantizedWeight) for p in model.parameters())


def _blocks(model: nn.Module) -> Any:
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        raise ValueError("its blocks do not follow one another, which this offloader needs")
    return blocks


def _runs(blocks: Any) -> list[tuple[str, list[nn.Module]]]:
    """Blocks of one class that follow each other: what shares a ring must have the same shapes."""
    runs: list[tuple[str, list[nn.Module]]] = []
    for block in blocks:
        if not runs or runs[-1][0] != type(block).__name__:
            runs.append((type(block).__name__, []))
        runs[-1][1].append(block)
    return runs


def _around(block: nn.Module, offloader: Any, run: list[nn.Module], index: int) -> list[Any]:
    """What its models do before and after each block."""

    def before(module: nn.Module, args: Any) -> None:
        offloader.wait_for_block(index)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        offloader.submit_move_blocks_forward(run, index)

    return [block.register_forward_pre_hook(before), block.register_forward_hook(after)]


_PEERS: dict[str, type[Toolkit] | type[Musubi]] = {"ai-toolkit": Toolkit, "musubi": Musubi}


def load(name: str, path: str, setting: str = "") -> Peer:
    """`setting`: the only one to try. ValueError for an unknown name or setting, ImportError for a checkout that does
    not work."""
    if name not in _PEERS or not path:
        known = ", ".join(f"{known}:PATH" for known in _PEERS)
        raise ValueError(f"--engine: {name!r} is unknown; there are viking, resident, {known}")
    kind = _PEERS[name]
    try:
        only = (kind.read(setting),) if setting else ()
    except ValueError:
        raise ValueError(f"--engine: a setting of {name} is {kind.form}, not {setting!r}") from None
    peer = kind(path)
    peer.settings = only or peer.settings
    return peer
