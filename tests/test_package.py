"""What an installation consists of."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
import sysconfig
from importlib import metadata, resources

import pytest

import viking
import viking._engine


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_importing_viking_imports_no_torch() -> None:
    result = python("import sys, viking, viking._engine; print(sorted({'torch', 'numpy'} & set(sys.modules)))")
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "[]", "")


def test_attach_without_torch_says_in_one_sentence_what_to_install() -> None:
    result = python("import sys; sys.modules['torch'] = None\nimport viking; viking.attach(None, 'cpu')")
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1
    assert "ModuleNotFoundError" in last
    assert "pip install torch" in last


def test_torch_is_no_dependency() -> None:
    needed = [line for line in metadata.requires("viking-engine") or [] if "extra ==" not in line]
    assert needed == []


def test_the_version_is_the_one_of_the_installed_distribution() -> None:
    assert viking.__version__ == metadata.version("viking-engine")


def test_patches_are_installed_as_package_data() -> None:
    assert "manifest" in (resources.files("viking.patches") / "README.md").read_text(encoding="utf-8")


@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="free-threaded Python has no limited API")
def test_the_engine_is_built_for_every_python_from_3_11_on() -> None:
    assert ".abi3." in viking._engine.__file__
    assert any(viking._engine.__file__.endswith(suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES)
