"""What is on this machine that matters to Viking, section by section.

A section is a function that returns plain data. Whatever is missing or broken is an answer: a section that fails holds
its failure under "problem", and the others go on.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import viking
from viking.machine import control_group_limit, host_memory, text_of
from viking.patch.command import Status, status
from viking.patch.diff import PatchError

Section = dict[str, Any]

# ---- versions ----


def package() -> Section:
    """Viking itself, and whether its engine can be loaded."""
    result: Section = {"version": viking.__version__, "path": str(Path(viking.__file__).resolve().parent)}
    try:
        from viking import _engine
    except ImportError as error:
        return result | {"engine": None, "problem": f"the engine cannot be loaded ({error}): pip install it again"}
    return result | {"engine": _engine.__file__}


def python() -> Section:
    """The interpreter and the system."""
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
        "wsl": is_wsl(),
    }


def is_wsl() -> bool:
    """Whether this is Linux inside Windows, where little memory can be pinned."""
    return "microsoft" in text_of("/proc/sys/kernel/osrelease").lower()


def torch() -> Section:
    """The torch that Viking would work with."""
    try:
        import torch
    except (ImportError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return {
            "version": None,
            "problem": "torch is not installed" if missing else f"torch cannot be loaded: {error}",
        }
    return {
        "version": torch.__version__,
        "path": str(Path(torch.__file__).resolve().parent),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "cuda_available": bool(torch.cuda.is_available()),
        "exchange_api": hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    }


# ---- devices ----


def _version(number: int | None) -> str | None:
    """13000 is CUDA 13.0."""
    return None if not number else f"{number // 1000}.{number % 1000 // 10}"


def cuda() -> Section:
    """The CUDA runtime that the engine finds (torch's own where torch is loaded), the driver, and the devices."""
    from viking import _engine

    found = _engine.survey()
    result: Section = {
        "library": found["library"],
        "runtime": _version(found["runtime"]),
        "driver_serves": _version(found["driver"]),
        "driver": _driver(),
        "devices": _devices() if found["devices"] else [],
    }
    return result | ({"problem": found["problem"]} if found["problem"] else {})


def _driver() -> str | None:
    """The driver's own version, such as 580.95.05."""
    for word in text_of("/proc/driver/nvidia/version").split():
        if word[:1].isdigit() and "." in word:
            return word
    return None


def _devices() -> list[Section]:
    """The devices as torch sees them; sizes in bytes."""
    try:
        import torch

        if not torch.cuda.is_available():
            return []
        devices = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            capability = f"{properties.major}.{properties.minor}"
            devices.append(
                {"name": properties.name, "capability": capability, "free_bytes": free, "total_bytes": total}
            )
        return devices
    except (ImportError, OSError, RuntimeError):
        return []


def processor() -> Section:
    """The processor, and how the engine converts on it."""
    names = [
        line.split(":", 1)[1].strip()
        for line in text_of("/proc/cpuinfo").splitlines()
        if line.startswith(("model name", "Model"))
    ]
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    result: Section = {"name": names[0] if names else platform.processor() or platform.machine(), "usable": count}
    from viking import _engine

    return result | {"convert": _engine.survey()["convert"]}


# ---- memory ----


def memory() -> Section:
    """Host memory and its limits, in bytes; None is no limit, or not known."""
    known = host_memory()
    locked: int | None = None
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked = None if soft == resource.RLIM_INFINITY else soft
    except (ImportError, OSError, ValueError, AttributeError):
        pass
    return {
        "total_bytes": known.get("MemTotal"),
        "available_bytes": known.get("MemAvailable"),
        "swap_bytes": known.get("SwapTotal"),
        "cgroup_limit_bytes": control_group_limit(),
        "memlock_bytes": locked,
        "huge_pages": text_of("/sys/kernel/mm/transparent_hugepage/enabled") or None,
    }


# ---- patches ----


def _patches(found: Status) -> Section:
    return {
        "root": str(found.root),
        "patched": found.patched,
        "patches": {each.patch.name: each.state.value for each in found.verdicts},
        "details": {each.patch.name: each.detail for each in found.verdicts if each.detail},
    }


def ai_toolkit(root: str | None = None) -> Section:
    """The ai-toolkit checkout at `root`, or in the current directory: is it patched?"""
    try:
        found = status("ai-toolkit", root)
    except PatchError as error:
        return {"root": None, "patched": False, "problem": str(error)}
    version = text_of(found.root / "version.py").partition("=")[2].strip().strip("\"'")
    return _patches(found) | {"version": version or None}


def torch_patches() -> Section:
    """This Python's torch: which of the optional patches are in it?"""
    try:
        return _patches(status("torch"))
    except PatchError as error:
        return {"root": None, "patched": False, "problem": str(error)}


def survey(root: str | None = None) -> dict[str, Section]:
    """Every section, in the order in which a person reads them. torch comes before CUDA: its runtime is the one that
    Viking uses."""
    sections: dict[str, Callable[[], Section]] = {
        "viking": package,
        "python": python,
        "torch": torch,
        "cuda": cuda,
        "processor": processor,
        "memory": memory,
        "ai_toolkit": lambda: ai_toolkit(root),
        "torch_patches": torch_patches,
    }
    result = {}
    for name, section in sections.items():
        try:
            result[name] = section()
        except Exception as error:  # a doctor that falls ill helps nobody
            result[name] = {"problem": f"could not be looked at: {type(error).__name__}: {error}"}
    return result
