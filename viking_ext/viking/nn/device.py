"""One engine per device, whoever attaches: its slab, its budget, its pinned memory.

A trainer attaches transformer, text encoder and adapters one by one, and one plan must cover what runs in one step. So
they share the engine of their device, and the budget is the engine's.
"""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch

from viking import _engine
from viking.nn.budget import Budget, device_limit, device_others
from viking.nn.pinning import Pinning
from viking.nn.progress import Progress

if TYPE_CHECKING:
    from viking._engine import LinearLayerMemoryManager
    from viking.nn.managing import MemoryManager

#: Training steps after which everything but the weights is taken to have reached its peak.
SETTLING_STEPS = 2


def resolve_device(device: str | torch.device | int) -> torch.device:
    """A torch.device with its index; ValueError or RuntimeError, saying what to do, for one that cannot be used."""
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'{device!r} is not a device: use "cuda", "cuda:1" or "cpu"') from error
    if found.type not in ("cuda", "cpu"):
        raise ValueError(f'Viking streams to "cuda" devices, and to "cpu" for trying it out, not to {str(found)!r}')
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = (
            "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable CUDA device"
        )
        raise RuntimeError(f'{device!r} cannot be used: {reason}. viking.attach(model, "cpu") runs without a GPU')
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"there is no {str(found)!r}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", index)


class ChangeLock:
    """A reentrant lock that says whether anybody holds it, for a garbage collector that runs inside a change."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    @property
    def is_held(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        self._lock.release()


class DeviceEngine:
    """The engine of one device and what it needs of torch: the slab's memory, and the sizes of everything else."""

    _open: ClassVar[dict[torch.device, DeviceEngine]] = {}
    #: Held while weights come, go or move: threads may attach, train and detach models of one device.
    lock: ClassVar[ChangeLock] = ChangeLock()
    #: How the native engine is made; tests put engines with delays and faults here.
    make_engine: ClassVar[Callable[[torch.device], _engine.Engine] | None] = None

    @classmethod
    def of(cls, device: torch.device) -> DeviceEngine:
        if device not in cls._open:
            cls._open[device] = cls(device)
        return cls._open[device]

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if DeviceEngine.make_engine is not None:
            self.engine = DeviceEngine.make_engine(device)
        elif device.type == "cuda":
            torch.cuda.init()
            self.engine = _engine.Engine("cuda", device.index, torch.Tensor)
        else:
            self.engine = _engine.Engine("host")
        self.slab: torch.Tensor | None = None
        self.budget = Budget()
        self.settled = False
        self.pinning = Pinning()
        # Weakly: a model that is dropped without a detach goes, and its weights with it.
        self.managers: weakref.WeakSet[MemoryManager] = weakref.WeakSet()
        self.numbers: set[int] = set()  # of all weights that the engine has
        self.keys = itertools.count(1)
        self.lost = False  # models were dropped since the last layout, or weights came that it has no place for

    @property
    def resident_bytes(self) -> int:
        """Of tensors that managers moved here for good."""
        return sum(manager.moved_bytes for manager in self.managers)

    @property
    def linears(self) -> dict[int, list[LinearLayerMemoryManager]]:
        """Those of all models, by weight number."""
        return {n: together for manager in self.managers for n, together in manager.by_weight.items()}

    # ---- budget ----

    def set_budget(self, asked: Budget) -> None:
        """An automatic budget leaves what an earlier attach has said."""
        if asked == Budget():
            return
        if self.managers and self.budget not in (Budget(), asked):
            warnings.warn(
                f"the budget of {self.device} is now {asked} instead of {self.budget}: it is shared by all models on "
                "the device",
                stacklevel=4,
            )
        self.budget, self.settled = asked, False

    def budget_bytes(self) -> int:
        """The weights' share at present. ValueError where what was asked for is too small, naming what works."""
        smallest, largest = self.engine.budget_range()
        if self.device.type == "cpu":
            return self.budget.weights_bytes(smallest, largest, sys.maxsize, self.resident_bytes)
        slab_bytes = 0 if self.slab is None else self.slab.numel()
        limit = device_limit(self.device, self.budget.vram)
        others = device_others(self.device, slab_bytes, limit, smallest, self.settled)
        return self.budget.weights_bytes(smallest, largest, limit, others)

    def settle(self) -> bool:
        """After the first training steps the rest of the memory is known: True if the budget may change with it."""
        if self.settled or self.device.type == "cpu" or self.budget.is_fixed:
            return False
        self.settled = self.engine.stats()["steps"] >= SETTLING_STEPS
        return self.settled

    # ---- layout ----

    def relayout(self) -> None:
        """Find addresses for all weights under the budget and put them into force."""
        self.sweep()
        if not self.numbers:
            self._drop_slab()
            return
        slab_bytes = self.engine.layout(self.budget_bytes())
        try:
            if self.slab is None or self.slab.numel() != slab_bytes:
                self._drop_slab()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()  # the old slab would stay cached beside the new one
                self.slab = self._allocate(slab_bytes)
            self.engine.use_layout(self.slab.data_ptr())
        except BaseException:
            self._give_up_layout()
            raise
        self._forget_views()

    def needs_layout(self) -> bool:
        """There was no memory for the slab at the last relayout, or weights have come or gone since."""
        return self.lost or (self.slab is None and bool(self.numbers))

    def _allocate(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            raw = torch.empty(nbytes + 256, dtype=torch.uint8, device=self.device)
        start = -raw.data_ptr() % 256
        return raw[start : start + nbytes]

    def _drop_slab(self) -> None:
        if self.slab is None:
            return
        self.engine.drop_slab()
        self._forget_views()
        self.slab = None

    def _give_up_layout(self) -> None:
        """A relayout failed. Nobody shall wait for a slab that does not come; one that is still in force stays."""
        if self.engine.stats()["slab_bytes"] > 0:
            return
        self.engine.drop_slab()
        self._forget_views()
        self.slab = None

    def _forget_views(self) -> None:
        for manager in self._managers():
            manager.forget_views()

    def _managers(self) -> list[LinearLayerMemoryManager]:
        return [manager for together in self.linears.values() for manager in together]

    def pin(self, progress: Progress | None = None) -> None:
        """Pin what is streamed and unpin what is resident."""
        if self.device.type == "cpu" and DeviceEngine.make_engine is None:
            return
        self.pinning.apply(self.engine, self.linears, progress)

    # ---- life ----

    def join(self, manager: MemoryManager) -> None:
        """A model comes. It leaves by :meth:`leave`, or by being garbage."""
        self.managers.add(manager)
        weakref.finalize(manager, self._dropped).atexit = False

    def leave(self, manager: MemoryManager) -> None:
        """A model was detached. The last one closes the engine."""
        self.managers.discard(manager)
        if not self.managers:
            self._close()
            return
        try:
            self.relayout()
        except ValueError:  # what stays has outgrown the budget: its next step says so, a detach always works
            self.lost = True
            return
        self.pin()

    def sweep(self) -> None:
        """Forget the weights of models that were dropped without a detach."""
        self.lost = False
        for number in self.numbers - set(self.linears):
            self.engine.remove(number)
            self.numbers.discard(number)

    def _dropped(self) -> None:
        # The garbage collector calls at any moment: inside a change or a use of another model, where nothing may move.
        if DeviceEngine._open.get(self.device) is not self:
            return
        self.lost = True
        alone = not any(True for _ in self.managers)  # its length may count the one that is going
        if alone and not DeviceEngine.lock.is_held:
            with DeviceEngine.lock:
                self.sweep()
                self._close()

    def _close(self) -> None:
        self._drop_slab()
        self.engine.close()
        DeviceEngine._open.pop(self.device, None)
