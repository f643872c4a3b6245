"""What the patched files of torch call: `python -m viking.patch list torch` shows them, docs/torch-patches.md explains.

torch imports this module while it is being imported itself, so nothing of torch may be needed here at import time.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from typing import Any

from viking.units import parse_bytes

# ---- torch/cuda/_device_limits.py ----

#: Fused multiply-adds per clock and multiprocessor, from the peaks that NVIDIA publishes (docs/torch-patches.md holds
#: the arithmetic). Tensor cores: those of RTX workstation and data-centre cards, dense. GeForce cards of the same
#: chips accumulate fp16, bf16 and tf32 products in fp32 at half of it, and fp32 is what torch accumulates in.
_CUDA_CORES = {
    75: {"fp16": 128, "fp32": 64, "fp64": 2},
    86: {"fp16": 128, "fp32": 128, "fp64": 2},
    89: {"fp16": 128, "fp32": 128, "fp64": 2},
    120: {"fp16": 128, "fp32": 128, "fp64": 2},
}
_TENSOR_CORES = {
    75: {"fp16": 512, "int8": 1024},
    86: {"fp16": 512, "fp32": 256, "int8": 1024},
    89: {"fp16": 512, "fp32": 256, "int8": 1024},
    120: {"fp16": 512, "fp32": 256, "int8": 1024},
}
_FIRST_WITH_BF16 = 80


def cuda_core_rates(limits: Any) -> dict[str, int]:
    """Entries for torch's table of CUDA core rates, for the card that `limits` (a GPULimits) is about."""
    capability = limits.compute_capability
    return {f"{kind}_{capability}": rate for kind, rate in _CUDA_CORES.get(capability, {}).items()}


def tensor_core_rates(limits: Any, data_type: Any) -> dict[str, int]:
    """Entries for torch's table of tensor core rates, for the card that `limits` is about and the asked dtype."""
    capability, name = limits.compute_capability, str(getattr(limits.device_properties, "name", ""))
    if capability == 75 and not re.search(r"\bRTX\b|\bT4\b", name):  # GTX 16 and small Quadros: without tensor cores
        return {}
    if capability < _FIRST_WITH_BF16 and str(data_type) == "torch.bfloat16":  # torch looks it up as fp16
        return {}
    half = "GeForce" in name
    return {
        f"{kind}_{capability}": rate // 2 if half and kind != "int8" else rate
        for kind, rate in _TENSOR_CORES.get(capability, {}).items()
    }


# ---- torch/cuda/streams.py ----


def stream_priority(kwargs: dict[str, Any]) -> int:
    """The priority of a stream that is made without one: VIKING_STREAM_PRIORITY, else 0 as torch has it.

    A stream that exists already (wrapped by handle or by id) keeps its own. Raises ValueError where the variable is
    no whole number.
    """
    text = os.environ.get("VIKING_STREAM_PRIORITY", "").strip()
    if not text or kwargs:
        return 0
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"VIKING_STREAM_PRIORITY: {text!r} is no whole number (-1 is high, 0 normal)") from None


# ---- torch/cuda/_pin_memory_utils.py ----

_PORTABLE = 1
_DEFAULT_CHUNK = 64 << 30
_PAGE = 4096
_MEANINGS = {
    1: "invalid argument: no such host memory, or a part of it",
    2: "out of memory: the driver cannot lock that much, whatever the VRAM; WSL and Windows have low limits",
    712: "that memory, or a page of it, is registered already",
    713: "that memory is not registered",
    801: "this system cannot register host memory",
}

_lock = threading.Lock()
_chunks: dict[int, list[int]] = {}  # first address: the addresses registered for it, if they are more than that one


def _describe(code: int) -> str:
    meaning = _MEANINGS.get(
        code, "most likely the error of earlier work on the device, run with CUDA_LAUNCH_BLOCKING=1 to find it"
    )
    return f"cudaError {code} ({meaning})"


def _loaded_runtime() -> Any | None:
    """The CUDA runtime that this process has loaded, as a ctypes library; None where it cannot be told."""
    noload = getattr(os, "RTLD_NOLOAD", None)
    if noload is None or sys.platform != "linux":
        return None
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            names = {line.split(maxsplit=5)[5].strip() for line in maps if "libcudart" in line}
        for name in sorted(names):
            return ctypes.CDLL(name, mode=noload | os.RTLD_LAZY)
    except (OSError, IndexError):
        pass
    return None


def _clear_error() -> None:
    """Take back the error that a failed call leaves behind, or the next kernel launch would report it as its own."""
    runtime = _loaded_runtime()
    if runtime is not None and hasattr(runtime, "cudaGetLastError"):
        runtime.cudaGetLastError()


def _register(cudart: Any, address: int, size: int) -> int:
    code = int(cudart.cudaHostRegister(address, size, _PORTABLE))
    if code != 0:
        _clear_error()
    return code


def _unregister(cudart: Any, address: int) -> int:
    code = int(cudart.cudaHostUnregister(address))
    if code != 0:
        _clear_error()
    return code


def _chunk_bytes() -> int:
    """How long one registration may be where one for everything fails, in whole pages."""
    text = os.environ.get("VIKING_PIN_CHUNK")
    chunk = parse_bytes(text, "VIKING_PIN_CHUNK") if text else _DEFAULT_CHUNK
    return max(_PAGE, chunk // _PAGE * _PAGE)


def pin_memory(data_ptr: int, size: int) -> None:
    """Register host memory with CUDA: in one piece, or where that fails for a large one in chunks; all or nothing.

    Chunks end on multiples of the chunk size, so that no two share a page. A single copy may not span two of them.
    Raises RuntimeError that says what failed; no part is registered then and CUDA's last error is clear.
    """
    import torch

    cudart = torch.cuda.cudart()
    first = _register(cudart, data_ptr, size)
    if first == 0:
        return
    chunk = _chunk_bytes()
    if size <= chunk or first == 712:
        raise RuntimeError(f"registering {size} bytes at {data_ptr:#x} failed: {_describe(first)}")
    done: list[int] = []
    at, end = data_ptr, data_ptr + size
    while at < end:
        stop = min(end, (at // chunk + 1) * chunk)
        code = _register(cudart, at, stop - at)
        if code != 0:
            stuck = [address for address in reversed(done) if _unregister(cudart, address) != 0]
            raise RuntimeError(
                f"registering {size} bytes at {data_ptr:#x} failed in one piece ({_describe(first)}) and, after "
                f"{at - data_ptr} bytes, in chunks of {chunk}: {_describe(code)}"
                + (f"; {len(stuck)} chunks could not be released" if stuck else "")
            )
        done.append(at)
        at = stop
    with _lock:
        _chunks[data_ptr] = done


def unpin_memory(data_ptr: int) -> None:
    """Undo :func:`pin_memory`. Raises AssertionError, as torch does, when every chunk has been tried."""
    import torch

    cudart = torch.cuda.cudart()
    with _lock:
        addresses = _chunks.pop(data_ptr, [data_ptr])
    codes = [_unregister(cudart, address) for address in reversed(addresses)]
    failed = [code for code in codes if code != 0]
    if failed:
        raise AssertionError(
            f"unregistering the memory at {data_ptr:#x} failed for {len(failed)} of {len(codes)} registrations: "
            f"{_describe(failed[0])}"
        )
