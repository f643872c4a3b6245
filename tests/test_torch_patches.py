"""What torch's patched files do: rates, stream priorities, pinning."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from viking.adapters import torch_cuda  # noqa: E402
from viking.patch import manifest  # noqa: E402
from viking.patch.command import main  # noqa: E402

NEEDED = ("version.py", "cuda/__init__.py", "cuda/_device_limits.py", "cuda/streams.py", "cuda/_pin_memory_utils.py")


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed torch's files, patched."""
    root = tmp_path_factory.mktemp("site") / "torch"
    installed = Path(torch.__file__).parent
    for name in NEEDED:
        if (installed / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(installed / name, root / name)
    assert main(["apply", "torch", "--root", str(root)]) == 0
    return root


def load(root: Path, name: str) -> ModuleType:
    """A file of that copy as a module of its own; the torch around it is the installed one."""
    path = root / "cuda" / f"{name}.py"
    if not path.exists():
        pytest.skip(f"torch {torch.__version__} has no {name}")
    spec = importlib.util.spec_from_file_location(f"patched_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- device limits ----

FP64, FP32, FP16, BF16, INT8 = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8

# The table of docs/torch-patches.md: name, capability, SMs, boost clock in MHz, peaks without and with tensor cores.
CARDS = [
    ("Quadro RTX 6000", 75, 72, 1620, {FP32: 14.9, FP16: 29.9}, {FP16: 119.4, INT8: 238.9}),
    ("NVIDIA GeForce RTX 2080 Ti", 75, 68, 1545, {FP32: 13.4, FP16: 26.9}, {FP16: 53.8, INT8: 215.2}),
    ("NVIDIA A40", 86, 84, 1740, {FP32: 37.4}, {FP16: 149.7, BF16: 149.7, FP32: 74.8, INT8: 299.3}),
    (
        "NVIDIA GeForce RTX 3090",
        86,
        82,
        1695,
        {FP32: 35.6, FP16: 35.6},
        {FP16: 71.0, BF16: 71.0, FP32: 35.6, INT8: 284.0},
    ),
    (
        "NVIDIA RTX 6000 Ada Generation",
        89,
        142,
        2505,
        {FP32: 91.1},
        {FP16: 364.2, BF16: 364.2, FP32: 182.1, INT8: 728.5},
    ),
    (
        "NVIDIA GeForce RTX 4090",
        89,
        128,
        2520,
        {FP32: 82.6, FP16: 82.6, FP64: 1.29},
        {FP16: 165.2, BF16: 165.2, FP32: 82.6, INT8: 660.6},
    ),
    (
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        120,
        188,
        2617,
        {FP32: 126.0, FP64: 1.97},
        {FP16: 503.8, BF16: 503.8, FP32: 251.9, INT8: 1007.6},
    ),
    (
        "NVIDIA GeForce RTX 5090",
        120,
        170,
        2407,
        {FP32: 104.8, FP16: 104.8, FP64: 1.64},
        {FP16: 209.5, BF16: 209.5, FP32: 104.8, INT8: 838.0},
    ),
]


def limits(module: ModuleType, name: str, capability: int, processors: int = 1, clock_mhz: int = 1000):
    made = object.__new__(module.GPULimits)
    made.compute_capability = capability
    made.device_properties = SimpleNamespace(
        name=name, multi_processor_count=processors, clock_rate=clock_mhz * 1000, memory_bus_width=384,
        memory_clock_rate=10_501_000,
    )  # fmt: skip
    return made


@pytest.mark.parametrize("card", CARDS, ids=[card[0] for card in CARDS])
def test_the_patched_class_reproduces_the_published_peaks(patched, card):
    name, capability, processors, clock, cores, tensor_cores = card
    made = limits(load(patched, "_device_limits"), name, capability, processors, clock)
    for peaks, tensor in ((cores, False), (tensor_cores, True)):
        for dtype, published in peaks.items():
            assert made.get_tflops_per_second(dtype, tensor) == pytest.approx(published, rel=0.02), (dtype, tensor)


def test_the_docs_hold_the_same_table():
    text = (Path(__file__).parents[1] / "docs" / "torch-patches.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    for name, capability, processors, clock, *peaks in CARDS:
        short = name.removeprefix("NVIDIA ").removesuffix(" Generation").removesuffix(" Workstation Edition")
        row = next(row for row in rows if row[0].startswith(short))
        assert row[1:4] == [str(capability), str(processors), str(clock)]
        for published in {peak for each in peaks for peak in each.values()}:
            assert f"{published:g}" in row[4].replace(".0,", ","), (name, published)


def test_what_torch_knows_itself_is_as_it_was(patched):
    made = limits(load(patched, "_device_limits"), "NVIDIA H100", 90)
    assert made.get_fma_per_cycle_per_sm_tensor_cores(FP16) == 2048
    assert made.get_fma_per_cycle_per_sm_cuda_cores(FP32) == 128
    with pytest.raises(RuntimeError, match="sm_61"):
        limits(load(patched, "_device_limits"), "NVIDIA GeForce GTX 1080", 61).get_fma_per_cycle_per_sm_cuda_cores(FP16)


@pytest.mark.parametrize(
    ("name", "dtype"), [("NVIDIA GeForce GTX 1660 Ti", FP16), ("NVIDIA T400", INT8), ("NVIDIA GeForce RTX 2060", BF16)]
)
def test_tensor_cores_that_a_card_does_not_have_stay_unknown(patched, name, dtype):
    with pytest.raises(RuntimeError, match="No data for sm_75"):
        limits(load(patched, "_device_limits"), name, 75).get_fma_per_cycle_per_sm_tensor_cores(dtype)


def test_the_bandwidth_of_a_4090_is_the_published_one(patched):
    assert limits(load(patched, "_device_limits"), "NVIDIA GeForce RTX 4090", 89).get_memory_bandwidth_Bps() == (
        pytest.approx(1008e9, rel=0.01)
    )


# ---- streams ----


@pytest.fixture
def streams(patched, monkeypatch):
    """The patched module over a base class that keeps what it is given, as a CUDA build's C class would."""

    class Base:
        def __new__(cls, **arguments):
            made = object.__new__(cls)
            made.arguments = arguments
            return made

        def __init__(self, *arguments, **keywords):
            pass

    monkeypatch.setattr(torch._C, "_CudaStreamBase", Base)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.delenv("VIKING_STREAM_PRIORITY", raising=False)
    return load(patched, "streams")


@pytest.mark.parametrize("value", [None, "", " "])
def test_an_unset_priority_is_torchs(streams, monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("VIKING_STREAM_PRIORITY", value)
    assert streams.Stream().arguments == {"priority": 0}
    assert streams.Stream(priority=-2).arguments == {"priority": -2}


def test_a_set_priority_is_for_new_streams_that_name_none(streams, monkeypatch):
    monkeypatch.setenv("VIKING_STREAM_PRIORITY", "-1")
    assert streams.Stream().arguments == {"priority": -1}
    assert streams.Stream(priority=0).arguments == {"priority": 0}
    assert streams.Stream(stream_id=3, device_index=0, device_type=1).arguments["priority"] == 0
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    assert streams.Stream("cuda:0").arguments == {"priority": -1}
    assert streams.ExternalStream(1234).arguments == {"priority": 0, "stream_ptr": 1234}


def test_a_priority_that_is_no_number_is_refused(streams, monkeypatch):
    monkeypatch.setenv("VIKING_STREAM_PRIORITY", "high")
    with pytest.raises(ValueError, match="VIKING_STREAM_PRIORITY: 'high' is no whole number"):
        streams.Stream()


# ---- pinning ----


class Runtime:
    """torch.cuda.cudart(), with a limit on one registration and on all of them."""

    def __init__(self, one: int = 1 << 60, everything: int = 1 << 60) -> None:
        self.one, self.everything = one, everything
        self.registered: dict[int, int] = {}
        self.last_error = 0
        self.stuck: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1
        code = 0
        if any(address < begin + count and begin < address + size for begin, count in self.registered.items()):
            code = 712
        elif size > self.one:
            code = 1
        elif size + sum(self.registered.values()) > self.everything:
            code = 2
        if code == 0:
            self.registered[address] = size
        else:
            self.last_error = code
        return code

    def cudaHostUnregister(self, address: int) -> int:
        if address in self.stuck or address not in self.registered:
            self.last_error = 713
            return 713
        del self.registered[address]
        return 0


PAGE = 4096


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch_cuda, "_loaded_runtime", lambda: SimpleNamespace(cudaGetLastError=lambda: clear(made)))
    monkeypatch.setenv("VIKING_PIN_CHUNK", str(4 * PAGE))
    monkeypatch.setattr(torch_cuda, "_chunks", {})
    return made


def clear(runtime: Runtime) -> int:
    runtime.last_error, code = 0, runtime.last_error
    return code


@pytest.fixture
def pinning(patched):
    return load(patched, "_pin_memory_utils")


def test_one_piece_is_pinned_in_one_piece(pinning, runtime):
    pinning.pin_memory(PAGE, 100 * PAGE)
    assert runtime.registered == {PAGE: 100 * PAGE}
    pinning.unpin_memory(PAGE)
    assert runtime.registered == {}


def test_what_is_too_large_for_one_piece_is_pinned_in_chunks_that_share_no_page(pinning, runtime):
    runtime.one = 4 * PAGE
    pinning.pin_memory(3 * PAGE + 64, 10 * PAGE)
    assert runtime.registered == {
        3 * PAGE + 64: PAGE - 64,
        4 * PAGE: 4 * PAGE,
        8 * PAGE: 4 * PAGE,
        12 * PAGE: PAGE + 64,
    }
    assert runtime.last_error == 0
    pinning.unpin_memory(3 * PAGE + 64)
    assert runtime.registered == {}
    pinning.pin_memory(3 * PAGE + 64, 10 * PAGE)
    assert len(runtime.registered) == 4


def test_chunks_that_were_pinned_are_given_back_when_a_later_one_fails(pinning, runtime):
    runtime.one, runtime.everything = 4 * PAGE, 9 * PAGE
    with pytest.raises(RuntimeError, match=r"after 32768 bytes, in chunks of 16384: cudaError 2 \(out of memory"):
        pinning.pin_memory(4 * PAGE, 40 * PAGE)
    assert runtime.registered == {}
    assert runtime.last_error == 0


@pytest.mark.parametrize(("everything", "said"), [(0, "cudaError 2"), (1 << 60, "cudaError 712")])
def test_a_small_block_that_fails_says_why_and_leaves_no_error_behind(pinning, runtime, everything, said):
    runtime.everything = everything
    if everything:
        pinning.pin_memory(PAGE, PAGE)
    before = dict(runtime.registered)
    with pytest.raises(RuntimeError, match=f"registering 4096 bytes at 0x1000 failed: {said}"):
        pinning.pin_memory(PAGE, PAGE)
    assert runtime.registered == before
    assert runtime.last_error == 0


def test_an_error_of_earlier_work_is_named_as_one(pinning, runtime):
    runtime.cudaHostRegister = lambda *arguments: 700
    with pytest.raises(RuntimeError, match="CUDA_LAUNCH_BLOCKING=1"):
        pinning.pin_memory(PAGE, PAGE)


def test_unpinning_tries_every_chunk_and_fails_as_torch_does(pinning, runtime):
    runtime.one = 4 * PAGE
    pinning.pin_memory(4 * PAGE, 12 * PAGE)
    runtime.stuck = {8 * PAGE}
    with pytest.raises(AssertionError, match="failed for 1 of 3 registrations: cudaError 713"):
        pinning.unpin_memory(4 * PAGE)
    assert set(runtime.registered) == {8 * PAGE}
    assert runtime.last_error == 0
    with pytest.raises(AssertionError, match="cudaError 713"):
        pinning.unpin_memory(123 * PAGE)


# ---- without Viking ----


def test_without_viking_the_patched_files_do_what_torchs_do(patched, monkeypatch, runtime):
    monkeypatch.setitem(sys.modules, "viking.adapters", None)
    module = load(patched, "_pin_memory_utils")
    assert module._viking is None
    module.pin_memory(PAGE, PAGE)
    module.unpin_memory(PAGE)
    assert runtime.registered == {}
    with pytest.raises(RuntimeError, match="No data for sm_89"):
        limits(load(patched, "_device_limits"), "NVIDIA GeForce RTX 4090", 89).get_fma_per_cycle_per_sm_cuda_cores(FP16)
    assert load(patched, "streams")._viking is None


def test_the_module_that_torch_calls_does_not_import_torch():
    import subprocess

    code = "import sys, viking.adapters.torch_cuda; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_release_that_is_proven_is_named():
    proven = {patch.name: patch.proven for patch in manifest.load("torch").patches}
    assert set(proven["device-limits"]) < set(proven["pin-memory"]) < set(proven["stream-priority"])
