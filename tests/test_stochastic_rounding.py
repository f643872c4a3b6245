"""viking.stochastic_rounding: bf16 weights that move by what the optimizer computed, on average and reproducibly."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import viking
from viking.optim import bits, rounding
from viking.optim.bits import key_of, round_, round_by_torch

BF16 = torch.bfloat16

FAMILIES = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p),
}


def weights(dtype: torch.dtype = BF16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(8, 16), (16, 8), (5,), (3, 4, 2, 2)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(BF16).to(parameter.dtype)


def run(opt: torch.optim.Optimizer, parameters: list[nn.Parameter], first: int, steps: int) -> None:
    for step in range(first, first + steps):
        give_gradients(parameters, step)
        opt.step()
        opt.zero_grad()


# ---- the rounding itself ----


@given(
    values=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200),
    counts=st.lists(st.integers(0, 60), max_size=4),
    seed=st.integers(-(2**63), 2**64 - 1),
)
@settings(deadline=None)
def test_torch_operations_and_the_native_kernel_give_the_same_bits(values, counts, seed):
    patterns = torch.tensor([value - 2**32 if value >> 31 else value for value in values], dtype=torch.int32)
    source = patterns.view(torch.float32)
    cut = []
    for count in counts:
        cut.append(min(count, len(values) - sum(cut)))
    cut.append(len(values) - sum(cut))
    keys = [key_of(seed, index, 3) for index in range(len(cut))]
    native = [torch.empty(count, dtype=BF16) for count in cut]
    round_(native, source, keys)
    by_torch = round_by_torch(source, cut, keys)
    assert torch.equal(by_torch.view(torch.int16), torch.cat(native).view(torch.int16))


def test_both_agree_on_many_values():
    source = torch.randn(1_000_003, generator=torch.Generator().manual_seed(2)) * 1e-3
    native = torch.empty(source.shape, dtype=BF16)
    round_([native], source, [key_of(0, 0, 0)])
    assert torch.equal(native, round_by_torch(source, [source.numel()], [key_of(0, 0, 0)]))
    step = torch.exp2(torch.floor(torch.log2(source.abs())) - 7)
    assert ((native.float() - source).abs() <= step).all()
    error = ((native.float() - source) / step).mean().item()
    assert abs(error) < 5 * 0.41 / 1000  # the deviation of one rounding is at most 0.41 steps here


@pytest.mark.parametrize("strided", [False, True])
def test_pieces_of_a_large_weight_have_the_bits_of_the_whole(monkeypatch, strided):
    monkeypatch.setattr(bits, "PIECE_ELEMENTS", 1000)
    source = torch.randn(2 * 3 * 37 * 41, generator=torch.Generator().manual_seed(3))
    whole = torch.empty(2, 3, 37, 41, dtype=BF16)
    bits.round_([whole], source, [key_of(4, 5, 6)])
    pieces = torch.empty_like(whole)
    if strided:
        pieces = pieces.to(memory_format=torch.channels_last)
    bits._round_large_(pieces, source, key_of(4, 5, 6))
    assert torch.equal(whole, pieces)


@pytest.mark.parametrize(
    ("destination", "source"),
    [
        (torch.empty(4, dtype=BF16), torch.empty(5)),
        (torch.empty(4, dtype=torch.float16), torch.empty(4)),
        (torch.empty(4, dtype=BF16), torch.empty(4, dtype=torch.float64)),
        (torch.empty(8, dtype=BF16)[::2], torch.empty(4)),
    ],
)
def test_the_native_kernel_refuses_what_it_cannot_round(destination, source):
    with pytest.raises(ValueError, match="round_to_bf16"):
        viking._engine.round_to_bf16(destination, source, 0, 0)


# ---- small updates arrive ----


def test_a_small_learning_rate_moves_a_weight_by_what_it_should():
    weight = nn.Parameter(torch.ones(4096, dtype=BF16))
    opt = viking.stochastic_rounding(torch.optim.AdamW([weight], lr=1e-5, weight_decay=0.0))
    for _ in range(2000):
        weight.grad = torch.ones_like(weight)
        opt.step()
    moved = 1.0 - weight.detach().double().mean().item()
    assert moved == pytest.approx(0.02, rel=0.05)


def test_weight_decay_alone_is_not_lost():
    weight = nn.Parameter(torch.ones(4096, dtype=BF16))
    opt = viking.stochastic_rounding(torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.01))
    for _ in range(1000):
        weight.grad = torch.zeros_like(weight)
        opt.step()
    decayed = 1.0 - weight.detach().double().mean().item()
    assert decayed == pytest.approx(1.0 - (1.0 - 1e-5) ** 1000, rel=0.05)


def test_without_it_both_are_lost():
    weight = nn.Parameter(torch.ones(8, dtype=BF16))
    opt = torch.optim.AdamW([weight], lr=1e-5, weight_decay=0.01)
    for _ in range(50):
        weight.grad = torch.ones_like(weight)
        opt.step()
    assert torch.equal(weight.detach(), torch.ones(8, dtype=BF16))


# ---- what an optimizer computes is what it computes for fp32 weights ----


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_the_fp32_step_rounded_once(name):
    narrow, wide = weights(), weights(torch.float32)
    for w, n in zip(wide, narrow, strict=True):
        w.data = n.detach().float()
    opt = viking.stochastic_rounding(FAMILIES[name](narrow), seed=5)
    reference = FAMILIES[name](wide)
    for step in range(4):
        for index, (w, n) in enumerate(zip(wide, narrow, strict=True)):
            w.data = n.detach().float()  # the same weights; the state goes on
            assert n.dtype == BF16, index
        give_gradients(narrow, step)
        give_gradients(wide, step)
        grads = [n.grad for n in narrow]
        opt.step()
        reference.step()
        assert all(n.grad is grad for n, grad in zip(narrow, grads, strict=True))
        for index, (w, n) in enumerate(zip(wide, narrow, strict=True)):
            expected = round_by_torch(w.detach().flatten(), [w.numel()], [key_of(5, index, step)])
            assert torch.equal(n.detach().flatten(), expected)
    for w, n in zip(wide, narrow, strict=True):
        for key, value in reference.state[w].items():
            mine = opt.state[n][key]
            if isinstance(value, torch.Tensor):
                assert mine.dtype == value.dtype
                assert torch.equal(mine, value)
            else:
                assert mine == value


def test_fp32_weights_beside_bf16_ones_are_stepped_as_ever():
    mixed, plain = weights(torch.float32), weights(torch.float32)
    for parameters in (mixed, plain):
        parameters[1].data = parameters[1].data.to(BF16)
    opt = viking.stochastic_rounding(torch.optim.AdamW(mixed, lr=1e-2))
    run(opt, mixed, 0, 3)
    run(torch.optim.AdamW(plain, lr=1e-2), plain, 0, 3)
    for index in (0, 2, 3):
        assert torch.equal(mixed[index], plain[index])


# ---- order, batches, resume, layout: the bits stay ----


@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam", "Adafactor"])
def test_batches_of_any_size_give_the_same_bits(name, monkeypatch):
    results = []
    for limit in (1, 1000, rounding.BATCH_BYTES):
        monkeypatch.setattr(rounding, "BATCH_BYTES", limit)
        parameters = weights()
        run(viking.stochastic_rounding(FAMILIES[name](parameters)), parameters, 0, 5)
        results.append(parameters)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD", "RMSprop", "Adagrad"])
def test_a_resumed_run_goes_on_with_the_same_bits(name):
    whole = weights()
    run(viking.stochastic_rounding(FAMILIES[name](whole), seed=9), whole, 0, 6)

    first = weights()
    opt = viking.stochastic_rounding(FAMILIES[name](first), seed=9)
    run(opt, first, 0, 3)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    opt = viking.stochastic_rounding(FAMILIES[name](second), seed=9)
    opt.load_state_dict(torch.load(file, weights_only=True))
    run(opt, second, 3, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))


def test_another_seed_or_weight_or_step_draws_other_bits():
    def after(seed: int, before: int = 0) -> torch.Tensor:
        weight = nn.Parameter(torch.ones(1000, dtype=BF16))
        opt = viking.stochastic_rounding(torch.optim.SGD([weight], lr=1e-3), seed=seed)
        for _ in range(before):
            weight.grad = torch.zeros_like(weight)
            opt.step()
        weight.grad = torch.ones_like(weight)
        opt.step()
        return weight.detach()

    assert not torch.equal(after(0), after(1))
    assert not torch.equal(after(0), after(0, before=1))
    assert torch.equal(after(7), after(7))
    two = [nn.Parameter(torch.ones(1000, dtype=BF16)) for _ in range(2)]
    opt = viking.stochastic_rounding(torch.optim.SGD(two, lr=1e-3))
    for weight in two:
        weight.grad = torch.ones_like(weight)
    opt.step()
    assert not torch.equal(*two)


def test_a_weight_without_a_gradient_keeps_its_bits_and_its_index():
    alone, among = weights(), weights()
    for parameters, skipped in ((alone, (0, 1, 2)), (among, (0,))):
        opt = viking.stochastic_rounding(torch.optim.SGD(parameters, lr=1e-2))
        give_gradients(parameters, 0)
        for index in skipped:
            parameters[index].grad = None
        opt.step()
    assert torch.equal(alone[3], among[3])
    assert torch.equal(alone[0], weights()[0])


def test_strides_do_not_show():
    plain, channels_last = (nn.Parameter(weights()[3].detach().clone()) for _ in range(2))
    channels_last.data = channels_last.data.to(memory_format=torch.channels_last)
    for weight in (plain, channels_last):
        opt = viking.stochastic_rounding(torch.optim.SGD([weight], lr=1e-2))
        weight.grad = torch.full_like(weight, 0.3)
        opt.step()
    assert torch.equal(plain, channels_last)
    assert channels_last.is_contiguous(memory_format=torch.channels_last)


# ---- what trainers do with optimizers ----


def test_the_same_object_comes_back_and_a_second_call_does_nothing():
    opt = torch.optim.AdamW(weights())
    assert viking.stochastic_rounding(opt, seed=3) is opt
    assert rounding.is_rounding(opt)
    step = opt.step
    assert viking.stochastic_rounding(opt, seed=3) is opt
    assert opt.step == step
    with pytest.raises(ValueError, match="seed 3 already"):
        viking.stochastic_rounding(opt, seed=4)


def test_a_closure_runs_once_with_gradients_enabled_and_its_loss_comes_back():
    parameters, calls = weights(), []
    opt = viking.stochastic_rounding(torch.optim.SGD(parameters, lr=1e-2))

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append(1)
        give_gradients(parameters, 0)
        return 4.5

    assert opt.step(closure) == 4.5
    assert len(calls) == 1
    assert not torch.equal(parameters[0], weights()[0])


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_made_before_or_after_work_without_a_warning(when):
    parameters = weights()
    opt = torch.optim.AdamW(parameters, lr=1e-2)
    if when == "after":
        viking.stochastic_rounding(opt)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    if when == "before":
        viking.stochastic_rounding(opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            give_gradients(parameters, step)
            opt.step()
            scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-2 / 4)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_unscales_steps_and_skips(fused):
    plain, scaled = weights(), weights()
    reference = viking.stochastic_rounding(torch.optim.AdamW(plain, lr=1e-2, fused=fused))
    opt = viking.stochastic_rounding(torch.optim.AdamW(scaled, lr=1e-2, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for parameters, the_scaler in ((plain, None), (scaled, scaler)):
        loss = sum((parameter * parameter).sum() for parameter in parameters)
        (loss if the_scaler is None else the_scaler.scale(loss)).backward()
    reference.step()
    scaler.step(opt)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))
    before = [parameter.detach().clone() for parameter in scaled]
    for parameter in scaled:
        parameter.grad = torch.full_like(parameter, float("inf"))
    scaler.scale(torch.zeros(()))
    scaler.step(opt)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, scaled, strict=True))


def test_step_hooks_run_once_a_step():
    calls = []
    opt = viking.stochastic_rounding(torch.optim.SGD(weights(), lr=0.1))
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    run(opt, opt.param_groups[0]["params"], 0, 2)
    assert calls == ["pre", "post"] * 2


def test_a_group_added_later_is_served_and_counters_count_once():
    parameters, late = weights(), nn.Parameter(torch.ones(1000, dtype=BF16))
    opt = viking.stochastic_rounding(torch.optim.AdamW(parameters, lr=1e-2))
    run(opt, parameters, 0, 2)
    opt.add_param_group({"params": [late], "lr": 1e-4})
    run(opt, [*parameters, late], 2, 1)
    assert late.float().std() > 0  # rounded by chance
    assert opt.state[late]["exp_avg"].dtype == torch.float32
    assert [group[rounding.STEP_KEY] for group in opt.param_groups] == [3, 3]
    assert opt.state[parameters[0]]["step"] == 3


class Counting(torch.optim.Optimizer):
    """Keeps a counter in its group, as some optimizers do."""

    def __init__(self, parameters, shared=False):
        super().__init__(parameters, {"k": 0, "sum": 0.0})
        self.shared = shared

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                parameter.sub_(0.001 * group["k"])
                if self.shared:
                    group["sum"] += float(parameter.grad.sum())


def test_a_counter_in_the_group_counts_once_a_step(monkeypatch):
    monkeypatch.setattr(rounding, "BATCH_BYTES", 1)
    parameters = weights()
    opt = viking.stochastic_rounding(Counting(parameters))
    run(opt, parameters, 0, 3)
    assert opt.param_groups[0]["k"] == 3


def test_a_class_that_computes_a_scalar_from_all_weights_is_found_out(monkeypatch):
    monkeypatch.setattr(rounding, "BATCH_BYTES", 1)
    parameters = weights()
    opt = viking.stochastic_rounding(Counting(parameters, shared=True))
    with pytest.raises(RuntimeError, match="Counting computes 'sum' from all weights"):
        run(opt, parameters, 0, 1)


def test_an_exception_leaves_weights_gradients_and_groups_as_they_were():
    parameters = weights()
    opt = viking.stochastic_rounding(torch.optim.AdamW(parameters))

    def fail(self):
        raise KeyboardInterrupt

    opt._stochastic_rounding.own_step = fail
    give_gradients(parameters, 0)
    grads, groups = [parameter.grad for parameter in parameters], opt.param_groups
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    assert opt.param_groups is groups
    assert opt.param_groups[0]["params"] == parameters
    for parameter, original, grad in zip(parameters, weights(), grads, strict=True):
        assert parameter.dtype == BF16
        assert torch.equal(parameter, original)
        assert parameter.grad is grad


def test_autograd_notices_that_a_weight_has_changed():
    weight = nn.Parameter(torch.ones(4, dtype=BF16))
    opt = viking.stochastic_rounding(torch.optim.SGD([weight], lr=0.1))
    loss = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_training_goes_on_through_backward():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(BF16)
    opt = viking.stochastic_rounding(torch.optim.AdamW(model.parameters(), lr=1e-2))
    x = torch.randn(64, 8).to(BF16)
    target = x.sum(dim=1, keepdim=True).tanh()
    losses = []
    for _ in range(150):
        opt.zero_grad()
        loss = ((model(x) - target).float() ** 2).mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20


def test_a_deep_copy_is_an_ordinary_optimizer():
    opt = viking.stochastic_rounding(torch.optim.AdamW(weights()))
    assert not rounding.is_rounding(copy.deepcopy(opt))


def test_the_fp32_copies_stay_within_the_batch():
    """Measured by torch's own allocations: never more than the largest weight needs beside the state."""
    parameters = [nn.Parameter(torch.zeros(1 << 20, dtype=BF16)) for _ in range(8)]
    opt = viking.stochastic_rounding(torch.optim.SGD(parameters, lr=0.1))
    seen = []
    own = opt._stochastic_rounding.own_step

    def step(self):
        seen.append(sum(p.numel() for g in self.param_groups for p in g["params"] if p.dtype == torch.float32))
        assert sum(p.dtype == torch.float32 for p in parameters) == len(self.param_groups[0]["params"])
        own(self)

    opt._stochastic_rounding.own_step = step
    rounding_bytes = 8 * (1 << 20)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "BATCH_BYTES", 2 * rounding_bytes)
        opt.step()
    assert seen == [2 << 20] * 4


class Hoarding(torch.optim.Optimizer):
    """Keeps the gradient that it was shown, not a copy of it."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("first", parameter.grad)
            parameter.sub_(self.state[parameter]["first"])


def test_a_state_that_keeps_the_gradient_keeps_its_values():
    parameters = weights()
    opt = viking.stochastic_rounding(Hoarding(parameters))
    give_gradients(parameters, 0)
    expected = [parameter.grad.float() for parameter in parameters]
    run(opt, parameters, 0, 3)
    for parameter, first in zip(parameters, expected, strict=True):
        assert torch.equal(opt.state[parameter]["first"], first)


# ---- what cannot be served says so ----


class Prodigy(torch.optim.SGD):
    """Stands in for the class of that name, which is known by it."""


class Automagic2(torch.optim.SGD):
    """The same."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS.*one direction from all weights"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam.*sparse"),
        (lambda p: Prodigy(p, lr=1), "Prodigy.*one step size from all weights"),
        (lambda p: Automagic2(p, lr=1), "Automagic2.*inside the backward pass"),
        (lambda p: torch.optim.SGD(p, lr=1, differentiable=True), "differentiable"),
        (lambda p: p, "takes a torch.optim.Optimizer, not list"),
    ],
)
def test_the_refusal_names_the_class_and_the_reason(make, words):
    with pytest.raises(TypeError, match=words):
        viking.stochastic_rounding(make(weights()))


def test_a_sparse_gradient_is_refused_when_it_comes():
    table = nn.Embedding(10, 4, sparse=True).to(BF16)
    opt = viking.stochastic_rounding(torch.optim.SGD(table.parameters(), lr=0.1))
    table(torch.tensor([1, 2])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        opt.step()
    assert torch.equal(table.weight, before)


def test_a_step_that_somebody_has_replaced_is_refused():
    opt = torch.optim.SGD(weights(), lr=0.1)
    opt.step = lambda closure=None: None
    with pytest.raises(TypeError, match="replaced already"):
        viking.stochastic_rounding(opt)


# ---- other libraries ----


def test_bitsandbytes_keeps_its_8_bit_state_and_the_weights_move():
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    weight = nn.Parameter(torch.ones(8192, dtype=BF16))
    opt = viking.stochastic_rounding(bitsandbytes.optim.AdamW8bit([weight], lr=1e-5, weight_decay=0.0))
    for _ in range(300):
        weight.grad = torch.ones_like(weight)
        opt.step()
    assert opt.state[weight]["state1"].dtype == torch.uint8
    assert weight.dtype == BF16
    assert 1.0 - weight.detach().double().mean().item() == pytest.approx(0.003, rel=0.1)
    state = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(state)
    assert opt.state[weight]["state1"].dtype == torch.uint8


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_accelerates_wrapper_is_served_through_the_optimizer_in_it(wrapped_first):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    parameters, plain = weights(), weights()
    opt = torch.optim.AdamW(parameters, lr=1e-3)
    if wrapped_first:
        viking.stochastic_rounding(opt)
    prepared = accelerate.Accelerator(cpu=True).prepare(opt)
    if not wrapped_first:
        assert viking.stochastic_rounding(prepared) is prepared
    assert rounding.is_rounding(prepared)
    run(prepared, parameters, 0, 3)
    run(viking.stochastic_rounding(torch.optim.AdamW(plain, lr=1e-3)), plain, 0, 3)
    assert all(torch.equal(a, b) for a, b in zip(parameters, plain, strict=True))


# ---- on a GPU ----

cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
on_cuda = [pytest.param("cuda", marks=cuda)]


@pytest.mark.parametrize("device", on_cuda)
@pytest.mark.parametrize("counts", [[100_003], [1, 2, 50_000, 7, 49_993], [64] * 500])
def test_a_gpu_draws_the_same_bits_as_the_cpu(device, counts):
    source = torch.randn(sum(counts), generator=torch.Generator().manual_seed(1))
    source[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    keys = [key_of(3, index, 9) for index in range(len(counts))]
    expected = [torch.empty(count, dtype=BF16) for count in counts]
    actual = [torch.empty(count, dtype=BF16, device=device) for count in counts]
    round_(expected, source, keys)
    round_(actual, source.to(device), keys)
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one.view(torch.int16), other.cpu().view(torch.int16))


@pytest.mark.parametrize("device", on_cuda)
@pytest.mark.parametrize("fused", [None, True])
def test_a_step_on_a_gpu_waits_for_nothing_and_moves_the_weights(device, fused):
    parameters = [nn.Parameter(torch.ones(shape, dtype=BF16, device=device)) for shape in ((64, 64), (300,), (128, 32))]
    opt = viking.stochastic_rounding(torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.0, fused=fused))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    opt.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(499):
            opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    moved = 1.0 - torch.cat([parameter.detach().flatten() for parameter in parameters]).double().mean().item()
    assert moved == pytest.approx(0.005, rel=0.1)


@pytest.mark.parametrize("device", on_cuda)
def test_bitsandbytes_on_a_gpu(device):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    weight = nn.Parameter(torch.ones(64, 1024, dtype=BF16, device=device))
    opt = viking.stochastic_rounding(bitsandbytes.optim.AdamW8bit([weight], lr=1e-5, weight_decay=0.0))
    for _ in range(500):
        weight.grad = torch.ones_like(weight)
        opt.step()
    assert opt.state[weight]["state1"].dtype == torch.uint8
    assert 1.0 - weight.detach().double().mean().item() == pytest.approx(0.005, rel=0.1)
