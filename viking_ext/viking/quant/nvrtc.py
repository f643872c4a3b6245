"""The device kernels of dequantize.cu, compiled when they are first needed by the NVRTC library that torch brings.

NVRTC and the driver are called through ctypes; nothing else needs a CUDA toolkit. Compiled once per architecture and
loaded once per device, in the primary context, which is torch's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch

THREADS = 256
#: Elements that a block of threads converts (dequantize.cu).
PER_BLOCK = 16 * THREADS

_WINDOWS = sys.platform == "win32"
_lock = threading.Lock()
_images: dict[tuple[int, int], bytes] = {}  # by compute capability
_kernels: dict[tuple[int, str], ctypes.c_void_p] = {}  # by device index and name


def dequantize_into(codes: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    """Queue the conversion on the current stream of the tensors' device.

    codes: contiguous bytes, on 8 bytes, at most 2^31 of them; out: contiguous, on 16 bytes. OSError where NVRTC or the
    driver is missing, RuntimeError where one of them refuses.
    """
    index = codes.device.index
    name = f"viking_{str(codes.dtype).rpartition('_')[2].replace('torch.', '')}_to_{str(out.dtype)[6:]}"
    with torch.cuda.device(index):
        kernel = _kernels.get((index, name)) or _load(index, name)
        values = (
            ctypes.c_void_p(codes.data_ptr()),
            ctypes.c_void_p(None if scale is None else scale.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_uint(codes.numel()),
            ctypes.c_uint(codes.shape[-1]),
        )
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(index).cuda_stream)
        blocks = -(-codes.numel() // PER_BLOCK)
        code = _driver().cuLaunchKernel(kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, None)
        _check(code, "cuLaunchKernel")


def _load(index: int, name: str) -> ctypes.c_void_p:
    with _lock:
        capability = torch.cuda.get_device_capability(index)
        if capability not in _images:
            _images[capability] = compile_for(f"sm_{capability[0]}{capability[1]}", library())
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(module), _images[capability]), "cuModuleLoadData")
        _check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, name.encode()), "cuModuleGetFunction")
        _kernels[index, name] = kernel
        return kernel


# ---- NVRTC ----


def library() -> ctypes.CDLL:
    """NVRTC of the CUDA version that torch was built for. OSError where there is none."""
    if torch.version.cuda is None:
        raise OSError("this torch is built without CUDA")
    version = torch.version.cuda.split(".")[0]
    name = f"nvrtc64_{version}0_0.dll" if _WINDOWS else f"libnvrtc.so.{version}"
    for candidate in (name, *_in_packages(name)):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise OSError(f"{name} was not found: install it (pip install nvidia-cuda-nvrtc)")


def _in_packages(name: str) -> Iterator[str]:
    """Where NVIDIA's wheels and torch's own for Windows put it."""
    for package, pattern in (("nvidia", f"*/lib/{name}"), ("nvidia", f"*/bin/**/{name}"), ("torch", f"lib/{name}")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield from map(str, Path(folder).glob(pattern))


def compile_for(architecture: str, nvrtc: Any) -> bytes:
    """dequantize.cu as machine code for "sm_90" and the like. RuntimeError with the compiler's words."""
    source = resources.files("viking.quant").joinpath("dequantize.cu").read_bytes()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"dequantize.cu", 0, None, None)
    _check(code, "nvrtcCreateProgram")
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if nvrtc.nvrtcCompileProgram(program, len(options), options) != 0:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value + 1)
            nvrtc.nvrtcGetProgramLog(program, log)
            words = log.value.decode(errors="replace").strip()
            raise RuntimeError(f"NVRTC does not compile dequantize.cu for {architecture}: {words}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        image = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, image), "nvrtcGetCUBIN")
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


# ---- the driver ----

_loaded: list[Any] = []


def _driver() -> Any:
    if not _loaded:
        _loaded.append(ctypes.CDLL("nvcuda.dll" if _WINDOWS else "libcuda.so.1"))
    return _loaded[0]


def _check(code: int, call: str) -> None:
    if code != 0:
        raise RuntimeError(f"{call} failed with code {code}")
