"""The CUDA C kernels without a GPU: compiled for the host, launched by a driver that is a loop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from viking.quant import dequantize, nvrtc
from viking.quant.formats import FORMATS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROOT = Path(__file__).parents[1]
SHAPES = [(1, 1), (3, 7), (5, 8), (2, 4096), (7, 1031), (64, 264), (3, 2052), (4097, 3)]


@pytest.fixture(scope="session")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, which nothing else here does")
    library = tmp_path_factory.mktemp("kernels") / "dequantize.so"
    quant = Path(nvrtc.__file__).parent
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-shared", "-fPIC",
         f"-I{ROOT / 'csrc'}", f"-I{quant}", str(ROOT / "tests/cuda_on_host/dequantize.cpp"), "-o", str(library)],
        check=True,
    )
    return ctypes.CDLL(str(library))


class Driver:
    """The driver's part that nvrtc.py uses; a kernel runs at once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.images: list[bytes] = []
        self.streams: list[int] = []

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:
        self.images.append(image)
        return 0

    def cuModuleGetFunction(self, kernel: Any, module: Any, name: bytes) -> int:
        try:
            address = ctypes.cast(getattr(self.library, name.decode()), ctypes.c_void_p).value
        except AttributeError:
            return 500
        kernel._obj.value = address
        return 0

    def cuLaunchKernel(
        self, kernel: Any, x: int, y: int, z: int, threads: int, ty: int, tz: int, shared: int, stream: Any,
        arguments: Any, extra: Any,
    ) -> int:
        assert (y, z, ty, tz, shared, extra) == (1, 1, 1, 1, 0, None)
        self.streams.append(stream.value)
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        values = [kind.from_address(arguments[i]) for i, kind in enumerate(kinds)]
        self.library.launch(kernel, ctypes.c_uint(x), ctypes.c_uint(threads), *values)
        return 0


@pytest.fixture
def driver(on_host: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver(on_host)
    monkeypatch.setattr(nvrtc, "_driver", lambda: fake)
    monkeypatch.setattr(nvrtc, "_images", {(9, 0): b"machine code"})
    monkeypatch.setattr(nvrtc, "_kernels", {})
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(dequantize, "_working", {})
    return fake


def codes_of_all(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    count = shape[0] * shape[1]
    return torch.arange(count).mul(37).to(torch.uint8).view(shape).view(dtype)


def assert_equal(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine.isnan(), theirs.isnan())
    bits = torch.int32 if mine.dtype == torch.float32 else torch.int16
    assert torch.equal(mine.view(bits)[~mine.isnan()], theirs.view(bits)[~theirs.isnan()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_kernel_gives_torchs_bits(driver: Driver, format: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        codes = codes_of_all(shape, FORMATS[format].dtype)
        few_digits = 1 + torch.arange(shape[0]) % 256 / 256  # whose products are ties every so often
        for scale in (None, torch.logspace(-37, 8, shape[0]), few_digits):
            guarded = torch.full((codes.numel() + 16,), 7.0, dtype=dtype)
            out = guarded[: codes.numel()].view(shape)

            nvrtc.dequantize_into(codes, scale, out)

            assert_equal(out, dequantize.dequantize(codes, scale, dtype, "torch"))
            assert bool((guarded[codes.numel() :] == 7).all())  # nothing beyond the end
    assert set(driver.streams) == {77}
    assert driver.images == [b"machine code"]


def test_a_refusal_names_the_call(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda *args: 719, raising=False)

    with pytest.raises(RuntimeError, match="cuLaunchKernel failed with code 719"):
        nvrtc.dequantize_into(codes_of_all((4, 4), torch.int8), None, torch.empty(4, 4))


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA and brings no NVRTC")
def test_every_kernel_compiles_with_the_nvrtc_that_torch_brings() -> None:
    library = nvrtc.library()

    assert all(f"viking_{name}".encode() in nvrtc.compile_for("sm_90", library)
               for name in ("e4m3fn_to_bfloat16", "e5m2_to_float16", "int8_to_float32"))
    with pytest.raises(RuntimeError, match="sm_1"):
        nvrtc.compile_for("sm_1", library)


# ---- which way ----


def test_the_first_way_that_works_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def way(name: str, works: bool) -> Any:
        def fill(codes: torch.Tensor, scale: Any, out: torch.Tensor) -> None:
            asked.append(name)
            if not works:
                raise OSError(f"no {name} here")
            dequantize._torch_into(codes, scale, out)

        return fill

    codes = codes_of_all((4, 8), torch.int8)
    for works in ("triton", "nvrtc", "torch"):
        monkeypatch.setattr(dequantize, "_working", {})
        monkeypatch.setitem(dequantize.WAYS, "cpu", ("triton", "nvrtc", "torch"))
        for name in ("triton", "nvrtc", "torch"):
            monkeypatch.setitem(dequantize._FILLERS, name, way(name, name == works))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            asked.clear()

            results = [dequantize.dequantize(codes, None, torch.bfloat16) for _ in range(3)]

        assert asked == [*("triton", "nvrtc", "torch")[: ("triton", "nvrtc", "torch").index(works) + 1], works, works]
        assert all(torch.equal(result, codes.to(torch.bfloat16)) for result in results)
        assert [("triton (OSError: no triton here)" in str(w.message)) for w in said] == [True] * (works == "torch")


def test_what_a_kernel_cannot_take_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = codes_of_all((64, 80), torch.int8)
    unusual = [codes.t(), codes[:, 1:], codes.view(-1)[3:67].view(8, 8), codes[:0]]
    monkeypatch.setitem(dequantize._FILLERS, "c", lambda *args: pytest.fail("this needs 16 bytes and no gaps"))

    for tensor in unusual:
        assert torch.equal(dequantize.dequantize(tensor, None, torch.float16), tensor.to(torch.float16))
