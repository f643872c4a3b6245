"""8-bit weights on a real device: every way to dequantise gives the same bits, fast, and a streamed model trains as one
that is not."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

import viking
from support.models import Net, hijack
from support.training import assert_same, train
from viking.quant import dequantize, quantizing
from viking.quant.formats import FORMATS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

WAYS = [pytest.param("triton", marks=needs_triton), "nvrtc", "torch"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 1), (3, 7), (256, 256), (2, 4096), (7, 1031), (300, 264), (3, 2052), (4097, 3), (1000, 3072)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_every_way_gives_the_bits_of_the_cpu(format: str, dtype: torch.dtype, way: str) -> None:
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for rows, columns in SHAPES:
        codes = torch.arange(rows * columns).mul(37).to(torch.uint8).view(rows, columns).view(FORMATS[format].dtype)
        few_digits = 1 + torch.arange(rows) % 256 / 256  # whose products are ties every so often
        for scale in (None, torch.logspace(-37, 8, rows), few_digits):
            expected = dequantize.dequantize(codes, scale, dtype, "torch")

            there = dequantize.dequantize(codes.cuda(), None if scale is None else scale.cuda(), dtype, way)

            mine = there.cpu()
            assert torch.equal(mine.isnan(), expected.isnan())
            kept = ~expected.isnan()
            assert torch.equal(mine.view(bits)[kept], expected.view(bits)[kept]), (rows, columns, scale is None)


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_runs_on_the_current_stream(way: str) -> None:
    codes = torch.ones(4096, 4096, device="cuda").to(torch.int8)
    scale = torch.ones(4096, device="cuda")
    stream = torch.cuda.Stream()
    dequantize.dequantize(codes, scale, torch.bfloat16, way)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        codes.fill_(3)

        out = dequantize.dequantize(codes, scale, torch.bfloat16, way)

    stream.synchronize()
    assert bool((out == 3).all())


def test_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, beside a copy that moves as many bytes; asserted is only that the numbers are right."""
    rows, columns = 6144, 36864
    codes = torch.randint(0, 255, (rows, columns), dtype=torch.uint8, device="cuda")
    scale = torch.rand(rows, device="cuda")
    source = torch.empty(3 * rows * columns // 2, dtype=torch.uint8, device="cuda")

    def rate(call: Any) -> float:
        times = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return 3 * rows * columns / sorted(times)[len(times) // 2] / 1e6

    copied = torch.empty_like(source)
    lines = [f"a copy: {rate(lambda: copied.copy_(source)):.0f} GB/s"]
    for name, format in FORMATS.items():
        of_format = codes.view(format.dtype)
        for way in ("triton", "nvrtc", "torch"):
            if way == "triton" and importlib.util.find_spec("triton") is None:
                continue
            reached = rate(lambda w=way, c=of_format: dequantize.dequantize(c, scale, torch.bfloat16, w))
            lines.append(f"{name} to bf16 by {way}: {reached:.0f} GB/s")
    with capsys.disabled():
        print("", *lines, sep="\n  ")
    assert len(lines) > 1


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("checkpointing", ["off", "reentrant", "early stop"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_streamed_8_bit_model_trains_as_one_that_is_not_attached(
    format: str, checkpointing: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizing, "SMALLEST_ELEMENTS", 64)
    monkeypatch.setattr("viking.nn.eligible.SMALLEST_BYTES", {"cuda": 4 << 10, "cpu": 4 << 10})
    outcomes = []
    for attached in (True, False):
        model: nn.Module = Net(depth=3, checkpointing=checkpointing).to(torch.bfloat16)
        report = viking.quantize_(model, format)
        if attached:
            viking.attach(model, "cuda", weights_budget=int(share * report.bytes_after), progress=False)
        else:
            model.cuda()
        network = hijack(model).cuda()

        def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
            loss = net(x.cuda()).float().square().mean()
            loss.backward()
            return loss.detach()

        outcomes.append(train(model, list(network.parameters()), 4, torch.bfloat16, step_with=step))
        if attached:
            assert any(w.path != "unmanaged" for w in viking.stats(model).weights)

    assert_same(*outcomes)
