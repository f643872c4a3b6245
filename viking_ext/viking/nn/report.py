"""What Viking does with a model, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from viking.nn.attaching import managers_of
from viking.nn.pinning import is_trained


@dataclass(frozen=True)
class WeightStats:
    """One Linear of the model."""

    name: str
    nbytes: int
    path: str  # "resident", "streamed", "demand" (streamed before an order is known), "unmanaged" (an ordinary tensor)
    reason: str  # why it is so


@dataclass(frozen=True)
class Stats:
    """The totals are those of the device's engine, which all models on it share; `weights` are this model's."""

    resident_bytes: int  # managed weights that stay on the device
    streamed_bytes: int  # those that travel
    pinned_bytes: int  # host memory locked for the device
    staged_bytes: int  # streamed from pageable memory
    slab_bytes: int  # device memory that the engine holds
    weights_budget_bytes: int
    steps: int  # complete training passes
    replans: int  # layouts after the first one
    demand_fetches: int  # copies that a use had to wait for from their start
    fetched_bytes: int  # host to device, in the last complete training pass
    written_bytes: int  # device to host, likewise: the gradients of weights that the host steps
    stall_ns: int  # that streams waited for copies, in the last pass that was measured (each 32nd)
    plan_ratio: float  # fetched_bytes over the least that any plan must fetch with this slab; 1.0 if nothing must
    weights: list[WeightStats] = field(default_factory=list, repr=False)


def stats(model: nn.Module) -> Stats:
    """Numbers of an attached model. ValueError if it is not attached.

    >>> viking.stats(model).fetched_bytes
    46124236800
    """
    managers = list(managers_of(model))
    totals = managers[0].device.engine.stats()
    names = {module: name for name, module in model.named_modules()}
    by_name = {manager: dict(manager.module.named_modules()) for manager in managers}
    weights = []
    for manager in managers:
        for module, linear in manager.linears.items():
            if module in names:
                reason = "trained: stepped on the host" if is_trained(linear) else _REASONS[linear.path]
                weights.append(WeightStats(names[module], linear.nbytes, linear.path, reason))
        for name, reason in manager.reasons.items():
            left = by_name[manager].get(name)
            if left is not None and left in names and "_layer_memory_manager" not in left.__dict__:
                nbytes = sum(p.numel() * p.element_size() for p in left.parameters(recurse=False))
                weights.append(WeightStats(names[left], nbytes, "unmanaged", reason))
    floor, fetched = totals["floor_bytes"], totals["fetched_bytes"]
    return Stats(
        resident_bytes=totals["resident_bytes"],
        streamed_bytes=totals["streamed_bytes"],
        pinned_bytes=totals["pinned_bytes"],
        staged_bytes=totals["staged_bytes"],
        slab_bytes=totals["slab_bytes"],
        weights_budget_bytes=totals["budget_bytes"],
        steps=totals["steps"],
        replans=max(0, totals["layouts"] - 1),
        demand_fetches=totals["demand_fetches"],
        fetched_bytes=fetched,
        written_bytes=totals["written_bytes"],
        stall_ns=totals["stall_ns"],
        plan_ratio=fetched / floor if floor else 1.0,
        weights=weights,
    )


_REASONS = {
    "resident": "the plan keeps it on the device",
    "streamed": "the budget does not hold every weight",
    "demand": "the order of uses is still being learned",
}
