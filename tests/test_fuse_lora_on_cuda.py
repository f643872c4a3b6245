"""viking.fuse_lora on a real device: the kernel's bits and its time beside torch's, and whole trainings."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import importlib.util
from typing import Any

import pytest
import torch
from torch.nn import functional

import viking
from support.models import CHECKPOINTING, build
from support.training import assert_same, train
from viking.lora import adding

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

RANKS = (16, 32, 64, 128)
#: (rows, columns) of FLUX.2-dev's Linears at 512 px, and odd ones.
SHAPES = [
    (1536, 6144), (1024, 6144), (512, 6144), (1024, 18432), (512, 18432), (1024, 36864), (512, 36864), (1536, 55296),
    (1, 6144), (77, 3000), (1000, 264), (4608, 3072),
]
FACTORS = [(), (0.3,), (0.7, 1.9)]


def operands(rows: int, columns: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(rank)
    sizes = ((rows, columns), (rows, rank), (columns, rank))
    y, h, weight = (torch.randn(size, device="cuda", generator=generator).to(dtype) for size in sizes)
    return y, h, weight


@needs_triton
@pytest.mark.parametrize("rank", [1, 4, 24, 100, *RANKS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_fused_has_the_bits_of_torch(
    dtype: torch.dtype, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the first trial finds equal bits, other numbers and factors agree too; printed: which shapes these are."""
    fused = []
    for rows, columns in SHAPES:
        y, h, weight = operands(rows, columns, rank, dtype)
        for factors in FACTORS:
            expected = adding._by_torch_(y.clone(), h, weight, factors)

            found = adding.add_product_(y.clone(), h, weight, factors)

            assert torch.equal(found, expected), (rows, columns, factors)
        shape = adding._shapes[rows, columns, rank, dtype, y.device]
        assert shape.is_fused or shape.reason
        assert not shape.reason.startswith("Triton"), shape.reason
        fused.append(f"({rows}, {columns})" + ("" if shape.is_fused else f" NO: {shape.reason}"))
    with capsys.disabled():
        print(f"\n  {dtype} rank {rank}:", *fused)


@needs_triton
@pytest.mark.parametrize("factors", FACTORS, ids=str)
def test_the_kernel_rounds_as_torch_does_where_products_are_exact(factors: tuple[float, ...]) -> None:
    from viking.lora import triton_kernel

    for rows, columns, rank in [(3, 5, 1), (64, 128, 16), (130, 200, 24), (1000, 333, 64), (257, 1031, 128)]:
        for dtype in (torch.bfloat16, torch.float16):
            y = torch.randn(rows, columns, device="cuda").to(dtype)
            h, weight = (torch.randint(-3, 4, (n, rank), device="cuda").to(dtype) for n in (rows, columns))
            expected = adding._by_torch_(y.clone(), h, weight, factors)

            triton_kernel.add_product_(y, h, weight, factors)

            assert torch.equal(y, expected), (rows, columns, rank, dtype)


@needs_triton
def test_speed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed, beside what torch takes and a copy that reads and writes as much; asserted is only that it runs."""
    from viking.lora import triton_kernel

    def time_of(call: Any) -> float:
        times = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    tiles = [(64, 128, 4), (128, 128, 4), (128, 128, 8), (64, 256, 4), (64, 256, 8), (128, 256, 8), (32, 256, 4)]
    lines = []
    for rows, columns in [(1536, 6144), (1536, 55296), (1024, 18432)]:
        for rank in RANKS:
            y, h, weight = operands(rows, columns, rank, torch.bfloat16)
            torch_way = time_of(lambda y=y, h=h, w=weight: y + functional.linear(h, w))
            in_place = time_of(lambda y=y, h=h, w=weight: y.add_(functional.linear(h, w)))
            copied = time_of(lambda y=y: torch.clone(y))
            line = f"({rows}, {columns}) rank {rank}: torch {torch_way:.0f} us, add_ {in_place:.0f}, copy {copied:.0f};"
            chosen = triton_kernel.tiles(rank)
            for tile in tiles:
                monkeypatch.setattr(triton_kernel, "tiles", lambda rank, tile=tile: tile)
                try:
                    taken = time_of(lambda y=y, h=h, w=weight: triton_kernel.add_product_(y, h, w, ()))
                except Exception as error:
                    line += f"  {tile}: {type(error).__name__}"
                    continue
                line += f"  {tile}{'*' if tile == chosen else ''} {taken:.0f}"
            monkeypatch.undo()
            lines.append(line)
    with capsys.disabled():
        print("", *lines, sep="\n  ")
    assert len(lines) == 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("attached", [False, True])
def test_a_whole_training_is_the_same(
    attached: bool, checkpointing: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viking.nn.eligible.SMALLEST_BYTES", {"cuda": 4 << 10, "cpu": 4 << 10})
    monkeypatch.setattr(adding, "SMALLEST_ELEMENTS", 0)

    def step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x.cuda()).float().square().mean()
        loss.backward()
        return loss.detach()

    outcomes = []
    for fuses in (False, True):
        model, _ = build("wrapper", checkpointing=checkpointing)
        model.to(dtype)
        if attached:
            viking.attach(model, "cuda", weights_budget=0, progress=False)
        else:
            model.cuda()
        trained = [p for p in model.parameters() if p.requires_grad]
        if fuses:
            assert len(viking.fuse_lora(model).fused) == 12
        outcomes.append(train(model, trained, 4, dtype, step_with=step, accumulate=2))
        viking.detach(model)

    assert_same(*outcomes)


def test_steady_steps_do_not_make_the_host_wait() -> None:
    model, _ = build("wrapper", hidden=256)
    model.to("cuda", torch.bfloat16)
    viking.fuse_lora(model)
    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16)
    model(x).square().mean().backward()
    torch.cuda.synchronize()

    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
