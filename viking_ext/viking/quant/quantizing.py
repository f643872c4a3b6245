"""Turning a model's Linears into 8-bit ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from viking._engine import encode_8bit, row_with_nan, trim
from viking.nn.eligible import judge
from viking.nn.storage import group, span_bytes
from viking.quant.formats import Format, find
from viking.quant.linear import Linear
from viking.quant.weight import QuantizedWeight

#: Smaller weights stay as they are: together they are few bytes, and the layers that have them are often sensitive.
SMALLEST_ELEMENTS = 64 << 10
#: Freed host memory is given back each time this much was quantised.
TRIM_INTERVAL_BYTES = 256 << 20


@dataclass(frozen=True)
class QuantizedLayer:
    """One Linear; tied ones are listed one by one, their bytes with the first."""

    name: str
    relative_error: float  # Frobenius norm of what quantising changed over that of the weight
    bytes_before: int  # of the weight
    bytes_after: int  # of codes and scales


@dataclass(frozen=True)
class QuantizationReport:
    """What :func:`viking.quantize_` did; printed, a short table."""

    format: str
    layers: list[QuantizedLayer]
    kept: dict[str, str] = field(repr=False)  # Linears that stayed as they are: name and reason

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def worst(self) -> QuantizedLayer | None:
        """The layer with the largest error; None where nothing was quantised."""
        return max(self.layers, key=lambda layer: layer.relative_error, default=None)

    def __str__(self) -> str:
        if self.worst is None:
            return f"{self.format}: no layer was quantised, {len(self.kept)} Linears stay as they are"
        worst = sorted(self.layers, key=lambda layer: layer.relative_error, reverse=True)[:5]
        width = max(len(layer.name) for layer in worst)
        lines = [
            f"{self.format}: {len(self.layers)} layers, {self.bytes_before / 1e9:.2f} GB -> "
            f"{self.bytes_after / 1e9:.2f} GB; {len(self.kept)} Linears stay as they are",
            "relative error of the weights, worst first:",
            *(f"  {layer.name:<{width}}  {100 * layer.relative_error:.2f} %" for layer in worst),
        ]
        return "\n".join(lines)


def quantize_(
    model: nn.Module,
    format: str,
    ignore: Iterable[nn.Module | torch.Tensor] = (),
    scale: bool | None = None,
) -> QuantizationReport:
    """Keep the model's frozen Linear weights in one byte per element, in place, on the CPU, before `viking.attach`.

    Rounds to nearest, ties to even, and saturates (NaN stays NaN where the format has one). Modules and parameters keep
    their identity and their ties; `weight.dtype` stays the type that the layer computes in. Each weight's memory is
    given back before the next one is quantised, if nobody else holds it. The model runs as before, on any device,
    attached or not, and its state_dict holds ordinary 8-bit tensors.

    Args:
        model: its Linears in fp32, bf16 or fp16 that are frozen, plain and of 64 Ki elements or more are quantised.
        format: "float8_e4m3fn", "float8_e5m2" ("bf8" is the same) or "int8".
        ignore: modules and parameters to leave as they are.
        scale: whether each output row gets a scale in fp32. By default "float8_e4m3fn" and "int8", which need it, have
            it, and "float8_e5m2" has not.

    Returns:
        What was done and how well, layer by layer.

    Raises:
        ValueError: an unknown format; a format that needs its scale without it; a weight on another device than the
            CPU; a NaN where the format is int8 (the message names layer and row).
        RuntimeError: the model is attached.

    The model is untouched after one of these.

    >>> print(viking.quantize_(transformer, "float8_e4m3fn"))
    float8_e4m3fn: 160 layers, 62.81 GB -> 31.42 GB; 9 Linears stay as they are
    """
    chosen = find(format)
    scaled = chosen.scaled if scale is None else scale
    if chosen.needs_scale and not scaled:
        raise ValueError(f"{chosen.name} needs a scale for each row: its range is too small for a weight's")
    names, kept = _choose(model, ignore)
    if chosen.dtype == torch.int8:
        _refuse_nan(names)
    return QuantizationReport(chosen.name, _quantize(names, chosen, scaled), kept)


def _choose(
    model: nn.Module, ignore: Iterable[nn.Module | torch.Tensor]
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The Linears to quantise, by name, and why the others are not."""
    if any(key in m.__dict__ for m in model.modules() for key in ("_memory_manager", "_layer_memory_manager")):
        raise RuntimeError("this model is attached: quantise it before viking.attach, or after viking.detach(model)")
    ignored = {id(m) for item in ignore for m in (item.modules() if isinstance(item, nn.Module) else (item,))}
    chosen: dict[str, nn.Linear] = {}
    kept: dict[str, str] = {}
    for verdict in judge(model, ignored, torch.device("cpu")):
        reason = verdict.reason or _why_not(verdict.module)
        if reason:
            kept[verdict.name] = reason
        else:
            assert isinstance(verdict.module, nn.Linear)
            chosen[verdict.name] = verdict.module
    overlapping: set[nn.Module] = set()
    for weight in group(list(chosen.values())):
        by_segment = [id(place.segment) for place in weight.places.values()]
        if len(set(by_segment)) != len(by_segment):
            overlapping.update(weight.modules)
    for name, module in list(chosen.items()):
        if module in overlapping:
            kept[name] = "its memory is shared with another parameter"
            del chosen[name]
        elif module.weight.device.type != "cpu":
            raise ValueError(f"{name}.weight is on {module.weight.device}: move the model to the CPU to quantise it")
    return chosen, kept


def _why_not(module: nn.Module) -> str:
    if isinstance(module, Linear):
        return "it is quantised"
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}"
    return "it is small" if module.weight.numel() < SMALLEST_ELEMENTS else ""


def _refuse_nan(chosen: dict[str, nn.Linear]) -> None:
    for name, module in chosen.items():
        row = row_with_nan(module.weight.detach().contiguous())
        if row is not None:
            raise ValueError(f"{name}.weight holds a NaN in row {row}, which int8 has no code for: mend or ignore it")


@torch.inference_mode(False)
@torch.no_grad()
def _quantize(chosen: dict[str, nn.Linear], to: Format, scaled: bool) -> list[QuantizedLayer]:
    layers: list[QuantizedLayer] = []
    errors: dict[int, float] = {}  # by id of a weight that is done
    pending = 0
    for name, module in chosen.items():
        weight = module._parameters["weight"]
        assert weight is not None
        before = after = 0
        if id(weight) not in errors:
            before = span_bytes(weight)
            codes = torch.empty(weight.shape, dtype=torch.uint8)
            scale = torch.empty(weight.shape[0]) if scaled else None
            errors[id(weight)] = encode_8bit(weight.detach().contiguous(), to.name, codes, scale)
            QuantizedWeight.take_over(weight, codes.view(to.dtype), scale)
            after = codes.numel() + (0 if scale is None else 4 * scale.numel())
            pending += before
            if pending >= TRIM_INTERVAL_BYTES:
                trim()  # what is free may be smaller than what the C library gives back by itself
                pending = 0
        Linear.take_over(module)
        layers.append(QuantizedLayer(name, errors[id(weight)], before, after))
    trim()
    return layers
