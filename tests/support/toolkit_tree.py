"""ai-toolkit's own classes, imported from a tree without installing what the toolkit needs.

The tree is named by VIKING_AI_TOOLKIT. It is copied, patched with `python -m viking.patch`, and put on sys.path;
packages that the classes under test only mention (quantisers, video readers ...) and that are not here are replaced by
empty ones whose every attribute is a class that nothing is an instance of.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "VIKING_AI_TOOLKIT"


class _Nothing(type):
    """A class of which every attribute is one more of its kind."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _EmptyPackage(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Nothing(name, (), {})
        setattr(self, name, made)
        return made


class _EmptyPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on sys.meta_path: asked only for what nobody else has."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyPackage(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


# fmt: off
MENTIONED = (
    "albumentations", "av", "controlnet_aux", "cv2", "einops", "flatten_json",
    "hqq", "invisible_watermark", "k_diffusion", "kornia", "librosa", "lpips",
    "lycoris", "matplotlib", "open_clip", "optimum", "oyaml", "pytorch_wavelets",
    "pywt", "scipy", "soundfile", "tensorboard", "timm", "torchao",
    "torchaudio", "torchcodec", "torchvision",
)
# fmt: on


def tree() -> Path | None:
    """The tree that the environment names, or None."""
    value = os.environ.get(VARIABLE)
    return Path(value).resolve() if value else None


def patched_copy(source: Path, destination: Path, *, patch: bool = True) -> Path:
    """A copy of the tree's Python files, patched."""
    for name in ("toolkit", "jobs", "extensions_built_in", "config"):
        if (source / name).is_dir():
            shutil.copytree(source / name, destination / name, ignore=shutil.ignore_patterns("*.safetensors", "*.png"))
    for name in ("run.py", "version.py", "info.py"):
        if (source / name).is_file():
            shutil.copy(source / name, destination / name)
    if patch:
        done = subprocess.run(
            [sys.executable, "-m", "viking.patch", "apply", "ai-toolkit", "--root", str(destination)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return destination


def enter(root: Path) -> None:
    """Make the tree's `toolkit` importable."""
    for name in ("diffusers", "transformers", "peft"):  # these look around for what is installed: before the empty ones
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    importlib.import_module("diffusers.models")
    absent = [name for name in MENTIONED if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_EmptyPackages(absent))
    sys.path.insert(0, str(root))
