"""Train models whose weights do not fit on the card: weights stream from host memory, planned ahead.

    import viking

    model = viking.attach(model, "cuda", vram="20GiB")
    ...  # train as before
    viking.detach(model)

Importing this package imports neither torch nor CUDA; each name below brings what it needs when it is first used.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

# Not typing's, which would have to be imported: commands are run inside other projects' trees, and until their first
# line has run a `typing.py` there comes before the standard library's.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from viking._engine import LinearLayerMemoryManager
    from viking.lora.fusing import FusionReport, fuse_lora, unfuse_lora
    from viking.nn.attaching import attach, detach, editing, refresh
    from viking.nn.managing import MemoryManager
    from viking.nn.precision import force_to_bf16
    from viking.nn.report import Stats, WeightStats, stats
    from viking.optim.rounding import stochastic_rounding
    from viking.quant.quantizing import QuantizationReport, quantize_

_HOMES = {
    "attach": "viking.nn.attaching",
    "detach": "viking.nn.attaching",
    "editing": "viking.nn.attaching",
    "refresh": "viking.nn.attaching",
    "MemoryManager": "viking.nn.managing",
    "force_to_bf16": "viking.nn.precision",
    "fuse_lora": "viking.lora.fusing",
    "unfuse_lora": "viking.lora.fusing",
    "quantize_": "viking.quant.quantizing",
    "stats": "viking.nn.report",
    "stochastic_rounding": "viking.optim.rounding",
    "Stats": "viking.nn.report",
    "WeightStats": "viking.nn.report",
    "QuantizationReport": "viking.quant.quantizing",
    "FusionReport": "viking.lora.fusing",
    "LinearLayerMemoryManager": "viking._engine",
}

__all__ = [
    "FusionReport",
    "LinearLayerMemoryManager",
    "MemoryManager",
    "QuantizationReport",
    "Stats",
    "WeightStats",
    "attach",
    "detach",
    "editing",
    "force_to_bf16",
    "fuse_lora",
    "quantize_",
    "refresh",
    "stats",
    "stochastic_rounding",
    "unfuse_lora",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'viking' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"viking.{name} works on torch models and torch is not installed: pip install torch (2.4 or later)",
            name="torch",
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
