"""`python -m viking.demo`: train a LoRA on a small diffusion transformer whose weights do not fit in their budget.

A transformer that draws handwritten digits is trained first: the base model, as one would download it. Then its
weights are frozen and a LoRA learns a new style twice from the same seed: once with all weights on the device, once
with Viking streaming them through a budget that holds a part of them. Both runs must agree in every bit. One picture
remains: samples before and after, both loss curves, and what happened in the device's memory during a step.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

REQUIRED = ("torch", "numpy", "sklearn", "matplotlib", "tqdm")


@dataclass(frozen=True)
class Options:
    """What the command line chose."""

    device: str
    base_steps: int
    steps: int
    rank: int
    weights_budget: str
    seed: int
    output: Path


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m viking.demo", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: cuda if there is one")
    parser.add_argument("--steps", type=positive, default=200, metavar="N", help="LoRA training steps (%(default)s)")
    parser.add_argument("--rank", type=positive, default=16, metavar="R", help="rank of the LoRA (%(default)s)")
    parser.add_argument("--weights-budget", default="1MB", metavar="BYTES",
                        help='device memory that the streamed weights may take, such as "1.5MiB"; 0 is the smallest '
                        "that works (%(default)s; the weights are 2.8 MB)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("viking-demo.png"), metavar="FILE", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps only: shows that it runs, not that it learns")
    chosen = parser.parse_args(arguments)
    quick = chosen.quick
    return Options(
        device=chosen.device,
        base_steps=20 if quick else 350,
        steps=min(chosen.steps, 12) if quick else chosen.steps,
        rank=chosen.rank,
        weights_budget=chosen.weights_budget,
        seed=chosen.seed,
        output=chosen.output,
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status: 0 if both runs agree, 1 if they differ, 2 where it cannot run."""
    options = parse(arguments)
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        print(f"The demo needs {' and '.join(missing)} as well: pip install 'viking-engine[demo]'", file=sys.stderr)
        return 2
    # Before torch starts: the model is so small that more threads only wait for each other, and cuBLAS repeats its
    # results only with a workspace of its own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from .story import tell

    return tell(options)
