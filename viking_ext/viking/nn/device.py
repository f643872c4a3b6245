"""One engine per device, whoever attaches: its slab, its budget, its pinned memory.

A trainer attaches transformer, text encoder and adapters one by one, and one plan must cover what runs in one step. So
they share the engine of their device, and the budget is the engine's.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch

from viking import _engine
from viking.nn import pressure
from viking.nn.budget import SHRINK_PART, Budget, DeviceMemory, Share
from viking.nn.gradients import Gradients
from viking.nn.pinning import Move, Pinning
from viking.nn.progress import Progress
from viking.units import format_bytes

if TYPE_CHECKING:
    from viking._engine import Home, LinearLayerMemoryManager
    from viking.nn.managing import MemoryManager


def resolve_device(device: str | torch.device | int) -> torch.device:
    """A torch.device with its index; ValueError or RuntimeError, saying what to do, for one that cannot be used."""
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'{device!r} is not a device: use "cuda", "cuda:1" or "cpu"') from error
    if found.type not in ("cuda", "cpu"):
        raise ValueError(f'Viking streams to "cuda" devices, and to "cpu" for trying it out, not to {str(found)!r}')
    if found.type == "cpu":  # "cpu:1" is a host engine of its own: for trying out several devices
        return torch.device("cpu", found.index) if found.index else torch.device("cpu")
    if not torch.cuda.is_available():
        reason = (
            "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable CUDA device"
        )
        raise RuntimeError(f'{device!r} cannot be used: {reason}. viking.attach(model, "cpu") runs without a GPU')
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"there is no {str(found)!r}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", index)


def is_held(lock: threading.RLock) -> bool:
    """Whether anybody holds it, this thread included."""
    if lock._is_owned() or not lock.acquire(blocking=False):  # type: ignore[attr-defined]
        return True
    lock.release()
    return False


class DeviceEngine:
    """The engine of one device and what it needs of torch: the slab's memory, and the sizes of everything else."""

    _open: ClassVar[dict[torch.device, DeviceEngine]] = {}
    #: Held while weights come, go or move: threads may attach, train and detach models of one device. Of no class of
    #: ours: an interrupt that came at the first line of its `__exit__` would leave it held for ever.
    lock: ClassVar[threading.RLock] = threading.RLock()
    #: How the native engine is made; tests put engines with delays and faults here.
    make_engine: ClassVar[Callable[[torch.device], _engine.Engine] | None] = None
    #: How a device's memory is read; tests put scripted readings here.
    make_memory: ClassVar[Callable[[torch.device], DeviceMemory] | None] = None

    @classmethod
    def of(cls, device: torch.device) -> DeviceEngine:
        if device not in cls._open:
            cls._open[device] = cls(device)
        return cls._open[device]

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: Where its tensors are: the host is one device to torch, however many engines stand on it.
        self.process_device = torch.device("cpu") if device.type == "cpu" else device
        if DeviceEngine.make_engine is not None:
            self.engine = DeviceEngine.make_engine(device)
        elif device.type == "cuda":
            torch.cuda.init()
            pressure.watch()
            self.engine = _engine.Engine("cuda", device.index, torch.Tensor)
        else:
            self.engine = _engine.Engine("host")
        self.slab: torch.Tensor | None = None
        self.memory = self._read_memory()
        self.share = Share(self.memory)
        self.retries = pressure.Retries()
        pressure.take(device)  # what failed before is none of this engine's
        self.pinning = Pinning()
        self.gradients = Gradients(self)
        # Weakly: a model that is dropped without a detach goes, and its weights with it.
        self.managers: weakref.WeakSet[MemoryManager] = weakref.WeakSet()
        self.numbers: set[int] = set()  # of all weights that the engine has
        self.keys = itertools.count(1)
        self.lost = False  # since the last layout models were dropped, weights came, or the share shrank

    @property
    def resident_bytes(self) -> int:
        """Of tensors that managers moved here for good."""
        return sum(manager.moved_bytes for manager in self.managers)

    @property
    def linears(self) -> dict[int, list[LinearLayerMemoryManager]]:
        """Those of all models, by weight number."""
        return {n: together for manager in self.managers for n, together in manager.by_weight.items()}

    # ---- budget ----

    def _read_memory(self) -> DeviceMemory | None:
        if DeviceEngine.make_memory is not None:
            return DeviceEngine.make_memory(self.device)
        return DeviceMemory(self.device) if self.device.type == "cuda" else None

    def set_budget(self, asked: Budget) -> None:
        """An automatic budget leaves what an earlier attach has said."""
        if asked == Budget():
            return
        if self.managers and self.share.asked not in (Budget(), asked):
            warnings.warn(
                f"the budget of {self.device} is now {asked} instead of {self.share.asked}: it is shared by all models "
                "on the device",
                stacklevel=4,
            )
        self.share = Share(self.memory, asked)
        pressure.take(self.device)

    def budget_bytes(self, strict: bool = True) -> int:
        """The weights' share at present. ValueError where what was asked for is too small, naming what works; not
        `strict`: where `vram` was enough once, the smallest."""
        smallest, largest = self.engine.budget_range()
        slab_bytes = 0 if self.slab is None else self.slab.numel()
        return self.share.weights_bytes(smallest, largest, slab_bytes, self.resident_bytes, strict)

    def is_due(self) -> bool:
        """At a root entry: memory ran short, or what everything else takes is known better now."""
        due, slab = pressure.is_short(self.device), self.slab
        if self.memory is None or slab is None:
            return due
        now = self.memory.allocator()
        due = self.retries.are_due(now) or due
        if not self.share.asked.is_fixed:
            self.share.observe(now, slab.numel())
            due = due or self.share.has_grown or self._is_settling()
        return due

    def _is_settling(self) -> bool:
        settles_at = self.share.settles_at
        return settles_at is not None and self.engine.stats()["steps"] >= settles_at

    def adapt(self, renew: bool) -> None:
        """Another layout, where the share of the weights is another one now, or at any rate to `renew`."""
        self.share.settle(self.engine.stats()["steps"])
        renew = self._shrink() or renew or self.needs_layout()
        if renew or self.budget_bytes(strict=False) != self.engine.stats()["budget_bytes"]:
            self.relayout()
            self.pin()

    def _shrink(self) -> bool:
        """If memory ran short since the last time, the weights leave some of theirs."""
        missing = pressure.take(self.device)
        retried = self.memory is not None and self.retries.take(self.memory.allocator())
        if (missing is None and not retried) or self.slab is None:
            return False
        before = self.engine.stats()["budget_bytes"]
        after = self.share.shrink(missing or 0, before, self.engine.budget_range()[0])
        if after >= before:
            return False
        self.lost = True  # until the relayout, whatever comes in between
        self._warn(
            "the allocator had to give its cache back and try again"
            if missing is None
            else f"an allocation of {format_bytes(missing)} failed",
            before,
            after,
        )
        return True

    def _warn(self, what: str, before: int, after: int) -> None:
        warnings.warn(
            f"{what} on {self.device}: the weights budget is now {format_bytes(after)} instead of "
            f"{format_bytes(before)} ({after} bytes)",
            stacklevel=3,
        )

    # ---- layout ----

    def relayout(self, strict: bool = False) -> None:
        """Find addresses for all weights under the budget and put them into force. `strict`: see budget_bytes."""
        self.sweep()
        if not self.numbers:
            self._drop_slab()
            return
        if self.memory is not None and self.slab is not None:
            self.share.observe(self.memory.allocator(), self.slab.numel())
        budget = self.budget_bytes(strict)
        slab_bytes = self.engine.layout(budget)
        try:
            if self.slab is None or self.slab.numel() != slab_bytes:
                self._drop_slab()
                if self.memory is not None:
                    self.memory.give_back()  # the old slab would stay cached beside the new one
                self.slab = self._allocate_what_fits(budget, slab_bytes)
            self.engine.use_layout(self.slab.data_ptr())
        except BaseException:
            self._give_up_layout()
            raise
        self._forget_views()
        if self.memory is not None:
            self.memory.reset_peak()
            self.retries.reset(self.memory.allocator())

    def _allocate_what_fits(self, budget: int, slab_bytes: int) -> torch.Tensor:
        """A slab for the layout found last, or for one under the largest smaller budget that the device has room for:
        a fiftieth less, then twice as much at a time. torch.OutOfMemoryError where it has none for the smallest."""
        tried, step, ceiling = budget, budget // SHRINK_PART, self.share.ceiling
        while True:
            try:
                slab = self._allocate(slab_bytes)
                break
            except torch.cuda.OutOfMemoryError as error:
                pressure.take(self.device)
                smallest, _ = self.engine.budget_range()
                if tried <= smallest:
                    self.share.ceiling = ceiling
                    raise torch.cuda.OutOfMemoryError(self._no_room(slab_bytes)) from error
                tried = self.share.shrink(step, tried, smallest)
                step *= 2
            slab_bytes = self.engine.layout(tried)
        if tried < budget:
            self._warn(f"{format_bytes(budget)} for the weights could not be allocated", budget, tried)
        return slab

    def _no_room(self, slab_bytes: int) -> str:
        there = ""
        if self.memory is not None:
            free, total = self.memory.driver()
            there = f", of which {format_bytes(free)} of {format_bytes(total)} are free"
        return (
            f"the smallest slab that works for the weights ({slab_bytes} bytes: {format_bytes(slab_bytes)}) could not "
            f"be allocated on {self.device}{there}: free device memory, or use smaller inputs"
        )

    def needs_layout(self) -> bool:
        """There was no memory for the slab at the last relayout, or weights have come or gone since."""
        return self.lost or (self.slab is None and bool(self.numbers))

    def _allocate(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            raw = torch.empty(nbytes + 256, dtype=torch.uint8, device=self.process_device)
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

    def pin(self, progress: Progress | None = None, moves: Mapping[int, Move] | None = None) -> None:
        """Pin what is streamed and unpin what is resident; see Pinning.apply."""
        if self.device.type == "cpu" and DeviceEngine.make_engine is None:
            return
        self.pinning.apply(self.engine, self.linears, progress, moves or {})

    def forget_trained(self) -> None:
        """Before a pass: what it fetches ahead of trained weights is as they are now, and no use needs to look whether
        it is."""
        stepped = [linear for m in self.managers for number in m.stepped for linear in m.by_weight.get(number, ())]
        if stepped:
            self.engine.forget_trained()
            for linear in stepped:
                linear.renew()

    def pin_home(self, home: Home) -> None:
        """Pin host memory that is no weight's, if that is possible: all that depends on it is speed."""
        if self.device.type != "cpu" or DeviceEngine.make_engine is not None:
            self.pinning.pin_home(self.engine, home)

    # ---- life ----

    def join(self, manager: MemoryManager) -> None:
        """A model comes. It leaves by :meth:`leave`, or by being garbage."""
        self.managers.add(manager)
        self.share.learn(self.engine.stats()["steps"], forget=True)
        weakref.finalize(manager, self._dropped).atexit = False

    def leave(self, manager: MemoryManager) -> None:
        """A model was detached. The last one closes the engine."""
        self.managers.discard(manager)
        if not self.managers:
            self._close()
            return
        self.share.learn(self.engine.stats()["steps"], forget=False)
        try:
            self.relayout()
        except (ValueError, torch.cuda.OutOfMemoryError):
            self.lost = True  # what stays has outgrown the budget: its next step says so, a detach always works
            return
        self.pin()

    def sweep(self) -> None:
        """Forget the weights of models that were dropped without a detach."""
        self.lost = False
        self.gradients.trim()
        for number in self.numbers - set(self.linears):
            try:
                self.engine.remove(number)
            except RuntimeError as error:
                if "is not managed" not in str(error):  # an interrupt came between its removal and the next line
                    raise
            self.numbers.discard(number)

    def _dropped(self) -> None:
        # The garbage collector calls at any moment: inside a change or a use of another model, where nothing may move.
        if DeviceEngine._open.get(self.device) is not self:
            return
        self.lost = True
        alone = not any(True for _ in self.managers)  # its length may count the one that is going
        if alone and not is_held(DeviceEngine.lock):
            with DeviceEngine.lock:
                self.sweep()
                self._close()

    def _close(self) -> None:
        self._drop_slab()
        self.gradients.close()
        self.engine.close()
        DeviceEngine._open.pop(self.device, None)
