"""The benchmark on a real device: its weights are made there, and its links paced there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import viking
from viking.bench import command
from viking.bench.models.weights import Weights
from viking.quant.formats import FORMATS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("format", FORMATS)
def test_weights_in_8_bit_are_those_of_quantize(format: str) -> None:
    drawn = torch.empty(1000, 3072, dtype=torch.bfloat16, device=DEVICE)
    drawn.normal_(0, 0.02, generator=torch.Generator(DEVICE).manual_seed(0))
    there, mine = (nn.Linear(3072, 1000, bias=False, dtype=torch.bfloat16).requires_grad_(False) for _ in range(2))
    there.weight.copy_(drawn)
    viking.quantize_(there, format)

    Weights(format).fill([mine], DEVICE, torch.device("cpu"))

    for found, expected in zip(mine.state_dict().values(), there.state_dict().values(), strict=True):
        assert found.device.type == "cpu"
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_a_slower_link_is_paced(tmp_path: Path) -> None:
    model = ["flux2", "--depth", "1/24", "--width", "768", "--device", "cuda", "--steps", "3"]
    given = [*model, "--weights-budget", "0", "--verify", "--link", "1GB/s"]

    assert command.main([*given, "--json", str(tmp_path / "rows.json")]) == 0

    _, row = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    print(f"{row['step_s'] * 1e3:.1f} ms, {row['fetched'] / 1e6:.1f} ms on the link, {row['time_ratio']:.3f} x T1")
    assert row["identical"] is True
    assert row["synchronizations"] == 0
    assert row["step_s"] > 0.8 * row["fetched"] / 1e9
