"""One managed model: which of its modules are streamed, and everything that this changes about them.

Attaching happens in this order, so that a mistake is found before anything was touched and no second copy of the model
ever exists: judge every module; open homes, which cost nothing until they are filled, and find a layout under the
budget; fill the homes weight by weight, each time letting go of the memory the weight came from (what lies in a file's
mapping stays there: its home is the mapping); move all the rest to the device; allocate the slab; pin what is streamed,
which takes it out of a mapping; put our forward in place. An exception anywhere in it, Ctrl-C
included, undoes what was done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from viking._engine import Home, LinearLayerMemoryManager, file_ranges, trim
from viking.machine import memory_available
from viking.nn import forwards, latecomers
from viking.nn.budget import Budget
from viking.nn.device import DeviceEngine
from viking.nn.eligible import judge, judge_again, refuse_missing_data
from viking.nn.pinning import is_trained
from viking.nn.progress import Progress
from viking.nn.refusals import keep_out_of_compiled_code
from viking.nn.storage import Weight, group, move, overlap, spans_of, tensors_of
from viking.quant.linear import Linear as QuantizedLinear
from viking.quant.weight import QuantizedWeight, codes_of
from viking.units import format_bytes

Ignored = Iterable[nn.Module | torch.Tensor]


#: While homes are filled, freed host memory is given back each time this much has moved.
TRIM_INTERVAL_BYTES = 256 << 20


class MemoryManager:
    """Manages one model on one device: found at `model._memory_manager`, made by :func:`viking.attach`."""

    def __init__(
        self,
        module: nn.Module,
        device: DeviceEngine,
        ignore: Ignored = (),
        options: tuple[Any, ...] = (),
        trained: str = "device",
    ) -> None:
        self.module = module
        self.trained = trained
        self.device = device
        self.options = options
        self.ignored = {id(item) for item in ignore}
        self.ignored |= {id(m) for item in ignore if isinstance(item, nn.Module) for m in item.modules()}
        self.kept = tuple(ignore)  # so that the ids above stay theirs
        self.linears: dict[nn.Module, LinearLayerMemoryManager] = {}
        self.weights: dict[int, Weight] = {}  # by weight number
        self.by_weight: dict[int, list[LinearLayerMemoryManager]] = {}
        self.homes: dict[int, Home] = {}
        self.stepped: set[int] = set()  # numbers of the weights that the host steps
        self.reasons: dict[str, str] = {}  # why a Linear of this name is not streamed
        self.moved: list[tuple[nn.Module, torch.device]] = []
        self.heirs: weakref.WeakSet[MemoryManager] = weakref.WeakSet()  # of Linears that were taken out of the module
        self.travelled: list[tuple[Weight, Home]] = []  # came from a device, and are to go back there
        self.moved_bytes = 0
        self.started = False
        self.has_root = False  # whose entry begins a pass
        self.stale = False  # modules or parameters were registered since the last look
        self._key = next(device.keys)
        self._hook: Any = None

    @property
    def process_device(self) -> torch.device:
        """Where the model computes."""
        return self.device.process_device

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryManager:
        raise TypeError(
            "a model whose weights are streamed cannot be copied: copy its state_dict(), or call "
            "viking.detach(model) first"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model whose weights are streamed cannot be pickled: save its state_dict(), or call "
            "viking.detach(model) first"
        )

    # ---- attach ----

    def start(self, progress: Progress, budget: Budget, pin_limit: int | None) -> None:
        """Manage the whole module. On an exception everything is as before."""
        keep_out_of_compiled_code()
        device = self.device
        refuse_missing_data(self.module, self.ignored)
        before = (device.share, device.pinning.limit)
        try:
            device.share = dataclasses.replace(device.share)
            device.set_budget(budget)
            device.join(self)
            self.has_root = True
            device.pinning.limit = pin_limit
            self._adopt(progress)
            self.started = True
            self.module.__dict__["_memory_manager"] = self
            self._hook = self.module.register_forward_pre_hook(self._enter, prepend=True)
            latecomers.watch(self)
        except BaseException:
            device.share, device.pinning.limit = before
            self.stop()
            raise

    @torch.inference_mode(False)
    @torch.no_grad()
    def _adopt(self, progress: Progress) -> None:
        """Take in what is not managed yet. Whatever context this happens in, the tensors stay trainable."""
        verdicts = judge(self.module, self.ignored, self.process_device, trained=self.trained == "host")
        self.reasons.update({v.name: v.reason for v in verdicts if v.reason})
        fresh = self._open_homes([v.module for v in verdicts if not v.reason])
        if fresh:
            self.device.engine.layout(self.device.budget_bytes())  # too small a budget ends here, with nothing touched
            self._refuse_without_memory(fresh)
        self._fill(fresh, progress)
        self._move_the_rest()
        if fresh or not self.started:
            self.device.relayout(strict=True)
            self.device.pin(progress, dict.fromkeys(fresh, self._leave_mapping))
        for verdict in verdicts:
            if not verdict.reason:
                self._install(verdict.module)

    def _adopt_late_comers(self) -> None:
        """Take in what was registered since the last look; an exception leaves it for the next one."""
        self.stale = False
        try:
            self._bring_home(self._away())  # what was parametrized, say, before its new parameters are looked for
            self._hand_over_what_is_gone()
            before = set(self.weights)
            try:
                self._adopt(lambda done, total, what: None)
            except BaseException:
                for number in set(self.weights) - before:
                    self._release_weight(number)
                raise
            self._bring_home(self._away())  # what is tied to a module that has moved
        except BaseException:
            self.stale = True
            raise

    def _hand_over_what_is_gone(self) -> None:
        """Linears that were taken out of the module stream on, and go with the last who holds them."""
        present = set(self.module.modules())
        gone = [number for number, weight in self.weights.items() if present.isdisjoint(weight.modules)]
        for number in gone:
            self._hand_over(number)
        if gone:
            gc.collect()  # modules and managers refer to one another
            self.device.lost = True

    def _hand_over(self, number: int) -> None:
        for manager in self.by_weight[number]:
            manager.forget_home()  # whatever happens on the way
        weight, home = self.weights.pop(number), self.homes.pop(number)
        heir = MemoryManager(weight.modules[0], self.device, self.kept)
        self.heirs.add(heir)
        self.device.join(heir)
        heir._keep(number, weight, home)
        for manager in self.by_weight.pop(number):
            self._let_go(manager)
            heir._manage(manager.module, number, weight, home)
            heir._install(manager.module)
        self.stepped.discard(number)
        heir._tell_training(number)

    def _open_homes(self, modules: list[nn.Module]) -> list[int]:
        numbers = []
        files = file_ranges()
        for weight in group(modules):
            home = weight.home(files)
            number = self.device.engine.add(home, weight.nbytes)
            self._keep(number, weight, home)
            numbers.append(number)
            for module in weight.modules:
                self._manage(module, number, weight, home)
        return numbers

    def _manage(self, module: nn.Module, number: int, weight: Weight, home: Home) -> None:
        manager = LinearLayerMemoryManager(module, self, self.device.engine)
        manager.bind(number, home, weight.nbytes)
        self.linears[module] = manager
        self.by_weight[number].append(manager)

    def _refuse_without_memory(self, numbers: list[int]) -> None:
        """MemoryError where host memory has no room for the homes. What comes from it is let go of weight by weight."""
        own = [self.weights[n] for n in numbers if not self.homes[n].borrowed]
        arriving = [w for w in own if any(s.device.type != "cpu" for s in w.segments)]
        need = sum(w.nbytes for w in arriving) + max((w.nbytes for w in own if w not in arriving), default=0)
        available = memory_available()
        if available is not None and need > available:
            raise MemoryError(
                f"the weights need {format_bytes(need)} of host memory ({need} bytes) and {format_bytes(available)} "
                "are free: close other programs, or load a smaller or quantised model"
            )

    def _keep(self, number: int, weight: Weight, home: Home) -> None:
        # `weights` last: what it names is complete, and what it does not name is swept out of the engine.
        self.device.numbers.add(number)
        self.homes[number] = home
        self.by_weight[number] = []
        self.weights[number] = weight

    def _fill(self, numbers: list[int], progress: Progress) -> None:
        total = sum(self.weights[n].nbytes for n in numbers)
        done = trimmed = 0
        for number in numbers:
            weight = self.weights[number]
            home = self.homes[number]
            if not home.borrowed:
                _fill(home, weight)
                _bring(home, weight)
            for manager in self.by_weight[number]:
                manager.bind(number, home, weight.nbytes)
            self._tell_training(number)
            done += weight.nbytes
            if done - trimmed >= TRIM_INTERVAL_BYTES or done == total:
                trim()  # what the weights came from may be smaller than what the C library gives back by itself
                trimmed = done
            progress(done, total, "moving weights to their homes")

    def _move_the_rest(self) -> None:
        """Everything that is not streamed lives on the device from now on."""
        device = self.process_device

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in self.ignored or tensor.device == device or tensor.is_meta:
                return tensor
            self.moved_bytes += tensor.numel() * tensor.element_size()
            return tensor.to(device)

        for module in self.module.modules():
            if module in self.linears or id(module) in self.ignored or hasattr(module, "_layer_memory_manager"):
                continue
            own = [t for t in [*module._parameters.values(), *module._buffers.values()] if t is not None]
            away = [t for t in own if t.device != device and not t.is_meta and id(t) not in self.ignored]
            if away:
                self.moved.append((module, away[0].device))
                _apply_of(module)(module, move, recurse=False)

    def _install(self, module: nn.Module) -> None:
        module.__dict__["_layer_memory_manager"] = self.linears[module]
        forwards.install(module, self.linears[module])

    # ---- one Linear more or less (LinearLayerMemoryManager.attach and .detach) ----

    def manage_linear(self, module: nn.Module) -> LinearLayerMemoryManager:
        """Manage one Linear. ValueError, with the reason, if it cannot be streamed."""
        with DeviceEngine.lock:
            return self._manage_linear(module)

    def _manage_linear(self, module: nn.Module) -> LinearLayerMemoryManager:
        present = module.__dict__.get("_layer_memory_manager")
        if present is not None:
            return present
        if not isinstance(module, nn.Linear):
            raise ValueError(f"this {type(module).__name__} cannot be streamed: it is no Linear")
        verdict = judge(module, self.ignored, self.process_device, whole=False)[0]
        if verdict.reason:
            raise ValueError(f"this {type(module).__name__} cannot be streamed: {verdict.reason}")
        (number,) = self._open_homes([module])
        try:
            self._fill([number], lambda done, total, what: None)
            self.device.relayout()
            self.device.pin(moves={number: self._leave_mapping})
        except BaseException:
            self._release_weight(number)
            raise
        self._install(module)
        return self.linears[module]

    def release_linear(self, manager: LinearLayerMemoryManager) -> None:
        """Stop managing one Linear, and those that share its bytes. It stays on the host."""
        with DeviceEngine.lock:
            self._release_linear(manager)
            self.device.relayout()
            self.device.pin()

    def abandon(self, manager: LinearLayerMemoryManager) -> None:
        """The module's tensors are about to lose their data: stop managing it; what shares them is judged again."""
        with DeviceEngine.lock:
            self._release_linear(manager)
            self.stale = self.device.lost = True

    def _release_linear(self, manager: LinearLayerMemoryManager) -> None:
        number = self._number_of(manager)
        if number is None:
            self._let_go(manager)
        else:
            self._release_weight(number)

    def _release_weight(self, number: int) -> None:
        self.device.engine.remove(number)
        self.device.numbers.discard(number)
        del self.weights[number]
        self.stepped.discard(number)
        for manager in self.by_weight.pop(number):
            self._let_go(manager)
        self.homes.pop(number).retire()

    @contextlib.contextmanager
    def _leave_mapping(self, number: int) -> Iterator[None]:
        """Give a weight that lies in a mapping a home of its own; an exception inside leaves it where it was.

        Only while nothing has used it yet: later its parameters must stay where they are, for graphs may hold them. A
        resident that another layout streams is copied from its mapping through the window.
        """
        weight, mapped = self.weights[number], self.homes[number]
        home = Home(weight.nbytes)
        _fill(home, weight)
        self.device.engine.rehome(number, home)
        try:
            yield
        except BaseException:
            self.device.engine.rehome(number, mapped)
            raise
        self.homes[number] = home
        _bring(home, weight)
        for manager in self.by_weight[number]:
            manager.bind(number, home, weight.nbytes)

    def _let_go(self, manager: LinearLayerMemoryManager) -> None:
        forwards.remove(manager.module, manager)
        manager.unbind()
        self.linears.pop(manager.module, None)

    # ---- edits ----

    def rehome(self, manager: LinearLayerMemoryManager) -> None:
        """A parameter of a managed Linear was replaced, or its data was: bring the new bytes into a home.

        What cannot be streamed becomes an ordinary module on the device, and its reason is kept for the stats.
        """
        with DeviceEngine.lock:
            if self.linears.get(manager.module) is manager:
                number = self._number_of(manager)
                self._bring_home([manager.module] if number is None else self.weights[number].modules)

    def _away(self) -> list[nn.Module]:
        """Managed Linears whose tensors are other ones than those that were brought home, or elsewhere."""
        for module, manager in list(self.linears.items()):
            if module.__dict__.get("_layer_memory_manager") is not manager:
                self._let_go(manager)  # an interrupt came in the middle of it
        at_home = {
            module
            for number, weight in self.weights.items()
            if weight.lives_in(self.homes[number])
            for module in weight.modules
        }
        return [module for module in self.linears if module not in at_home]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _bring_home(self, away: list[nn.Module]) -> None:
        """Judge these Linears again and group them anew, together with the weights that they share bytes with now."""
        if not away:
            return
        spans = spans_of(t for module in away for t in tensors_of(module))
        together = {id(module) for module in away}
        former = [
            number
            for number, weight in self.weights.items()
            if any(id(m) in together for m in weight.modules)
            or overlap(spans_of(t for m in weight.modules for t in tensors_of(m)), spans)
        ]
        modules = list(dict.fromkeys([*away, *(m for number in former for m in self.weights[number].modules)]))
        verdicts = judge_again(self.module, modules, self.ignored)
        self.device.engine.drain_copies()
        fresh = group([v.module for v in verdicts if not v.reason])
        homes = self._homes_for(fresh)
        for number in former:
            self._forget_weight(number)
        for weight, (number, home) in zip(fresh, homes, strict=True):
            self._keep(number, weight, home)
            self.by_weight[number] += [self.linears[module] for module in weight.modules]
        names = {module: name for name, module in self.module.named_modules()}
        for verdict in verdicts:
            if verdict.reason:
                self._let_go(self.linears[verdict.module])
                self.reasons[names.get(verdict.module, "")] = verdict.reason
        try:  # not bound before it is filled: where that fails, the next use finds them away from home and calls again
            self._fill([number for number, _ in homes], lambda done, total, what: None)
            self._move_the_rest()
            self.device.relayout()
            self.device.pin()
        except BaseException:
            self.device.lost = True
            raise

    def _number_of(self, manager: LinearLayerMemoryManager) -> int | None:
        """Of its weight. `manager.weight` is a former one where a replaced weight was not brought home to the end."""
        return next((number for number, together in self.by_weight.items() if manager in together), None)

    def _homes_for(self, weights: list[Weight]) -> list[tuple[int, Home]]:
        """New weights of the engine, (number, home); all or none."""
        engine = self.device.engine
        made: list[tuple[int, Home]] = []
        try:
            files = file_ranges()
            for weight in weights:
                home = weight.home(files)
                made.append((engine.add(home, weight.nbytes), home))
        except BaseException:
            for number, _ in made:
                engine.remove(number)
            raise
        return made

    def _forget_weight(self, number: int) -> None:
        """Its modules come under another one. The engine keeps a weight that another thread uses until the relayout."""
        for manager in self.by_weight[number]:
            manager.forget_home()
        del self.by_weight[number], self.weights[number]
        self.stepped.discard(number)
        home = self.homes.pop(number)
        with contextlib.suppress(RuntimeError):
            self.device.engine.remove(number)
            self.device.numbers.discard(number)
            home.retire()

    def refresh(self) -> None:
        """The host bytes of any weight may have changed: fetch them all again."""
        with DeviceEngine.lock:
            for number in self.weights:
                self.device.engine.invalidate(number)

    # ---- trained weights ----

    def users_of(self, manager: LinearLayerMemoryManager) -> weakref.WeakSet[Any]:
        """The graph nodes that give gradients to the parameters of this Linear's weight."""
        return self.weights[manager.weight].users

    def retrain(self, manager: LinearLayerMemoryManager) -> None:
        """Parameters of this Linear began or ceased to require a gradient."""
        self._tell_training(manager.weight)
        if manager.path == "resident":  # its home is read in each pass from now on, or in none
            with DeviceEngine.lock:
                self.device.pin()

    def _tell_training(self, number: int) -> None:
        """The host steps what is trained: between passes, or at any moment where no root's entry begins them."""
        trained = any(is_trained(linear) for linear in self.by_weight[number])
        self.device.engine.set_trained(number, 0 if not trained else 1 if self.has_root else 2)
        (self.stepped.add if trained else self.stepped.discard)(number)

    # ---- a step ----

    def _enter(self, module: nn.Module, args: Any) -> None:
        keep_out_of_compiled_code()
        if self.stale and not forwards.is_lending():
            with DeviceEngine.lock:
                self._adopt_late_comers()
        training = torch.is_grad_enabled()
        self.device.forget_trained()
        renew = self.device.engine.pass_begin(2 * self._key + training, training)
        if self.device.is_due() or renew or self.device.needs_layout():
            with DeviceEngine.lock:
                self.device.adapt(renew)

    def device_views(self, manager: LinearLayerMemoryManager, address: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """weight and bias of a managed Linear over the device memory at `address`."""
        slab = self.device.slab
        assert slab is not None
        places = self.weights[manager.weight].places
        weight, bias = (manager.module._parameters[name] for name in ("weight", "bias"))
        offset = address - slab.data_ptr()

        def view(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else places[id(tensor)].over(slab, offset)

        with torch.inference_mode(False), torch.no_grad():
            weight_view = view(weight)
            assert weight_view is not None
            if isinstance(weight, QuantizedWeight):
                weight_view = QuantizedWeight(weight_view, view(weight.scale), weight.dtype)
            return weight_view, view(bias)

    # ---- detach ----

    @torch.inference_mode(False)
    @torch.no_grad()
    def stop(self) -> None:
        """Everything is as before attach, but that the weights' bytes may lie elsewhere in host memory.

        RuntimeError while a use is in progress; what is left then is undone by the next call.
        """
        for owner in (*self.heirs, self):
            for number, weight in list(owner.weights.items()):
                home = owner.homes[number]
                owner._release_weight(number)
                if any(segment.device.type != "cpu" for segment in weight.segments):
                    self.travelled.append((weight, home))
        for heir in self.heirs:
            self.device.managers.discard(heir)
        self.heirs.clear()
        for manager in list(self.linears.values()):  # whose weight was lost between two homes
            self._let_go(manager)
        latecomers.unwatch(self)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self.started = False
        self.module.__dict__.pop("_memory_manager", None)
        for module, origin in reversed(self.moved):
            apply = _apply_of(module)
            apply(module, lambda t, to=origin: t if id(t) in self.ignored or t.is_meta else t.to(to), recurse=False)
        self.moved.clear()
        latecomers.look_again()  # another manager that covers these modules as well takes them over
        self.device.leave(self)
        for weight, home in self.travelled:  # only now: the slab's memory is what they need
            for segment in weight.segments:
                if segment.device.type != "cpu":
                    weight.send_back(_tensor_over(home), segment, segment.device)
        self.travelled.clear()


def _apply_of(module: nn.Module) -> Any:
    """torch's own `_apply`, which overrides of foreign modules do not see; an 8-bit Linear needs its own."""
    return QuantizedLinear._apply if isinstance(module, QuantizedLinear) else nn.Module._apply


def _fill(home: Home, weight: Weight) -> None:
    """Copy what comes from host memory."""
    for segment in weight.segments:
        if segment.device.type == "cpu":
            home.fill(segment.offset, segment.begin, segment.nbytes)


def _bring(home: Home, weight: Weight) -> None:
    """Its parameters are over the home from now on; what comes from a device is copied."""
    base = _tensor_over(home)
    with torch.inference_mode(False), torch.no_grad():
        for place in weight.places.values():
            target = place.over(base, 0)
            if place.segment.device.type != "cpu":
                target.copy_(codes_of(place.parameter))
            move(place.parameter, target)


def _tensor_over(home: Home) -> torch.Tensor:
    """All bytes of a home as a uint8 tensor that keeps it alive."""
    with torch.inference_mode(False):
        return torch.frombuffer(home, dtype=torch.uint8)
