"""What happened in the device's memory during one training step, as the engine measured it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from viking.nn.attaching import managers_of
from viking.timeline import Placed, Span


@dataclass(frozen=True)
class Step:
    """Weights with their addresses, in the order of their first use, and what they did when."""

    weights: list[Placed]
    computes: list[Span]
    copies: list[Span]
    period_ns: float


def record(model: nn.Module, training_pass: Callable[[], None], device: str) -> Step:
    """Run a few training passes (forward and backward, no update) and return the measured times of one."""
    managers = list(managers_of(model))
    engine = managers[0].device.engine
    linears = {linear.weight: linear for manager in managers for linear in manager.linears.values()}
    addresses: dict[int, int] = {}
    order: list[int] = []

    def note(number: int) -> Callable[..., None]:
        def before_forward(*unused: object) -> None:  # when its copy has been queued long ago
            order.append(number)
            if linears[number].device_ptr:
                addresses[number] = linears[number].device_ptr

        return before_forward

    hooks = [linear.module.register_forward_pre_hook(note(number)) for number, linear in linears.items()]
    training_pass()
    engine.profile_next()
    wait(device)
    began = time.perf_counter_ns()
    training_pass()
    wait(device)
    period = float(time.perf_counter_ns() - began)
    for hook in hooks:
        hook.remove()
    training_pass()  # its beginning ends the pass that was measured
    wait(device)

    numbers = [number for number in dict.fromkeys(order) if number in addresses]
    place = {number: index for index, number in enumerate(numbers)}
    base = min(addresses.values(), default=0)
    weights = [
        Placed(str(number), addresses[number] - base, linears[number].nbytes, linears[number].path == "resident", index)
        for number, index in place.items()
    ]
    profile = [(kind, place[number], begin, end) for kind, number, begin, end in engine.profile() if number in place]
    copies = [Span(begin, end, index) for kind, index, begin, end in profile if kind == "copy"]
    uses = [(ready, index) for kind, index, _, ready in profile if kind == "use"]
    waits = [asked for kind, _, asked, _ in profile if kind == "use"]
    ends = [*waits[1:], period]
    computes = [Span(ready, max(ready, end), index) for (ready, index), end in zip(uses, ends, strict=True)]
    return Step(weights, computes, copies, period)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
