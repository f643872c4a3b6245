"""Programs that measure the memory of a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

_PRELUDE = """
import gc, json, os, sys
import torch
from torch import nn
import viking
torch.set_num_threads(1)

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))

def make(count, side):
    "A model of `count` square Linears, filled in place; without the second copy that an initialisation may make."
    layers = [nn.utils.skip_init(nn.Linear, side, side, bias=False) for _ in range(count)]
    for layer in layers:
        layer.weight.requires_grad_(False).fill_(1 / side)
    return nn.Sequential(*layers)
"""


#: Each block of at least this size is a mapping of its own, given back when it is freed. By default glibc raises the
#: size after the first large block, and what is free at the end of its heap then stays or goes as the machine has it.
_EXACT_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}


def measure(program: str) -> dict[str, Any]:
    """Run a program after the prelude above, and read the JSON that it prints last."""
    code = _PRELUDE + textwrap.dedent(program)
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environment = {
        **os.environ, **_EXACT_ALLOCATOR, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
