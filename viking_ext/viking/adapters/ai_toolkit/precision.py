"""The precision that a LoRA network is trained in.

The toolkit trains networks in fp32. In bf16 they take half the memory and their products run several times as fast, and
they learn as well as long as updates are rounded stochastically. So: bf16 where that is sure, fp32 otherwise, and one
line that says which and why.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch

import viking
from viking.adapters.ai_toolkit import settings
from viking.adapters.ai_toolkit.alpha import exact_scales, network_modules
from viking.adapters.ai_toolkit.optimizers import Factory, Verdict, judge_config, let_clipping_see_gradients
from viking.nn.precision import force_to_bf16
from viking.optim.rounding import stochastic_rounding


@dataclass(frozen=True)
class Choice:
    """The dtype of a network, whose rounding makes it safe, and the reason in words."""

    dtype: torch.dtype
    verdict: Verdict | None
    reason: str


def choose(
    optimizer: str,
    parameters: dict[str, Any] | None,
    *,
    device: torch.device,
    network_type: str = "lora",
    offloaded: bool = False,
    mode: str = "auto",
    source: str = "",
    factory: Factory | None = None,
) -> Choice:
    """bf16 or fp32 for a network of `network_type` on `device`, trained by the optimizer that a config names."""
    if mode == "never":
        return Choice(torch.float32, None, f"{source}=never")
    verdict = judge_config(optimizer, parameters, factory)
    if mode == "always":
        return Choice(torch.bfloat16, verdict, f"{source}=always; {verdict.reason}")
    obstacle = _card(device) or _network(network_type)
    if obstacle is None and verdict.rounding == "own" and (offloaded or device.type == "cpu"):
        obstacle = f"{verdict.name} rounds only weights that are on the GPU"
    if obstacle is not None:
        return Choice(torch.float32, verdict, obstacle)
    return Choice(torch.bfloat16 if verdict.safe else torch.float32, verdict, verdict.reason)


def _card(device: torch.device) -> str | None:
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        if torch.version.hip is None and capability < (8, 0):
            return f"{name} has no bf16 arithmetic (compute capability {capability[0]}.{capability[1]}, 8.0 is needed)"
        return None
    return None if device.type == "cpu" else f"bf16 is not proven on {device.type}"


def _network(network_type: str) -> str | None:
    kind = network_type.lower()
    if kind == "dora":
        return "DoRA's magnitudes are compared with norms, and bf16 would change the weights it starts from"
    if kind in ("locon", "lycoris", "lorm"):
        return f"networks of type {kind} are not proven in bf16"
    return None


def network_ready(process: Any) -> None:
    """In place of the toolkit's `network.force_to(device, dtype=torch.float32)`: the network gets its precision and
    goes to its device. `process` is the toolkit's training process; says in one line what it has chosen."""
    network = process.network
    if not settings.active():
        network.force_to(process.device_torch, dtype=torch.float32)
        print("Viking is off (VIKING in the environment): ai-toolkit as it is")
        return
    config, train = process.network_config, process.train_config
    mode, source = settings.bf16_mode(config)
    choice = choose(
        train.optimizer,
        train.optimizer_params,
        device=torch.device(process.device_torch),
        network_type=getattr(config, "type", "lora"),
        offloaded=bool(getattr(config, "layer_offloading", False)),
        mode=mode,
        source=source,
    )
    process.viking_choice = choice
    if choice.dtype == torch.bfloat16:
        # Parameters only: alpha and scale are buffers, and 1/3 is not a bf16 number.
        force_to_bf16(network)
        network.force_to(process.device_torch, dtype=None)
        for module in network_modules(network):
            exact_scales(module)
    else:
        network.force_to(process.device_torch, dtype=torch.float32)
    name = "bf16" if choice.dtype == torch.bfloat16 else "fp32"
    print(f"Viking is active ({_versions()}): the network is trained in {name}: {choice.reason}")


def optimizer_ready(process: Any, optimizer: Any) -> None:
    """The job's optimizer has been built: where its bf16 weights need it, Viking rounds for it."""
    choice: Choice | None = getattr(process, "viking_choice", None)
    if choice is None or choice.dtype != torch.bfloat16 or choice.verdict is None:
        return
    if choice.verdict.rounding == "viking":
        stochastic_rounding(optimizer)
    elif choice.verdict.rounding == "own" and let_clipping_see_gradients(optimizer):
        print(f"Viking: {choice.verdict.name} leaves gradients where clipping (max_grad_norm) finds them")


def multiplier_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a network's multiplier, given that of its weights: a strength of 0.7 is not a bf16 number."""
    return torch.promote_types(dtype, torch.float32) if settings.active() else dtype


def _versions() -> str:
    try:
        toolkit = importlib.import_module("version").VERSION
    except (ImportError, AttributeError):
        toolkit = "of an unknown version"
    return f"Viking {viking.__version__}, ai-toolkit {toolkit}, torch {torch.__version__}"
