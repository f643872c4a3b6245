"""force_to_bf16: which parameters change, to which bits, and what stays as it was."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from viking import _engine  # noqa: E402

force_to_bf16 = _engine.force_to_bf16
BF16 = torch.bfloat16


class Holder(nn.Module):
    """A module whose parameters are exactly the given ones."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            is_parameter = isinstance(value, nn.Parameter)
            self.register_parameter(name, value if is_parameter else nn.Parameter(value, value.is_floating_point()))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int16)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype == BF16
    assert torch.equal(bits(actual), bits(expected))


def share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def assert_converts_like_torch(source: torch.Tensor) -> None:
    expected = source.to(BF16)
    holder = Holder(p=nn.Parameter(source))
    force_to_bf16(holder)
    actual = holder.p.detach()
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":  # torch's scalar code writes other NaN bits
        assert torch.equal(actual.isnan(), expected.isnan())
        actual, expected = actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)
    assert_same_bits(actual, expected)


# ---- the bits ----


def test_every_fp16_pattern_gives_torchs_bits() -> None:
    assert_converts_like_torch(torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16))


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_upper_half_of_fp32_gives_torchs_bits(low: int) -> None:
    patterns = (np.arange(65536, dtype=np.uint32) << 16) | np.uint32(low)
    assert_converts_like_torch(torch.from_numpy(patterns.view(np.float32)))


def test_random_fp32_patterns_give_torchs_bits() -> None:
    patterns = np.random.default_rng(0).integers(0, 1 << 32, 3_000_001, dtype=np.uint32)
    assert_converts_like_torch(torch.from_numpy(patterns.view(np.float32)))


def test_infinities_zeros_and_subnormals_are_kept() -> None:
    tiny = 1e-40  # subnormal in fp32 and in bf16
    holder = Holder(p=torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, tiny, -tiny, 3.4e38]))
    torch.set_flush_denormal(True)
    try:
        force_to_bf16(holder)
    finally:
        torch.set_flush_denormal(False)
    values = [v & 0xFFFF for v in bits(holder.p).tolist()]
    assert values[:4] == [0x7F80, 0xFF80, 0x0000, 0x8000]
    assert values[4] == 0x0001
    assert values[5] == 0x8001
    assert values[6] == 0x7F80  # beyond the largest bf16


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 33, 65535, 65536, 65537, 200001])
def test_every_length_is_converted_to_its_end(count: int) -> None:
    assert_converts_like_torch(torch.randn(count))


# ---- what changes and what is kept ----


def test_fp32_and_fp16_change_and_everything_else_is_kept() -> None:
    kept = {
        "f64": torch.zeros(2, dtype=torch.float64),
        "bf16": torch.zeros(2, dtype=BF16),
        "e4m3": torch.zeros(2).to(torch.float8_e4m3fn),
        "e5m2": torch.zeros(2).to(torch.float8_e5m2),
        "i8": torch.zeros(2, dtype=torch.int8),
        "c64": torch.zeros(2, dtype=torch.complex64),
        "flag": torch.zeros(2, dtype=torch.bool),
    }
    holder = Holder(f32=torch.ones(2), f16=torch.ones(2).half(), **{k: nn.Parameter(v, False) for k, v in kept.items()})
    holder.register_buffer("buffer", torch.ones(2))
    before = {name: (p.dtype, p.data_ptr()) for name, p in holder.named_parameters()}

    assert force_to_bf16(holder) == (2, len(kept))

    assert holder.f32.dtype == holder.f16.dtype == BF16
    assert holder.buffer.dtype == torch.float32
    for name in kept:
        p = holder.get_parameter(name)
        assert (p.dtype, p.data_ptr()) == before[name]


def test_identity_requires_grad_and_optimizers_are_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].bias.requires_grad_(False)
    before = list(model.parameters())
    grads = [p.requires_grad for p in before]
    optimizer = torch.optim.SGD([p for p in before if p.requires_grad], lr=0.1)

    assert force_to_bf16(model) == (4, 0)

    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert grads == [p.requires_grad for p in before]
    model(torch.ones(1, 4, dtype=BF16)).sum().backward()
    weight = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, model[0].weight)


def test_a_second_call_changes_nothing() -> None:
    model = nn.Linear(4, 4)
    force_to_bf16(model)
    pointers = [p.data_ptr() for p in model.parameters()]
    assert force_to_bf16(model) == (0, 2)
    assert pointers == [p.data_ptr() for p in model.parameters()]


def test_a_tied_parameter_counts_once_and_stays_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert force_to_bf16(model) == (1, 0)
    assert model[0].weight is model[1].weight
    assert model[0].weight.dtype == BF16


def test_an_empty_network_has_nothing_to_change() -> None:
    assert force_to_bf16(nn.ReLU()) == (0, 0)
    assert force_to_bf16(Holder(p=torch.empty(0, 3))) == (1, 0)


def test_a_wrapper_subclass_is_kept_whatever_dtype_it_shows() -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Wrapper:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["inner"], None

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.detach.default:
                return Wrapper(args[0].inner)
            raise NotImplementedError(f"{func} must not be called")

    holder = Holder(p=nn.Parameter(Wrapper(torch.zeros(3, dtype=torch.int8)), requires_grad=False), q=torch.ones(2))
    assert force_to_bf16(holder) == (1, 1)
    assert isinstance(holder.p.data, Wrapper)
    assert holder.p.dtype == torch.float32


def test_a_lazy_parameter_is_kept() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    assert force_to_bf16(model) == (2, 2)
    assert nn.parameter.is_lazy(model[0].weight)


def test_meta_fake_and_sparse_parameters_are_converted_by_torch() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = nn.Parameter(torch.empty(3))
    holder = Holder(m=torch.empty(3, device="meta"), s=torch.eye(3).to_sparse(), f=fake)
    assert force_to_bf16(holder) == (3, 0)
    assert holder.m.dtype == holder.s.dtype == holder.f.dtype == BF16
    assert holder.m.device.type == "meta"
    assert torch.equal(holder.s.to_dense(), torch.eye(3, dtype=BF16))


def test_parameters_of_more_dimensions_than_a_view_has() -> None:
    source = torch.randn(*[2] * 11)
    holder = Holder(p=source.clone())
    assert force_to_bf16(holder) == (1, 0)
    assert_same_bits(holder.p, source.to(BF16))


def test_a_negated_view_is_converted_to_its_values() -> None:
    source = torch._neg_view(torch.randn(5))
    assert source.is_neg()
    holder = Holder(p=nn.Parameter(source))
    expected = source.to(BF16).resolve_neg()
    force_to_bf16(holder)
    assert torch.equal(holder.p.detach().resolve_neg(), expected)


# ---- layout and sharing ----


@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.t(),
        lambda t: t[3:9],
        lambda t: t[:, 2:5],
        lambda t: t[::2, ::3],
        lambda t: t[0].expand(7, -1),
        lambda t: t[4, 4],
        lambda t: t.view(5, 2, 5, 2).permute(3, 1, 0, 2),
        lambda t: t.view(1, 1, 10, 10).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "rows", "columns", "strided", "expanded", "scalar", "permuted", "channels_last"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_layout_is_converted_to_its_values(
    layout: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    source = layout(torch.randn(10, 10).to(dtype))
    holder = Holder(p=nn.Parameter(source))
    expected = source.to(BF16)
    assert force_to_bf16(holder) == (1, 0)
    assert_same_bits(holder.p, expected)
    assert holder.p.shape == expected.shape


def test_a_dense_layout_keeps_its_strides() -> None:
    holder = Holder(p=nn.Parameter(torch.randn(6, 4).t()))
    force_to_bf16(holder)
    assert holder.p.stride() == (1, 4)


def test_a_slice_with_gaps_does_not_carry_them_along() -> None:
    holder = Holder(p=nn.Parameter(torch.randn(1000, 100)[:, 7]))
    force_to_bf16(holder)
    assert holder.p.untyped_storage().nbytes() == 2 * 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_overlapping_views_still_see_each_others_writes(dtype: torch.dtype) -> None:
    base = torch.randn(100).to(dtype)
    holder = Holder(a=nn.Parameter(base[10:50]), b=nn.Parameter(base[30:60].view(5, 6).t()))
    expected = {name: p.detach().to(BF16) for name, p in holder.named_parameters()}

    assert force_to_bf16(holder) == (2, 0)

    for name, p in holder.named_parameters():
        assert_same_bits(p, expected[name])
    assert share(holder.a, holder.b)
    assert holder.b.stride() == (1, 6)
    with torch.no_grad():
        holder.a[20] = 7.0  # element 30 of the base, which is b[0, 0]
    assert holder.b[0, 0] == 7.0


def test_slices_of_one_buffer_keep_their_distances() -> None:
    flat = torch.randn(64)
    holder = Holder(**{f"p{i}": nn.Parameter(flat[16 * i : 16 * i + 12]) for i in range(4)})
    assert force_to_bf16(holder) == (4, 0)
    for i in range(4):
        p = holder.get_parameter(f"p{i}")
        assert share(p, holder.p0)
        assert p.data_ptr() - holder.p0.data_ptr() == 2 * 16 * i
        assert_same_bits(p, flat[16 * i : 16 * i + 12].to(BF16))


def test_far_slices_share_a_storage_that_leaves_the_space_between_out() -> None:
    flat = torch.randn(100_000)
    holder = Holder(a=nn.Parameter(flat[:10]), b=nn.Parameter(flat[-10:]), c=nn.Parameter(flat[-5:]))
    force_to_bf16(holder)
    assert share(holder.a, holder.b)
    assert share(holder.b, holder.c)
    assert holder.a.untyped_storage().nbytes() == 2 * 20
    assert_same_bits(holder.a, flat[:10].to(BF16))
    assert_same_bits(holder.b, flat[-10:].to(BF16))
    assert holder.c.data_ptr() - holder.b.data_ptr() == 2 * 5


def test_one_storage_read_as_two_types_gives_each_its_values() -> None:
    words = torch.randn(20)
    halves = torch.randn(40).half()
    words.view(torch.float16)[20:] = halves[20:]
    holder = Holder(a=nn.Parameter(words[:10]), b=nn.Parameter(words.view(torch.float16)[20:]))
    expected = [p.detach().to(BF16) for p in (holder.a, holder.b)]
    assert force_to_bf16(holder) == (2, 0)
    assert_same_bits(holder.a, expected[0])
    assert_same_bits(holder.b, expected[1])


def test_two_parameters_over_the_same_memory_stay_one_memory() -> None:
    base = nn.Parameter(torch.randn(6, 6))
    holder = Holder(a=base, b=nn.Parameter(base.data), c=nn.Parameter(base.data.t()))
    force_to_bf16(holder)
    assert holder.a.data_ptr() == holder.b.data_ptr() == holder.c.data_ptr()
    assert torch.equal(holder.a, holder.c.t())


def test_shared_meta_parameters_stay_shared() -> None:
    base = torch.empty(30, device="meta")
    holder = Holder(a=nn.Parameter(base[:20]), b=nn.Parameter(base[10:]), c=torch.empty(5, device="meta"))
    assert force_to_bf16(holder) == (3, 0)
    assert holder.a.untyped_storage()._cdata == holder.b.untyped_storage()._cdata
    assert holder.a.untyped_storage()._cdata != holder.c.untyped_storage()._cdata
    assert holder.b.storage_offset() == 10


def test_many_small_parameters_are_converted_together() -> None:
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(1 + i % 97) for i in range(3000)] + [torch.randn(9).half()] * 2)
    expected = [p.detach().to(BF16) for p in model]
    assert force_to_bf16(model) == (3002, 0)
    for p, e in zip(model, expected, strict=True):
        assert_same_bits(p, e)


# ---- refusals change nothing ----


def test_a_gradient_anywhere_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.grad = torch.zeros(2)
    with pytest.raises(ValueError, match=r"'1\.bias' has a gradient.*nothing was changed"):
        force_to_bf16(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_gradient_of_a_kept_parameter_is_refused_too() -> None:
    holder = Holder(a=torch.ones(2), b=torch.ones(2, dtype=BF16))
    holder.b.grad = torch.zeros(2, dtype=BF16)
    with pytest.raises(ValueError, match="'b' has a gradient"):
        force_to_bf16(holder)
    assert holder.a.dtype == torch.float32


def test_a_failure_while_exchanging_puts_everything_back() -> None:
    class Stubborn(nn.Parameter):
        @property
        def data(self) -> torch.Tensor:
            return torch.Tensor.data.__get__(self)

        @data.setter
        def data(self, value: torch.Tensor) -> None:
            raise RuntimeError("stubborn")

    base = torch.ones(6)  # slices of one storage are exchanged in their order: a is done when b refuses
    holder = Holder(a=nn.Parameter(base[:2]), b=nn.Parameter(base[2:4]), c=nn.Parameter(base[4:]))
    holder.b.__class__ = Stubborn
    pointers = [p.data_ptr() for p in holder.parameters()]
    with pytest.raises(RuntimeError, match="stubborn"):
        force_to_bf16(holder)
    assert [p.data_ptr() for p in holder.parameters()] == pointers
    assert all(p.dtype == torch.float32 for p in holder.parameters())


def test_a_failed_allocation_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    real, calls = torch.empty, []

    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 5:
            raise RuntimeError("not enough memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(RuntimeError, match="not enough memory"):
        force_to_bf16(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("thing", [3, "model", None, [torch.ones(2)], torch.ones(2)])
def test_what_is_no_network_is_refused(thing: object) -> None:
    with pytest.raises(TypeError, match=r"force_to_bf16 takes a torch\.nn\.Module"):
        force_to_bf16(thing)


# ---- LoRA networks ----


class LoraModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lora_down = nn.Linear(4, 2, bias=False)
        self.lora_up = nn.Linear(2, 4, bias=False)
        self.register_buffer("alpha", torch.tensor(1.0))


def test_lora_modules_in_lists_are_found() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet_loras = [LoraModule(), LoraModule()]
            self.text_encoder_loras = [LoraModule()]
            self.add_module("first", self.unet_loras[0])  # some are children as well: counted once
            self.own = nn.Parameter(torch.ones(3))

    network = Network()
    assert force_to_bf16(network) == (7, 0)
    for lora in network.unet_loras + network.text_encoder_loras:
        assert lora.lora_down.weight.dtype == lora.lora_up.weight.dtype == BF16
        assert lora.alpha.dtype == torch.float32


def test_a_plain_object_with_the_lists_is_a_network() -> None:
    network = SimpleNamespace(unet_loras=[LoraModule()], text_encoder_loras=None)
    assert force_to_bf16(network) == (2, 0)


def test_a_gradient_in_a_list_is_named_with_its_place() -> None:
    network = SimpleNamespace(unet_loras=[LoraModule(), LoraModule()])
    network.unet_loras[1].lora_up.weight.grad = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"'unet_loras\[1\]\.lora_up\.weight' has a gradient"):
        force_to_bf16(network)
    assert network.unet_loras[0].lora_up.weight.dtype == torch.float32


# ---- modes, lifetime, threads ----


def test_inside_inference_mode_the_parameters_can_still_train() -> None:
    model = nn.Linear(3, 3)
    with torch.inference_mode():
        force_to_bf16(model)
    assert not model.weight.is_inference()
    model(torch.ones(1, 3, dtype=BF16)).sum().backward()
    assert model.weight.grad is not None


def test_parameters_made_in_inference_mode_are_converted() -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 3)
        both = torch.randn(10)
        model.a, model.b = nn.Parameter(both[:6]), nn.Parameter(both[4:])
    expected = [p.to(BF16) for p in model.parameters()]
    assert force_to_bf16(model) == (4, 0)
    for p, e in zip(model.parameters(), expected, strict=True):
        assert_same_bits(p, e)


def test_nothing_is_leaked_and_the_old_memory_goes() -> None:
    model = nn.Linear(64, 64)
    old = weakref.ref(model.weight.untyped_storage())
    gc.collect()
    assert old() is not None
    force_to_bf16(model)
    gc.collect()
    assert old() is None
    parameter = weakref.ref(model.weight)
    del model
    gc.collect()
    assert parameter() is None


def test_other_threads_run_during_the_conversion() -> None:
    model = Holder(p=torch.ones(40_000_000))  # at least 20 ms on any machine
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            time.sleep(0.0005)
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks[0]
    force_to_bf16(model)
    during = ticks[0] - before
    stop.set()
    thread.join()
    assert during >= 5  # allocating and exchanging let others in once or twice


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_parameters_on_a_gpu_are_converted_there() -> None:
    base = torch.randn(100, device="cuda")
    holder = Holder(a=torch.randn(7, 5, device="cuda"), b=nn.Parameter(base[:60]), c=nn.Parameter(base[50:]))
    expected = {name: p.detach().to(BF16) for name, p in holder.named_parameters()}
    assert force_to_bf16(holder) == (3, 0)
    for name, p in holder.named_parameters():
        assert p.is_cuda
        assert_same_bits(p, expected[name])
    assert share(holder.b, holder.c)
