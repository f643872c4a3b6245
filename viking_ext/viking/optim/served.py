"""Which optimizers step one weight at a time, and why the others do not.

An optimizer is served as long as its update of a weight needs that weight, its gradient, its own state and the scalars
of its group. Everything here is told by class, because nothing else tells: a class that computes one step size from all
weights looks like any other until it has stepped.
"""

from __future__ import annotations

import torch

_ALL_WEIGHTS = "computes one step size from all weights together"
_IN_BACKWARD = "updates weights inside the backward pass and by a vote of all of them"
_OUTSIDE = "changes weights outside step(), when it goes from training to evaluation"

_REFUSED = {
    "LBFGS": "computes one direction from all weights together",
    "SparseAdam": "takes sparse gradients only",
    "Prodigy": _ALL_WEIGHTS,
    "Prodigy8bit": _ALL_WEIGHTS,
    "ProdigyPlusScheduleFree": _ALL_WEIGHTS,
    "DAdaptAdaGrad": _ALL_WEIGHTS,
    "DAdaptAdam": _ALL_WEIGHTS,
    "DAdaptAdamPreprint": _ALL_WEIGHTS,
    "DAdaptAdan": _ALL_WEIGHTS,
    "DAdaptAdanIP": _ALL_WEIGHTS,
    "DAdaptLion": _ALL_WEIGHTS,
    "DAdaptSGD": _ALL_WEIGHTS,
    "DoG": _ALL_WEIGHTS,
    "LDoG": _ALL_WEIGHTS,
    "DoWG": _ALL_WEIGHTS,
    "Automagic2": _IN_BACKWARD,
    "Automagic3": _IN_BACKWARD,
    "AutomagicEXPERIMENT": _IN_BACKWARD,
    "AdamWScheduleFree": _OUTSIDE,
    "RAdamScheduleFree": _OUTSIDE,
    "SGDScheduleFree": _OUTSIDE,
}


def refusal(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the optimizer cannot be served, or None."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _REFUSED:
            return _REFUSED[kind.__name__]
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "has differentiable=True: a rounding has no gradient"
    if getattr(optimizer, "bf16_stochastic_round", False):
        return "rounds stochastically by itself (bf16_stochastic_round=True)"
    return None
