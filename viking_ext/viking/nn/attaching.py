"""What users call: attach, detach, refresh, editing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from viking.nn.budget import Budget, Size, parse_size
from viking.nn.device import DeviceEngine, resolve_device
from viking.nn.managing import Ignored, MemoryManager
from viking.nn.progress import make_progress


def attach(
    model: nn.Module,
    device: str | torch.device | int = "cuda",
    vram: Size = "auto",
    weights_budget: Size = None,
    pin: str | int | bool = "auto",
    ignore: Ignored = (),
    progress: bool | Callable[[int, int, str], None] = True,
    trained: str = "device",
) -> nn.Module:
    """Stream the model's Linear weights from host memory to `device`: those that are frozen, and with trained="host"
    those that are trained. Everything else moves there for good.

    The model computes what it computes without this, bit for bit; train and sample as before.

    Args:
        model: any module whose Linear weights are fp32, bf16 or fp16. It may be on the host, where it should be if the
            card cannot hold it, or on the device already.
        device: "cuda", "cuda:1", or "cpu", which runs the same schedule on threads, without a GPU ("cpu:1" and so
            on: another engine of that kind).
        vram: what the whole process may use on the device: "auto", bytes, or a string such as "20GiB".
        weights_budget: what the streamed and resident weights may use, instead of `vram`; 0 is the smallest that works.
        pin: how much host memory may be pinned: "auto" (what is streamed), False (nothing), or a limit ("16GiB").
        ignore: modules, parameters and buffers to leave untouched, for you to move.
        progress: True, False, or a callable ``(done_bytes, total_bytes, what)``.
        trained: where Linear weights and biases that require a gradient live. "device": there, as ordinary Parameters.
            "host": they are streamed like frozen ones; their gradients arrive as host `.grad` tensors by the end of
            each backward pass, and any optimizer steps them on the host. Weights below 256 KiB stay on the device, and
            what is unfrozen after attach is stepped on the host either way.

    Returns:
        The model.

    Raises:
        ValueError: unusable device or size, a budget that is too small (the message names the smallest that works), a
            weight that has no data (meta device), or other arguments than at the attach before.
        RuntimeError: no CUDA here.
        MemoryError: too little free host memory for the weights.
        torch.OutOfMemoryError: the device cannot hold what is not streamed.

    The model is untouched after an exception.

    >>> model = viking.attach(model, "cuda", vram="20GiB")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach needs a torch.nn.Module, not {type(model).__name__}")
    target = resolve_device(device)
    if trained not in ("device", "host"):
        raise ValueError(f'trained={trained!r} is neither "device" nor "host"')
    ignore = tuple(ignore)
    budget = Budget(parse_size(vram, "vram"), parse_size(weights_budget, "weights_budget"))
    asked = (target, budget, _pin_limit(pin), tuple(sorted(id(item) for item in ignore)), trained)
    present = getattr(model, "_memory_manager", None)
    if present is not None:
        if present.options == asked:
            return model
        raise ValueError("this model is attached already, with other arguments: call viking.detach(model) first")
    with DeviceEngine.lock:
        manager = MemoryManager(model, DeviceEngine.of(target), ignore, asked, trained)
        try:
            with make_progress(progress) as report:
                manager.start(report, budget, _pin_limit(pin))
            return model
        except BaseException:
            if manager.started:  # an interrupt when all was done
                manager.stop()
            raise


def _pin_limit(pin: str | int | bool) -> int | None:
    if pin == "auto" or pin is True:
        return None
    return 0 if pin is False else parse_size(pin, "pin")


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`: parameters, forwards, hooks and attributes are as before it, on the devices of before.

    What was not attached is left alone. A graph built before cannot run backward afterwards.

    >>> viking.detach(model)
    """
    manager = model.__dict__.get("_memory_manager")
    if manager is not None:
        with DeviceEngine.lock:
            manager.stop()


def managers_of(model: nn.Module) -> Iterator[MemoryManager]:
    """The managers of this model, whether it was attached itself or a part of it was."""
    found: dict[int, MemoryManager] = {}
    for module in model.modules():
        for name in ("_memory_manager", "_layer_memory_manager"):
            owner = module.__dict__.get(name)
            if owner is not None:
                manager = owner if name == "_memory_manager" else owner.manager
                found[id(manager)] = manager
    if not found:
        raise ValueError("this model is not attached: call viking.attach(model, device) first")
    return iter(found.values())


def refresh(model: nn.Module) -> None:
    """Fetch all weights again before their next use.

    Needed after host writes that torch does not count: ``parameter.data.add_(...)``, fused optimizers, numpy. Ordinary
    in-place operations, ``load_state_dict`` and replaced parameters are noticed without it. ValueError if the model is
    not attached.

    >>> model.proj.weight.data.mul_(0.5)
    >>> viking.refresh(model)
    """
    for manager in managers_of(model):
        manager.refresh()


@contextlib.contextmanager
def editing(model: nn.Module) -> Iterator[None]:
    """Write to the weights of an attached model on the host: no copy reads them meanwhile, and all are fetched again.

    >>> with viking.editing(model):
    ...     model.load_state_dict(state)
    """
    managers = list(managers_of(model))
    for manager in managers:
        manager.device.engine.drain_copies()
    try:
        yield
    finally:
        for manager in managers:
            manager.refresh()
