"""The three ways from C to a tensor's memory: exchange API, methods, capsule."""

from __future__ import annotations

import ctypes
import gc
import sys
import types
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from viking import _engine  # noqa: E402

tensor_view = _engine.tensor_view
current_stream = _engine.current_stream

HAS_EXCHANGE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")  # torch 2.10 and later
WAYS = ["auto", "ints", "capsule"] + (["exchange"] if HAS_EXCHANGE else [])
needs_exchange = pytest.mark.skipif(not HAS_EXCHANGE, reason="this torch has no DLPack C exchange API")

CPU, CUDA = 1, 2
TYPES = {  # dtype: (DLPack code, bits, lanes)
    torch.float64: (2, 64, 1),
    torch.float32: (2, 32, 1),
    torch.float16: (2, 16, 1),
    torch.bfloat16: (4, 16, 1),
    torch.int64: (0, 64, 1),
    torch.int32: (0, 32, 1),
    torch.int16: (0, 16, 1),
    torch.int8: (0, 8, 1),
    torch.uint8: (1, 8, 1),
    torch.uint16: (1, 16, 1),
    torch.uint32: (1, 32, 1),
    torch.uint64: (1, 64, 1),
    torch.bool: (6, 8, 1),
    torch.complex64: (5, 64, 1),
    torch.complex128: (5, 128, 1),
    torch.float8_e4m3fn: (10, 8, 1),
    torch.float8_e4m3fnuz: (11, 8, 1),
    torch.float8_e5m2: (12, 8, 1),
    torch.float8_e5m2fnuz: (13, 8, 1),
}


class OnlyMethods:
    """What a tensor of torch before 2.10 offers: no exchange API, and no capsule either."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor, name)


# ---- all ways tell the same ----


@pytest.mark.parametrize("access", WAYS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_is_told_by_every_way(access: str, dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, dtype=torch.uint8).to(dtype)
    view = tensor_view(tensor, access=access)
    assert (view["code"], view["bits"], view["lanes"]) == TYPES[dtype]
    assert view["data"] == tensor.data_ptr()
    assert view["shape"] == (3, 5)
    assert view["strides"] == (5, 1)
    assert view["bytes"] == 15 * tensor.element_size()
    assert view["contiguous"] is True
    assert (view["device_type"], view["device_id"]) == (CPU, 0)


@pytest.mark.parametrize("access", WAYS)
@pytest.mark.parametrize(
    ("make", "span", "contiguous"),
    [
        (lambda t: t, 100, True),
        (lambda t: t.t(), 100, False),
        (lambda t: t[2:4], 20, True),
        (lambda t: t[:, 3:5], 92, False),
        (lambda t: t[::3, ::2], 99, False),
        (lambda t: t[0].expand(9, 10), 10, False),
        (lambda t: t[5, 5], 1, True),
        (lambda t: t[:1].t(), 10, True),
        (lambda t: t[:0], 0, True),
        (lambda t: t.view(2, 5, 1, 10, 1), 100, True),
    ],
    ids=["whole", "transposed", "rows", "columns", "strided", "expanded", "scalar", "one_row_t", "empty", "5d"],
)
def test_every_layout_is_told_by_every_way(access: str, make: Any, span: int, contiguous: bool) -> None:
    tensor = make(torch.arange(100.0).view(10, 10))
    view = tensor_view(tensor, access=access)
    assert view["shape"] == tuple(tensor.shape)
    assert view["bytes"] == 4 * span
    assert view["contiguous"] is contiguous
    if tensor.numel():
        assert view["data"] == tensor.data_ptr()
        assert view["strides"] == tensor.stride()
        first = ctypes.cast(view["data"], ctypes.POINTER(ctypes.c_float))[0]
        assert first == tensor.flatten()[0].item()


@pytest.mark.parametrize("access", WAYS)
def test_a_parameter_that_requires_grad_is_told(access: str) -> None:
    parameter = nn.Parameter(torch.ones(4))
    assert tensor_view(parameter, access=access)["data"] == parameter.data_ptr()


def test_auto_takes_the_methods_where_there_is_no_exchange_api() -> None:
    tensor = torch.ones(2, 3)
    assert tensor_view(OnlyMethods(tensor)) == tensor_view(tensor, access="ints")
    with pytest.raises(TypeError, match=r"OnlyMethods.*no DLPack C exchange API"):
        tensor_view(OnlyMethods(tensor), access="exchange")
    with pytest.raises(TypeError, match="no tensor"):
        tensor_view(OnlyMethods(tensor), access="capsule")


def test_a_type_without_a_dlpack_number_is_opaque_bytes() -> None:
    class Quantised(OnlyMethods):
        dtype = "torch.qint8"

    view = tensor_view(Quantised(torch.zeros(4, dtype=torch.int8)), access="ints")
    assert (view["code"], view["bits"], view["bytes"]) == (3, 8, 4)


def test_cuda_tensors_are_told_with_their_device() -> None:
    class OnCuda(OnlyMethods):
        device = torch.device("cuda", 3)

    view = tensor_view(OnCuda(torch.ones(2)))
    assert (view["device_type"], view["device_id"]) == (CUDA, 3)


# ---- capsules ----


@pytest.mark.parametrize("dtype", ["f2", "f4", "i1", "u8", "?", "c8"])
def test_numpy_arrays_arrive_by_capsule(dtype: str) -> None:
    array = np.zeros((4, 6), dtype=dtype)[:, ::2]
    view = tensor_view(array)
    assert view["data"] == array.ctypes.data
    assert view["strides"] == tuple(s // array.itemsize for s in array.strides)
    assert view["bits"] == 8 * array.itemsize
    assert view["contiguous"] is False


def test_a_negative_stride_is_refused() -> None:
    with pytest.raises(ValueError, match=r"numpy\.ndarray.*stride -1.*contiguous copy"):
        tensor_view(np.zeros(5)[::-1])


@pytest.mark.parametrize("access", ["auto", "capsule"])
def test_a_capsule_is_consumed_and_gives_its_array_back(access: str) -> None:
    class Array(np.ndarray):
        pass

    array = np.zeros(1000).view(Array)
    gone = weakref.ref(array)
    references = sys.getrefcount(array)
    for _ in range(10):
        tensor_view(array, access=access)
    assert sys.getrefcount(array) == references
    del array
    gc.collect()
    assert gone() is None


class Producer:
    """A foreign array that remembers how it was asked and keeps the capsules it gave away."""

    def __init__(self, array: Any, old: bool = False, device: int = CPU) -> None:
        self.array, self.old, self.device = array, old, device
        self.capsules: list[Any] = []
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **how: Any) -> Any:
        self.asked.append(dict(how))
        if self.old and "max_version" in how:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        how.pop("stream", None)
        self.capsules.append(self.array.__dlpack__(**how))
        return self.capsules[-1]


def name_of(capsule: Any) -> bytes:
    ctypes.pythonapi.PyCapsule_GetName.restype = ctypes.c_char_p
    ctypes.pythonapi.PyCapsule_GetName.argtypes = [ctypes.py_object]
    return ctypes.pythonapi.PyCapsule_GetName(capsule)


@pytest.mark.parametrize("array", [np.zeros(3), torch.zeros(3)], ids=["numpy", "torch"])
@pytest.mark.parametrize(("old", "used"), [(False, b"used_dltensor_versioned"), (True, b"used_dltensor")])
def test_new_and_old_capsules_are_read_and_marked_as_used(array: Any, old: bool, used: bytes) -> None:
    producer = Producer(array, old=old)
    address = array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
    assert tensor_view(producer)["data"] == address
    assert name_of(producer.capsules[0]) == used


def test_a_capsule_is_asked_for_without_copy_or_synchronisation() -> None:
    on_cpu, on_gpu = Producer(np.zeros(3)), Producer(np.zeros(3), device=CUDA)
    tensor_view(on_cpu)
    tensor_view(on_gpu)
    assert on_cpu.asked == [{"max_version": (1, 3), "copy": False}]
    assert on_gpu.asked == [{"max_version": (1, 3), "copy": False, "stream": -1}]


def test_a_used_capsule_is_refused() -> None:
    producer = Producer(np.zeros(3))
    tensor_view(producer)
    stale = producer.capsules[0]
    producer.array = types.SimpleNamespace(__dlpack__=lambda **_: stale)
    with pytest.raises(TypeError, match="no fresh DLPack capsule"):
        tensor_view(producer)


def test_a_copy_made_by_the_producer_is_refused() -> None:
    class Copying:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (CPU, 0)

        def __dlpack__(self, **how: Any) -> Any:
            return np.ones(3).__dlpack__(**{**how, "copy": True})

    with pytest.raises(ValueError, match=r"Copying.*gives a copy"):
        tensor_view(Copying())


def test_float8_of_a_torch_that_does_not_export_it_arrives_as_bytes() -> None:
    class OldTorchTensor:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            self.dtype = tensor.dtype

        def element_size(self) -> int:
            return 1

        def detach(self) -> OldTorchTensor:
            return self

        def view(self, dtype: torch.dtype) -> torch.Tensor:
            return self.tensor.view(dtype)

        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("float8 types are not supported by dlpack")

    tensor = torch.zeros(4, 3).to(torch.float8_e5m2).t()
    view = tensor_view(OldTorchTensor(tensor), access="capsule")
    assert view == tensor_view(tensor, access="ints")
    assert (view["code"], view["bits"]) == (12, 8)


# ---- the exchange table ----


class Header(ctypes.Structure):
    pass


Header._fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.POINTER(Header))]


class Table(ctypes.Structure):
    _fields_: ClassVar = [("header", Header)] + [
        (name, ctypes.c_void_p) for name in ("allocate", "export", "import_", "borrow", "stream")
    ]


def table_of(tensor_type: Any) -> Table:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(tensor_type.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    copy = Table()
    ctypes.memmove(ctypes.byref(copy), address, ctypes.sizeof(Table))
    return copy


CAPSULE_NAME = ctypes.c_char_p(b"dlpack_exchange_api")  # must outlive the capsules


def capsule_of(table: Any) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(table), CAPSULE_NAME, None)


def tensor_with(capsule: Any, tensor: torch.Tensor) -> torch.Tensor:
    other = type("OtherTensor", (torch.Tensor,), {"__dlpack_c_exchange_api__": capsule})
    return tensor.as_subclass(other)


@needs_exchange
def test_a_newer_table_is_followed_to_the_version_that_is_known() -> None:
    known = table_of(torch.Tensor)
    newer, newest = Header(2, 0, ctypes.pointer(known.header)), Header(3, 1, None)
    newest.previous = ctypes.pointer(newer)
    tensor = tensor_with(capsule_of(newest), torch.ones(3))
    assert tensor_view(tensor, access="exchange")["data"] == tensor.data_ptr()


@needs_exchange
def test_a_table_of_unknown_versions_only_is_as_good_as_none() -> None:
    newer = Header(2, 0, None)
    tensor = tensor_with(capsule_of(newer), torch.ones(3))
    with pytest.raises(TypeError, match=r"OtherTensor.*no DLPack C exchange API of version 1"):
        tensor_view(tensor, access="exchange")
    assert tensor_view(tensor)["data"] == tensor.data_ptr()  # by its methods


@needs_exchange
@pytest.mark.parametrize("draft", [12345, None, "text"])
def test_an_attribute_that_is_no_capsule_is_as_good_as_none(draft: Any) -> None:
    tensor = tensor_with(draft, torch.ones(3))
    assert tensor_view(tensor)["data"] == tensor.data_ptr()
    with pytest.raises(TypeError, match="no DLPack C exchange API"):
        tensor_view(tensor, access="exchange")


@needs_exchange
def test_a_table_without_borrowing_exports_and_gives_back() -> None:
    table = table_of(torch.Tensor)
    table.borrow = None
    tensor = tensor_with(capsule_of(table), torch.arange(6.0).view(2, 3).t())
    references = sys.getrefcount(tensor)
    for _ in range(10):
        assert tensor_view(tensor, access="exchange") == tensor_view(tensor, access="ints")
    assert sys.getrefcount(tensor) == references


# ---- refusals ----


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(3)


def hollow() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("access", WAYS)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Wrapper, "Wrapper"),
        (fake, "FakeTensor"),
        (hollow, r"torch\.Tensor"),
        (lambda: torch.empty(3, device="meta"), r"torch\.Tensor"),
        (lambda: torch.eye(3).to_sparse(), r"torch\.Tensor"),
    ],
    ids=["wrapper", "fake", "hollow", "meta", "sparse"],
)
def test_a_tensor_without_memory_is_refused_with_its_type_and_a_way_out(access: str, make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"cannot use this .*{name}: .*(__tensor_flatten__|materialise)"):
        tensor_view(make(), access=access)


def test_the_producers_own_error_is_the_cause() -> None:
    with pytest.raises(ValueError, match="materialise") as caught:
        tensor_view(torch.eye(3).to_sparse(), access="ints")
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("reason", [KeyboardInterrupt, MemoryError])
def test_what_is_not_the_tensors_fault_is_passed_on_as_it_is(reason: type[BaseException]) -> None:
    class Interrupted(OnlyMethods):
        def data_ptr(self) -> int:
            raise reason

    with pytest.raises(reason):
        tensor_view(Interrupted(torch.ones(1)))


@pytest.mark.parametrize("access", WAYS)
def test_too_many_dimensions_are_refused(access: str) -> None:
    assert len(tensor_view(torch.zeros([1] * 8), access=access)["shape"]) == 8
    with pytest.raises(ValueError, match="9 dimensions"):
        tensor_view(torch.zeros([1] * 9), access=access)


@pytest.mark.parametrize("thing", [None, 3, "tensor", [1.0], object()])
def test_what_is_no_tensor_is_refused(thing: object) -> None:
    for access in ("auto", "exchange", "ints", "capsule"):
        with pytest.raises(TypeError, match="cannot use this builtins"):
            tensor_view(thing, access=access)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="not 'magic'"):
        tensor_view(torch.ones(1), access="magic")


def test_an_unknown_device_is_refused() -> None:
    class OnXpu(OnlyMethods):
        device = torch.device("xpu", 0)

    with pytest.raises(ValueError, match="device 'xpu'"):
        tensor_view(OnXpu(torch.ones(2)))


# ---- streams ----


def test_the_cpu_has_no_stream() -> None:
    assert current_stream(torch.Tensor, CPU, 0) == 0


def test_before_the_exchange_api_torch_is_asked_for_its_raw_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def raw_stream(device: int) -> int:
        asked.append(device)
        return 0x7F0000001000

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw_stream, raising=False)
    assert current_stream(OnlyMethods, CUDA, 2) == 0x7F0000001000
    assert asked == [2]


def test_the_exchange_table_is_asked_for_the_stream() -> None:
    asked: list[tuple[int, int]] = []

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
    def stream(device_type: int, device_id: int, out: Any) -> int:
        asked.append((device_type, device_id))
        out[0] = 0x5000
        return 0

    table = Table(Header(1, 3, None))
    table.stream = ctypes.cast(stream, ctypes.c_void_p).value
    producer = type("Producer", (), {"__dlpack_c_exchange_api__": capsule_of(table)})
    assert current_stream(producer, CUDA, 1) == 0x5000
    assert asked == [(CUDA, 1)]


def test_the_stream_of_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device type 99"):
        current_stream(OnlyMethods, 99, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_torchs_current_stream_is_told_by_both_ways() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert current_stream(torch.Tensor, CUDA, stream.device_index) == stream.cuda_stream
        assert current_stream(OnlyMethods, CUDA, stream.device_index) == stream.cuda_stream
    assert current_stream(torch.Tensor, CUDA, stream.device_index) == 0
