"""How the C engine is compiled; everything else about the package stands in pyproject.toml.

The engine needs a C compiler and Python's headers, nothing more: torch and the CUDA runtime are found when it runs.
It is built against the limited API of Python 3.11, so that one wheel serves every later Python. Free-threaded builds
have no limited API before 3.15 and get a wheel of their own.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from glob import glob

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

ROOMS = ("base", "backend", "core", "python")
WINDOWS = sys.platform == "win32"
OTHER_SYSTEM = os.path.join("csrc", "base", "posix.c" if WINDOWS else "windows.c")
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")
# Without -Wpedantic, which refuses the function pointers in CPython's slot tables; csrc/Makefile has it for the rest.
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wstrict-prototypes", "-Wvla", "-Werror"]


class BuildEngine(build_ext):
    """Says in one sentence what is missing, where a compiler's own message would be a page long."""

    def build_extensions(self) -> None:
        command = getattr(self.compiler, "compiler_so", None)
        if command and shutil.which(command[0]) is None:
            raise PlatformError(
                f"Viking's engine is written in C and there is no C compiler here ({command[0]!r} was not found): "
                "install one (Debian, Ubuntu: apt-get install gcc libc6-dev) or name yours in CC, then run pip again."
            )
        headers = sysconfig.get_path("include")
        if not os.path.exists(os.path.join(headers, "Python.h")):
            raise PlatformError(
                f"Python's C headers are not installed (no Python.h in {headers}): install them "
                "(Debian, Ubuntu: apt-get install python3-dev), then run pip again."
            )
        super().build_extensions()


def engine() -> Extension:
    sources = sorted(path for room in ROOMS for path in glob(f"csrc/{room}/*.c"))
    macros: list[tuple[str, str | None]] = [("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else []
    if WINDOWS:
        flags, link = ["/std:c11", "/experimental:c11atomics", "/O2"], []
    else:
        macros.append(("_GNU_SOURCE", None))
        flags, link = ["-std=c11", "-O2", "-fvisibility=hidden", "-pthread"], ["-pthread", "-ldl", "-lm"]
        if os.environ.get("VIKING_WERROR") == "1":
            flags += WARNINGS
    return Extension(
        "viking._engine",
        sources=[path for path in sources if os.path.normpath(path) != OTHER_SYSTEM],
        depends=sorted(glob("csrc/*/*.h")),
        include_dirs=["csrc"],
        define_macros=macros,
        extra_compile_args=flags,
        extra_link_args=link,
        py_limited_api=LIMITED_API,
    )


setup(
    packages=[*find_packages("viking_ext"), "viking.patches"],  # package_dir maps the latter to patches/
    ext_modules=[engine()],
    cmdclass={"build_ext": BuildEngine},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
