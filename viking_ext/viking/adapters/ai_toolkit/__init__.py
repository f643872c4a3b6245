"""ostris/ai-toolkit: what the patches of `patches/ai-toolkit/` call.

The patched lines are as few as they can be; what they do is here. Every function below does nothing, and the toolkit
what it does without Viking, bit for bit, while the environment variable VIKING says `off`.

    network_ready(process)            the network is built, nothing hangs in the model yet: choose its precision
    optimizer_ready(process, opt)     the optimizer is built: stochastic rounding where it has none
    keeps_alpha(network)              a network is being built: whether its alpha is what the config says
    before_save(network, tensors)     `.alpha` goes into the file
    before_load(network, file, load)  the file's alpha comes back, and the scale with it
    multiplier_dtype(dtype)           the strength of a network stays exact
"""

from __future__ import annotations

from viking.adapters.ai_toolkit.alpha import before_load, before_save, keeps_alpha
from viking.adapters.ai_toolkit.precision import multiplier_dtype, network_ready, optimizer_ready

__all__ = ["before_load", "before_save", "keeps_alpha", "multiplier_dtype", "network_ready", "optimizer_ready"]
