"""Whether a job's optimizer may update bf16 weights.

The name in the config does not say: `adamw8bit`, the default, is bitsandbytes' and rounds to nearest, `adamw8` is the
toolkit's own and rounds stochastically, and `adafactor` does either. So the toolkit's own factory is asked to build the
optimizer, with the job's parameters, for one throw-away weight of four elements, and what comes back is judged by its
class and attributes.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from viking.optim.served import refusal

Factory = Callable[..., torch.optim.Optimizer]

# The toolkit's own classes that round stochastically when they write a bf16 weight. Where a class has a switch for it,
# the attribute that holds the switch.
_OWN: dict[str, str | None] = {
    "Adam8bit": None,
    "Prodigy8bit": None,
    "Adafactor": "stochastic_rounding",
    "Automagic": None,
    "Automagic2": None,
    "Automagic3": None,
    "AutomagicEXPERIMENT": None,
}
# What the source of such a class shows; a class that no longer does is not taken at its name.
_EVIDENCE = ("stochastic", "randint")

# Libraries whose optimizers step one weight at a time, except those that viking.optim.served names.
_PER_WEIGHT = ("torch.optim", "bitsandbytes.optim", "lion_pytorch", "transformers.optimization")


@dataclass(frozen=True)
class Verdict:
    """`rounding`: who rounds stochastically, the optimizer itself ("own"), Viking, or nobody: then bf16 is not safe."""

    rounding: Literal["own", "viking"] | None
    name: str
    reason: str

    @property
    def safe(self) -> bool:
        return self.rounding is not None


def toolkit_factory() -> Factory:
    """`toolkit.optimizer.get_optimizer` of the tree that is running."""
    factory: Factory = importlib.import_module("toolkit.optimizer").get_optimizer
    return factory


def build_one(name: str, parameters: Mapping[str, Any], factory: Factory) -> torch.optim.Optimizer:
    """The job's optimizer over one small weight; what the factory prints is not shown twice."""
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    with contextlib.redirect_stdout(io.StringIO()):
        return factory([weight], name.lower(), learning_rate=1e-4, optimizer_params=copy.deepcopy(dict(parameters)))


def judge(optimizer: torch.optim.Optimizer) -> Verdict:
    """The verdict on an optimizer that exists."""
    kind = type(optimizer)
    name = kind.__name__
    if kind.__module__.startswith("toolkit.optimizers") and name in _OWN:
        switch = _OWN[name]
        on = bool(getattr(optimizer, switch, True)) if switch else True
        if on and _shows_rounding(kind):
            return Verdict("own", name, f"{name} rounds stochastically itself")
        reason = refusal(optimizer)
        why = f"{name} has {switch} off" if not on else f"{name} no longer shows stochastic rounding"
        if reason is not None:
            return Verdict(None, name, f"{why}, and Viking cannot bring it: it {reason}")
        return Verdict("viking", name, f"{why}: Viking brings it")
    reason = refusal(optimizer)
    if reason is not None:
        return Verdict(None, name, f"{name} {reason}, so that Viking cannot round for it")
    if kind.__module__.startswith(_PER_WEIGHT):
        return Verdict(
            "viking", name, f"{name} ({kind.__module__.split('.')[0]}) rounds to nearest: Viking rounds for it"
        )
    return Verdict(None, name, f"{name} of {kind.__module__} is not known to Viking")


def _shows_rounding(kind: type) -> bool:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return any(word in source for word in _EVIDENCE)


def judge_config(name: str, parameters: Mapping[str, Any] | None, factory: Factory | None = None) -> Verdict:
    """The verdict on what a config names. A failure to build it is a reason too: the trainer will meet it again."""
    try:
        return judge(build_one(name, parameters or {}, factory or toolkit_factory()))
    except Exception as error:
        return Verdict(None, name, f"{name} could not be built to be looked at ({type(error).__name__}: {error})")


def let_clipping_see_gradients(optimizer: torch.optim.Optimizer) -> int:
    """Take back the hooks with which the toolkit's optimizers hide bf16 gradients from the trainer.

    They move every gradient out of `.grad` as soon as it is there, to sum several of them with stochastic rounding, and
    return it in `step()`. The trainer clips before that, finds nothing, and `max_grad_norm` has no effect: with fp32
    weights it has. Without the hooks gradients are summed in bf16. Returns how many weights had one.
    """
    count = 0
    for group in optimizer.param_groups:
        for weight in group["params"]:
            hooks = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
            for handle, hook in list(hooks.items()):
                if getattr(hook, "__name__", "") == "stochastic_grad_accummulation":
                    del hooks[handle]
                    count += 1
    return count
