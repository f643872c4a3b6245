"""Alpha: the strength of a LoRA is alpha / rank, here and in every program that loads the file.

The toolkit computes it so, except in the file format of PEFT (all transformers: FLUX, Wan, Qwen ...), where it sets
alpha to the rank and writes none, and except on load, where it fills in a file's alpha and goes on with the old scale.
Here:

- An alpha that stands in the config is honoured. One that does not is what the toolkit makes of it: its default is 1,
  and honouring that would weaken every job that never asked.
- `.alpha` is written in fp32 beside every LoRA of the network as soon as one of them has a strength other than 1, so
  that alpha / rank gives the same number back. A file without `.alpha` means alpha = rank, as it does everywhere.
- On load a file's alpha wins over the config's: a resumed or foreign LoRA keeps the strength it was trained at. A file
  of another rank keeps it too, alpha follows the rank.
- DoRA and full-rank modules keep the strength 1 that they have; LoKr modules with two whole factors have none.
- `network.viking_rank_stabilized: true` makes the strength alpha / sqrt(rank); alpha in the file is then
  alpha * sqrt(rank), so that who computes alpha / rank gets it right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from viking.adapters.ai_toolkit import settings

Tensors = MutableMapping[str, torch.Tensor]

_ALPHA = ".alpha"


def network_modules(network: Any) -> list[Any]:
    """The LoRA modules of a network, which are not always its children."""
    return [*getattr(network, "unet_loras", []), *getattr(network, "text_encoder_loras", [])]


def _kind(network: Any) -> str:
    return str(getattr(network, "network_type", "lora")).lower()


def _has_strength(module: Any) -> bool:
    """Whether alpha / rank means something for the module: not for DoRA, full weights and LoKr with whole factors."""
    if not isinstance(getattr(module, "alpha", None), torch.Tensor) or getattr(module, "full_rank", False):
        return False
    return not (getattr(module, "use_w1", False) and getattr(module, "use_w2", False))


def _fp32(value: float) -> float:
    """The number that a file keeps. Computing with it from the start, a reloaded strength is the same to the bit."""
    return float(torch.tensor(value, dtype=torch.float32))


def _set_strength(module: Any, alpha: float) -> None:
    alpha = _fp32(alpha)
    if float(module.alpha) != alpha:
        module.alpha = torch.tensor(alpha, dtype=torch.float32, device=module.alpha.device)  # the buffer may be of ints
    scale = alpha / module.lora_dim
    if hasattr(module, "_set_runtime_scale"):
        module._set_runtime_scale(scale)
        exact_scales(module)
    else:
        module.scale = scale


def exact_scales(module: Any) -> None:
    """Keep a plain LoRA's scale exact in bf16: a GPU multiplies a bf16 tensor by a scalar tensor in bf16, but by one
    with a dimension in fp32. Only where bf16 cannot hold the scale, because the fp32 product costs memory traffic."""
    scale = getattr(module, "_runtime_scale", None)
    if scale is None:
        return
    if scale.dtype != torch.float32:  # somebody has cast the whole module
        scale = module._runtime_scale = torch.full_like(scale, module.scale, dtype=torch.float32)
    down = getattr(module, "lora_down", None)
    if down is None or getattr(down, "weight", None) is None or scale.dim() != 0:
        return
    rounded = float(torch.tensor(float(module.scale)).to(torch.bfloat16))
    if down.weight.dtype == torch.bfloat16 and rounded != float(module.scale):
        module._runtime_scale = scale.reshape(1)


# ---- building ----


def keeps_alpha(network: Any) -> bool:
    """Called while a network is built, before its modules are: sets `network.alpha` and `network.conv_alpha` to what
    the modules are to have. True: they stay; False: the toolkit goes on, and in PEFT's format sets them to the ranks.
    """
    if not settings.active():
        return False
    explicit = _explicit(network)
    if _kind(network) in ("dora", "fullrank"):
        if explicit and network.peft_format and network.alpha != network.lora_dim:
            print(f"Viking: alpha has no effect in a network of type {network.network_type}")
        return False
    stabilized = settings.rank_stabilized(getattr(network, "network_config", None))
    if not explicit:
        if stabilized:
            print("Viking: viking_rank_stabilized needs a linear_alpha or conv_alpha in the config; there is none")
        return False
    for half, alpha, rank in (("linear", "alpha", "lora_dim"), ("conv", "conv_alpha", "conv_lora_dim")):
        value, size = getattr(network, alpha), getattr(network, rank)
        if half in explicit and value:  # 0 and null mean the rank, as the modules have it
            setattr(network, alpha, _fp32(value * math.sqrt(size)) if stabilized else _exact(value))
        elif network.peft_format:
            setattr(network, alpha, size)
    if network.peft_format and network.lora_dim and network.alpha != network.lora_dim:
        root = "sqrt(rank)" if stabilized else "rank"
        print(
            f"Viking: LoRA strength is {float(network.alpha) / network.lora_dim:.6g} (linear alpha / {root}, rank "
            f"{network.lora_dim}); without Viking it is 1"
        )
    return True


def _exact(value: float) -> float:
    return value if isinstance(value, int) and abs(value) <= 1 << 24 else _fp32(value)


def _explicit(network: Any) -> set[str]:
    """Which of "linear" and "conv" have an alpha that somebody asked for."""
    given = settings.given(getattr(network, "network_config", None))
    if given is not None:
        linear, conv = bool({"alpha", "linear_alpha"} & set(given)), "conv_alpha" in given
    else:  # a network that is built by other code: what it passes, unless that is the default
        linear, conv = network.alpha not in (None, 0, 1), network.conv_alpha is not None
    return {name for name, there in (("linear", linear), ("conv", conv and bool(network.conv_lora_dim))) if there}


# ---- saving ----


def before_save(network: Any, tensors: Tensors) -> Tensors:
    """Called with the tensors of a file, named as the network names them (PEFT's names in PEFT's format), before the
    model renames them: adds `.alpha`, or takes the strength into lora_B."""
    if not settings.active():
        return tensors
    modules = [module for module in network_modules(network) if _has_strength(module)]
    if not network.peft_format or _kind(network) == "lokr":
        _exact_alphas(network, modules, tensors)
        return tensors
    if all(module.scale == 1.0 for module in modules):
        return tensors
    with_alpha = dict(tensors)
    for module in modules:
        name = module.lora_name.replace("$$", ".")
        if f"{name}.lora_A.weight" in tensors:
            with_alpha[name + _ALPHA] = module.alpha.detach().to("cpu", torch.float32)
    if settings.alpha_format(network.network_config) == "baked" or not _survives(network, with_alpha):
        return bake(with_alpha)
    return with_alpha


def _exact_alphas(network: Any, modules: list[Any], tensors: Tensors) -> None:
    """The toolkit writes alpha in the file's dtype; where that changes it, fp32 replaces it."""
    keymap = (network.get_keymap() or {}) if hasattr(network, "get_keymap") else {}
    saved_as = {ours: theirs for theirs, ours in keymap.items()}
    for module in modules:
        own = module.lora_name + _ALPHA
        for key in (saved_as.get(own, own), own.replace("$$", ".")):
            if key in tensors and float(tensors[key]) != float(module.alpha):
                tensors[key] = module.alpha.detach().to("cpu", torch.float32)


def _survives(network: Any, tensors: Tensors) -> bool:
    """Whether `.alpha` comes through the model's own renaming and back; a few models know the weights' names only."""
    reference = getattr(network, "base_model_ref", None)
    model = reference() if reference is not None else None
    if model is None:
        return True
    try:
        back = model.convert_lora_weights_before_load(dict(model.convert_lora_weights_before_save(dict(tensors))))
        lost = {key for key in tensors if key.endswith(_ALPHA)} - set(back)
    except Exception as error:
        lost, back = {str(error)}, {}
    if lost:
        print(f"Viking: {type(model).__name__} does not keep .alpha in its files: the strength goes into lora_B")
    return not lost


def bake(tensors: Tensors) -> Tensors:
    """The same strength without `.alpha`: lora_B is multiplied by alpha / rank (in fp32, then rounded once: exact only
    for powers of two). For programs that read no `.alpha`."""
    result = {key: value for key, value in tensors.items() if not key.endswith(_ALPHA)}
    for key, alpha in tensors.items():
        if key.endswith(_ALPHA):
            down, up = (key.removesuffix(_ALPHA) + suffix for suffix in (".lora_A.weight", ".lora_B.weight"))
            if down in result and up in result:
                scale = float(alpha) / result[down].shape[0]
                result[up] = (result[up].float() * scale).to(result[up].dtype)
    return result


# ---- loading ----


def before_load(network: Any, file: Tensors, load: Tensors) -> None:
    """Called with a file's tensors, as the model names them, and with what is about to be loaded, by the network's
    names: sets every module's alpha and scale to the file's, and finds DoRA's magnitudes their names again."""
    if not settings.active():
        return
    if network.peft_format:
        for key in [key for key in load if key.endswith("$$magnitude")]:
            load[key.removesuffix("$$magnitude") + ".magnitude"] = load.pop(key)
    changed = []
    for module in network_modules(network):
        rank = _file_rank(module, load)
        in_file = _take_alpha(module, network, file, load)
        if rank is None or not _has_strength(module):
            continue
        strength = 1.0 if in_file is None else in_file / rank
        if not math.isfinite(strength):
            continue
        before = module.scale
        _set_strength(
            module, in_file if in_file is not None and rank == module.lora_dim else strength * module.lora_dim
        )
        if abs(module.scale - before) > 1e-6 * abs(before):
            changed.append((module, before, in_file, rank))
    if changed:
        module, before, in_file, rank = changed[0]
        what = f"alpha {in_file:.6g}" if in_file is not None else "no alpha, which means alpha = rank,"
        print(
            f"Viking: {len(changed)} LoRA modules have the file's strength {module.scale:.6g} ({what} at rank {rank}) "
            f"and not the {before:.6g} that they were built with"
        )


def _names(module: Any, network: Any) -> Iterator[str]:
    yield module.lora_name
    if network.peft_format:
        yield module.lora_name.replace("$$", ".")


def _take_alpha(module: Any, network: Any, file: Tensors, load: Tensors) -> float | None:
    """The file's alpha for a module; it is not left for load_state_dict, which would cut it to an int where the buffer
    is one."""
    own = module.lora_name + _ALPHA
    value = load.get(own)
    if _has_strength(module) and own in load:
        del load[own]
    elif not _has_strength(module) and isinstance(getattr(module, "alpha", None), torch.Tensor):
        load.pop(own, None)
    for name in _names(module, network):
        if value is None:
            value = file.get(name + _ALPHA)
    return None if value is None else float(value)


def _file_rank(module: Any, load: Tensors) -> int | None:
    """The rank of a module's weights in what is loaded; None where there are none."""
    name = module.lora_name
    for key, dimension in ((".lora_down.weight", 0), (".lokr_w2_a", 1), (".lokr_w1_a", 1)):
        if name + key in load:
            return int(load[name + key].shape[dimension])
    return None
