"""Stochastic rounding for any optimizer that steps one weight at a time.

A bf16 weight has 8 significant bits: an update below 1/512 of it is lost when the result is rounded to nearest, and
with it weight decay and most of what a small learning rate does. Here the optimizer never sees the bf16 weight. For the
time of its own step each weight is fp32 (`weight.data` and `weight.grad` are exchanged, the Parameter is the same), the
class's own code computes the update in fp32, and the result is rounded to bf16 once, up or down by chance, so that its
mean is what was computed.

The optimizer's state is what the class makes of an fp32 weight: Adam's moments are fp32 (its second moment in bf16
would not move either: it changes by a thousandth per step), bitsandbytes' stay 8-bit. That holds when a state is
loaded, too.

Weights take their turn in batches of a bounded size, so that the fp32 copies stay small and many small weights cost no
more calls than the optimizer's own foreach code would. Neither the batches nor their order show in the result: the
random bits are a function of the seed, the weight's index in the optimizer, the step and the element's index.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from viking.optim.bits import Key, key_of, round_
from viking.optim.served import refusal

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)

STEP_KEY = "stochastic_rounding_step"
BATCH_BYTES = 64 << 20  # of fp32 copies: weights and gradients

_increment_version: Callable[[Any], None] = getattr(torch.autograd.graph, "increment_version", lambda _: None)


def stochastic_rounding(opt: AnyOptimizer, seed: int = 0) -> AnyOptimizer:
    """Let an optimizer update bf16 weights with stochastic rounding; returns the same object.

    For every class that updates a weight from that weight, its gradient, its state and its group's settings: those of
    torch, bitsandbytes and transformers among them; fp32 and fp16 weights in it are stepped as ever. Closures, step
    hooks, learning-rate schedulers, GradScaler, foreach and fused flags, groups added later and `zero_grad` work as
    before. Call it once, before the first step or after it; again with the same seed it does nothing.

    `state_dict()` carries the number of steps in `param_groups[...]["stochastic_rounding_step"]`, so that a run that
    loads it goes on with the very bits that it would have had; give it the same seed. Copies and pickles of the
    optimizer are ordinary optimizers: wrap them again.

    The fp32 copies take at most 64 MiB at a time, or what one weight and its gradient need.

    Raises TypeError for what is no optimizer and, with the reason, for classes that cannot be served: those that
    compute one step size from all weights (LBFGS, Prodigy, D-Adaptation), that step inside backward, or change weights
    outside `step()`. A sparse gradient raises RuntimeError when it comes.

    >>> opt = viking.stochastic_rounding(torch.optim.AdamW(network.parameters(), lr=1e-5))
    """
    inner = getattr(opt, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):  # accelerate's wrapper calls the optimizer in it
        stochastic_rounding(inner, seed)
        return opt
    if not isinstance(opt, torch.optim.Optimizer):
        raise TypeError(f"stochastic_rounding takes a torch.optim.Optimizer, not {type(opt).__name__}")
    present = vars(opt).get("_stochastic_rounding")
    if present is not None:
        if present.seed != seed:
            raise ValueError(f"the optimizer rounds stochastically with seed {present.seed} already, not {seed}")
        return opt
    reason = refusal(opt)
    if reason is not None:
        raise TypeError(
            f"{type(opt).__name__} cannot update bf16 weights with stochastic rounding: it {reason}. "
            "Keep its weights in fp32, or take another optimizer."
        )
    own_step = vars(opt).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        raise TypeError(f"the step of this {type(opt).__name__} has been replaced already: wrap it before that is done")
    _Rounding(opt, seed).install()
    return opt


def is_rounding(opt: object) -> bool:
    """Whether stochastic_rounding has been applied to the optimizer."""
    return "_stochastic_rounding" in vars(opt) or "_stochastic_rounding" in vars(getattr(opt, "optimizer", object))


def _unhooked_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The class's own step, without what runs the step hooks around it: those are to run once, not once per batch."""
    step: Callable[..., Any] = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


class _Rounding:
    """What stochastic_rounding adds to one optimizer."""

    def __init__(self, opt: torch.optim.Optimizer, seed: int) -> None:
        self.opt = opt
        self.seed = seed
        self.own_step = _unhooked_step(type(opt))
        self.scratch: torch.Tensor | None = None

    def install(self) -> None:
        opt, own_load = self.opt, self.opt.load_state_dict
        rounding = self

        def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            self._opt_called = True  # type: ignore[attr-defined]  # a scheduler asks whether the step came before it
            return rounding.step(closure)

        def load_state_dict(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            with rounding.seen_as_fp32():
                own_load(*args, **kwargs)

        hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
        if "step" in vars(opt):  # a scheduler has wrapped it and would miss its mark
            hooked._wrapped_by_lr_sched = True
        opt.step = types.MethodType(hooked, opt)  # type: ignore[method-assign]
        opt.load_state_dict = types.MethodType(load_state_dict, opt)  # type: ignore[method-assign]
        opt._stochastic_rounding = self  # type: ignore[attr-defined]
        with torch.no_grad():
            self.widen_state()

    def weights(self) -> Iterator[torch.Tensor]:
        for group in self.opt.param_groups:
            yield from group["params"]

    def widen_state(self) -> None:
        """State that exists and was made of bf16 weights (Adagrad makes it when it is built) becomes fp32."""
        for weight in self.weights():
            state = self.opt.state.get(weight, {}) if weight.dtype == torch.bfloat16 else {}
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
                    state[name] = value.float()

    @contextmanager
    def seen_as_fp32(self) -> Iterator[None]:
        """Every bf16 weight looks like an fp32 one, without the memory: loading a state casts it to what it sees."""
        narrow = {weight: weight.data for weight in self.weights() if weight.dtype == torch.bfloat16}
        grads = {weight: weight.grad for weight in narrow}
        try:
            for weight, data in narrow.items():
                weight.grad = None
                weight.data = torch.zeros((), dtype=torch.float32, device=data.device).expand(data.shape)
            yield
        finally:
            for weight, data in narrow.items():
                weight.data = data
                weight.grad = grads[weight]

    def step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        opt, groups = self.opt, self.opt.param_groups
        now = max((group.get(STEP_KEY, 0) for group in groups), default=0)
        _before_first_step(opt)
        first = 0
        try:
            for index, group in enumerate(groups):
                opt.param_groups = [group]
                self._step_group(group, index, first, now)
                first += len(group["params"])
        finally:
            opt.param_groups = groups
            if self.scratch is not None and self.scratch.nbytes > BATCH_BYTES:
                self.scratch = None
        for group in groups:
            group[STEP_KEY] = now + 1
        return loss

    def _step_group(self, group: dict[str, Any], index: int, first: int, now: int) -> None:
        """Step the group's weights batch by batch. Each batch finds the group's scalars as they were before the step;
        what the class changes in them (a counter) must be the same every time and is kept once."""
        weights = group["params"]
        before = {name: value for name, value in group.items() if name != "params"}
        after: dict[str, Any] | None = None
        try:
            for batch in _batches(weights):
                group.update(before)
                group["params"] = [weights[at] for at in batch]
                keys = [key_of(self.seed, first + at, now) for at in batch]
                with self._widened(group["params"], keys), _indices(self.opt, index, batch):
                    self.own_step(self.opt)
                changed = {name: value for name, value in group.items() if name != "params"}
                after = changed if after is None else _same_scalars(self.opt, after, changed)
        finally:
            group["params"] = weights
        group.update(after or {})

    def _fp32(self, count: int, device: torch.device) -> torch.Tensor:
        """Room for `count` elements. On the CPU the room stays for the next batch and, where it is no larger than a
        batch may be, for the next step: fresh pages cost ten times what is done with them. CUDA's allocator keeps its
        own."""
        if device.type != "cpu":
            return torch.empty(count, dtype=torch.float32, device=device)
        if self.scratch is None or self.scratch.numel() < count:
            self.scratch = None
            self.scratch = torch.empty(count, dtype=torch.float32)
        return self.scratch[:count]

    @contextmanager
    def _widened(self, weights: list[torch.Tensor], keys: list[Key]) -> Iterator[None]:
        """The bf16 weights among them are fp32 inside and rounded on the way out; an exception changes none."""
        chosen = [(weight, key) for weight, key in zip(weights, keys, strict=True) if weight.dtype == torch.bfloat16]
        if not chosen:
            yield
            return
        narrow = [_plain(weight.data) for weight, _ in chosen]
        grads = [weight.grad for weight, _ in chosen]
        counts = [data.numel() for data in narrow]
        wide, wide_grads = self._fp32(2 * sum(counts), narrow[0].device).split(sum(counts))
        parts = [part.view(data.shape) for part, data in zip(wide.split(counts), narrow, strict=True)]
        grad_parts = [part.view(data.shape) for part, data in zip(wide_grads.split(counts), narrow, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(parts, narrow)
        done = False
        try:
            for (weight, _), part, grad_part, grad in zip(chosen, parts, grad_parts, grads, strict=True):
                weight.grad = None
                weight.data = part
                if grad is not None:
                    weight.grad = grad_part.copy_(_plain(grad))
                elif hasattr(weight, "_accum_grad"):  # ai-toolkit's optimizers collect gradients here
                    weight._accum_grad = weight._accum_grad.float()
            yield
            done = True
        finally:
            for (weight, _), data, grad in zip(chosen, narrow, grads, strict=True):
                weight.grad = None
                weight.data = data
                weight.grad = grad
        if done:
            with torch.no_grad():
                round_(narrow, wide, [key for _, key in chosen])
            for weight, _ in chosen:
                _increment_version(weight)
                self._own_state(weight, wide)

    def _own_state(self, weight: torch.Tensor, wide: torch.Tensor) -> None:
        """A state that holds on to the gradient or weight that it was shown gets a copy: their memory is used again."""
        memory = wide.untyped_storage().data_ptr()
        state = self.opt.state.get(weight, {})
        for name, value in state.items():
            if type(value) is torch.Tensor and value.untyped_storage().data_ptr() == memory:
                state[name] = value.clone()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise RuntimeError(
            f"stochastic_rounding cannot use a sparse gradient (of a weight of shape {tuple(tensor.shape)})"
        )
    if type(tensor) is not torch.Tensor:
        raise TypeError(f"stochastic_rounding cannot step a {type(tensor).__name__}: it needs plain bf16 tensors")
    return tensor


def _has_gradient(weight: torch.Tensor) -> bool:
    return weight.grad is not None or hasattr(weight, "_accum_grad")


def _batches(weights: list[torch.Tensor]) -> Iterator[list[int]]:
    """Indices of the weights that have something to be stepped with, in runs on one device with bounded copies."""
    batch: list[int] = []
    batch_bytes = 0
    for at, weight in enumerate(weights):
        if not _has_gradient(weight):
            continue
        nbytes = 8 * weight.numel() if weight.dtype == torch.bfloat16 else 0
        if batch and (batch_bytes + nbytes > BATCH_BYTES or weight.device != weights[batch[0]].device):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(at)
        batch_bytes += nbytes
    if batch:
        yield batch


def _same_scalars(opt: torch.optim.Optimizer, left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    for name, value in right.items():
        other = left.get(name, value)
        equal = other is value or (not isinstance(value, torch.Tensor) and other == value)
        if not equal and not (isinstance(value, torch.Tensor) and torch.equal(value, other)):
            raise RuntimeError(
                f"{type(opt).__name__} computes {name!r} from all weights of a group together: "
                "stochastic_rounding cannot serve it. Keep its weights in fp32."
            )
    return right


# ---- bitsandbytes knows weights by their indices ----


def _before_first_step(opt: torch.optim.Optimizer) -> None:
    """What bitsandbytes' first step does with all groups, while all of them are still in place."""
    if hasattr(opt, "check_overrides") and getattr(opt, "initialized", True) is False:
        opt.check_overrides()
        opt.to_gpu()  # type: ignore[attr-defined]
        opt.initialized = True  # type: ignore[attr-defined]


@contextmanager
def _indices(opt: torch.optim.Optimizer, group_index: int, batch: list[int]) -> Iterator[None]:
    """Settings of single weights that bitsandbytes keeps by (group, position) are found under their batch's indices."""
    settings = getattr(getattr(opt, "mng", None), "index2config", None)
    if not settings:
        yield
        return
    mine = {(0, at): settings[group_index, index] for at, index in enumerate(batch) if (group_index, index) in settings}
    everything = dict(settings)
    settings.clear()
    settings.update(mine)
    try:
        yield
    finally:
        settings.clear()
        settings.update(everything)
