"""The examples run as they are, and leave what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("script", ["train_lora.py"])
def test_an_example_is_short(script: str) -> None:
    assert len((EXAMPLES / script).read_text(encoding="utf-8").splitlines()) < 80


def test_train_lora_leaves_a_lora_that_was_trained(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_lora.py"), "--steps", "21", "--device", "cpu", "--output", "lora.pt"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step   20  loss" in result.stdout
    lora = torch.load(tmp_path / "lora.pt", weights_only=True)
    ups = [tensor for name, tensor in lora.items() if name.endswith("up.weight")]
    assert len(lora) == 2 * len(ups) == 40
    assert all(tensor.isfinite().all() for tensor in lora.values())
    assert all(tensor.abs().max() > 0 for tensor in ups), "an up matrix never moved from zero"
