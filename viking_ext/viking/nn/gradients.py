"""Gradients of streamed weights: from the device to the host, beside the backward pass.

Each Linear's backward queues the copy of its gradient and goes on. The weight's own place in the graph gets None, and a
callback at the end of the pass waits for the copies and does what torch's AccumulateGrad would have done: sum a
weight's gradients in the order in which they came, then set `.grad` or add to it. So nobody ever sees a gradient that
has not arrived, and a pass that fails leaves none behind.

    compute   | gW3 |     | gW2 |     | gW1 |          | end: join |
    link             | gW3 |     | gW2 |     | gW1 |
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from viking._engine import Home, current_stream

if TYPE_CHECKING:
    from viking.nn.device import DeviceEngine

#: Gradients of one pass and stream in device memory; before a further one is made, the stream waits for the oldest.
SLOTS = 4
#: Gradients on the host that wait to be added to others; beyond these, the oldest is added as soon as that is right.
LANDINGS = 4
_CUDA = 2  # DLPack's number
_ALL = 2**64 - 1  # a ticket: every copy so far


@dataclass(eq=False)
class Arrival:
    """One gradient on its way, or arrived."""

    parameter: torch.Tensor
    users: weakref.WeakSet[Any]  # the graph nodes that give this weight gradients
    host: torch.Tensor
    source: torch.Tensor | None  # on the device, while its memory must stay
    stream: int  # on which that was made and is used again
    lands: bool  # is to be added to another, or to what `.grad` is already
    ticket: int = _ALL


class Pass:
    """The gradients of one backward pass. It belongs to its graph task, as the task's last callback: it is called when
    the task ends well, and where the task dies it dies with it."""

    def __init__(self, gradients: Gradients, task: int) -> None:
        self.gradients = gradients
        self.task = task
        self.arrivals: deque[Arrival] = deque()  # in order, until they have arrived
        self.sums: dict[int, Arrival] = {}  # of what has arrived, by id of the parameter
        self.seen: set[int] = set()  # ids of parameters
        self.weights: set[int] = set()
        self.landing = 0
        gradients.passes[task] = self

    @property
    def engine(self) -> Any:
        return self.gradients.device.engine

    def add(
        self, parameter: torch.Tensor, weight: int, users: weakref.WeakSet[Any], make: Callable[[], torch.Tensor]
    ) -> None:
        """Send off what `make` returns: a gradient on the device, in the parameter's dtype."""
        try:
            stream = self.gradients.stream()
            self._leave_slot(stream)
            with torch.inference_mode(False), torch.no_grad():
                source = _as_torch_keeps_it(make(), parameter)
                host = torch.empty(0, dtype=source.dtype)
                memory = self.gradients.memory(source.nbytes)
                host.set_(memory.untyped_storage(), 0, source.shape, source.stride())
            # Known before its copy is queued: an interrupt that comes right after finds it here.
            lands = parameter.grad is not None or id(parameter) in self.seen
            self.arrivals.append(Arrival(parameter, users, host, source, stream, lands))
            self.landing += lands
            self.seen.add(id(parameter))
            self.weights.add(weight)
            self.arrivals[-1].ticket = self.engine.download(host.data_ptr(), source.data_ptr(), source.nbytes)
        except BaseException:
            self.discard()
            raise

    def _leave_slot(self, stream: int) -> None:
        pending = [a for a in self.arrivals if a.source is not None and a.stream == stream]
        if len(pending) >= SLOTS:
            self.engine.download_release(pending[0].ticket)
            pending[0].source = None

    def settle(self) -> None:
        """Gradients that become `.grad` as they are take no more memory than they must. The others are to be few."""
        try:
            while self.landing > LANDINGS and self.arrivals:
                total = self._arrive()
                if total.lands and self._is_complete(total):
                    self._deliver(self.sums.pop(id(total.parameter)))
                    self.landing -= 1
        except BaseException:
            self.discard()
            raise

    def _is_complete(self, arrival: Arrival) -> bool:
        """No node that gives this weight a gradient is still to run in this pass."""
        return all(getattr(node, "task", -1) == self.task for node in arrival.users) and not any(
            a.parameter is arrival.parameter for a in self.arrivals
        )

    def _arrive(self) -> Arrival:
        """Wait for the oldest and add it to what came before of its parameter; returns the sum."""
        arrival = self.arrivals[0]
        self.engine.download_await(arrival.ticket)
        self.arrivals.popleft()
        arrival.source = None
        before = self.sums.setdefault(id(arrival.parameter), arrival)
        if before is not arrival:
            with torch.no_grad():
                before.host.add_(arrival.host)
            self.landing -= 1
        return before

    def arrive(self) -> None:
        """Wait for all of them."""
        while self.arrivals:
            self._arrive()

    def _deliver(self, total: Arrival) -> None:
        parameter = total.parameter
        if not parameter.requires_grad:  # frozen since
            return
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = total.host
            else:
                parameter.grad.add_(total.host)

    def __call__(self) -> None:
        """The pass is over."""
        try:
            self.arrive()
            while self.sums:
                self._deliver(self.sums.pop(next(iter(self.sums))))
            self.gradients.expect_steps(self.weights)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """The pass has failed: what it made is lost, but only once no copy touches its memory any more."""
        if self.arrivals:
            with contextlib.suppress(RuntimeError):  # a closed engine has waited itself
                self.engine.download_await(_ALL)
        self.arrivals.clear()
        self.sums.clear()

    def __del__(self) -> None:
        self.discard()


class Gradients:
    """Those of one device's engine: passes under way, and host memory for them."""

    def __init__(self, device: DeviceEngine) -> None:
        self.device = device
        self.passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._homes: list[tuple[Home, weakref.ref[memoryview]]] = []

    def send(
        self, parameter: torch.Tensor, weight: int, users: weakref.WeakSet[Any], make: Callable[[], torch.Tensor]
    ) -> None:
        """Called in a backward: what `make` returns on the device will be in `parameter.grad`, or added to it, at the
        end of the pass."""
        task = torch._C._current_graph_task_id()
        if task not in self.passes:
            torch.autograd.Variable._execution_engine.queue_callback(Pass(self, task))
        self.passes[task].add(parameter, weight, users, make)

    def sent(self, node: Any) -> None:
        """This graph node has sent all that it has."""
        node.task = torch._C._current_graph_task_id()
        self.passes[node.task].settle()

    def expect_steps(self, weights: set[int]) -> None:
        """The host may write to these weights from now on."""
        for weight in weights:
            with contextlib.suppress(RuntimeError):  # is managed no longer
                self.device.engine.expect_step(weight)

    def stream(self) -> int:
        """The one that work is queued on now; on the host backend, the thread."""
        if self.device.device.type == "cpu":
            return threading.get_ident()
        return current_stream(torch.Tensor, _CUDA, self.device.device.index)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Host memory that no tensor views: of an earlier gradient, or new. It is taken while any tensor views it."""
        with self._lock:
            place = next((i for i, (h, view) in enumerate(self._homes) if h.nbytes == nbytes and view() is None), None)
            if place is not None:
                home = self._homes.pop(place)[0]
            else:
                home = Home(nbytes)
            view = memoryview(home)
            self._homes.append((home, weakref.ref(view)))
        if place is None:
            self.device.pin_home(home)
        with torch.inference_mode(False):
            return torch.frombuffer(view, dtype=torch.uint8)

    def trim(self) -> None:
        """Let go of memory that no tensor views."""
        with self._lock:
            unused = [home for home, view in self._homes if view() is None]
            self._homes = [(home, view) for home, view in self._homes if view() is not None]
        for home in unused:
            self.device.engine.unpin_home(home)

    def close(self) -> None:
        """Before the engine closes. Gradients that are still viewed live on in ordinary memory."""
        for under_way in list(self.passes.values()):
            under_way.arrive()
        with self._lock:
            homes, self._homes = self._homes, []
        for home, _ in homes:
            self.device.engine.unpin_home(home)
            home.retire()


def _as_torch_keeps_it(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """With the strides that AccumulateGrad gives the `.grad` of a dense parameter: the parameter's own."""
    sizes = zip(parameter.shape, gradient.stride(), parameter.stride(), strict=True)
    if all(size == 1 or mine == its for size, mine, its in sizes):
        return gradient
    strided = torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device)
    return strided.copy_(gradient)
