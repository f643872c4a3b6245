"""What of a model is streamed, what is not, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import viking
from support.models import HIDDEN, Net, build, hijack, wrap
from support.training import assert_same, inputs, train
from viking.nn.eligible import SMALLEST_BYTES


def attach(model: nn.Module, **how: Any) -> nn.Module:
    return viking.attach(model, "cpu", progress=False, **{"weights_budget": 0, **how})


def reasons(model: nn.Module) -> dict[str, str]:
    return {w.name: w.reason for w in viking.stats(model).weights if w.path == "unmanaged"}


def managed(model: nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if "_layer_memory_manager" in m.__dict__}


def big() -> nn.Linear:
    return nn.Linear(64, 64).requires_grad_(False)


class Upside(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


class PlainSubclass(nn.Linear):
    pass


class Quantised(torch.Tensor):
    """A wrapper subclass as torchao makes them: it has a shape and no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=False)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*[a.inner if isinstance(a, Quantised) else a for a in args], **(kwargs or {}))
        return Quantised(out) if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default) else out


def with_weight(make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Linear:
    linear = big()
    linear.weight = nn.Parameter(make(linear.weight.detach()), requires_grad=False)
    return linear


def trained_bias() -> nn.Linear:
    linear = big()
    linear.bias.requires_grad_(True)
    return linear


def made_in_inference_mode() -> nn.Linear:
    with torch.inference_mode():
        return big()


def hidden_forward() -> nn.Linear:
    linear = big()
    linear.forward = lambda x: nn.functional.linear(x, linear.weight)
    return linear


UNSTREAMED = {
    "small": (lambda: nn.Linear(8, 8).requires_grad_(False), "it is small"),
    "trained": (lambda: nn.Linear(64, 64), "it is trained"),
    "trained bias": (trained_bias, "it is trained"),
    "fp64": (lambda: big().double(), "its dtype is torch.float64"),
    "fp8": (lambda: with_weight(lambda w: w.to(torch.float8_e4m3fn)), "its dtype is torch.float8_e4m3fn"),
    "sparse": (lambda: with_weight(torch.Tensor.to_sparse), "its weight is sparse"),
    "empty": (lambda: nn.Linear(0, 64, bias=False).requires_grad_(False), "it is empty"),
    "no rows": (lambda: nn.Linear(64, 0, bias=False).requires_grad_(False), "it is empty"),
    "parametrized": (lambda: parametrizations.orthogonal(big()).requires_grad_(False), "parametrized"),
    "weight_norm": (lambda: nn.utils.weight_norm(big()).requires_grad_(False), "no weight parameter of its own"),
    "own forward": (lambda: Upside(64, 64).requires_grad_(False), "Upside has a forward of its own"),
    "quantised": (lambda: with_weight(Quantised), "Quantised"),
    "gaps": (lambda: with_weight(lambda w: w.repeat(1, 2)[:, ::2]), "its memory has gaps"),
    "expanded": (lambda: with_weight(lambda w: w[:1].expand(64, 64)), "its memory has gaps"),
    "inference": (made_in_inference_mode, "it was made in inference mode"),
    "hidden": (hidden_forward, "its forward was replaced"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Initializing zero-element")
@pytest.mark.parametrize("kind", UNSTREAMED)
def test_what_is_not_streamed_says_why_and_works_on(kind: str) -> None:
    make, reason = UNSTREAMED[kind]
    odd = make()
    x = torch.randn(3, odd.in_features, dtype=torch.float64 if kind == "fp64" else torch.float32)
    works = kind not in ("fp8", "sparse")
    expected = odd(x) if works else None
    model = nn.ModuleDict({"odd": odd, "plain": big()})
    before = dict(odd.__dict__)

    attach(model)

    assert managed(model) == {"plain"}
    (name,) = [n for n in reasons(model) if n.startswith("odd")]
    assert reason in reasons(model)[name]
    assert odd.__dict__.keys() == before.keys()
    if works:
        assert torch.equal(odd(x), expected)


@pytest.mark.parametrize("subclass", [PlainSubclass, nn.modules.linear.NonDynamicallyQuantizableLinear])
def test_a_subclass_that_keeps_the_forward_is_streamed(subclass: type[nn.Linear]) -> None:
    model = nn.Sequential(subclass(64, 64)).requires_grad_(False)
    x = inputs(0)
    expected = model(x)

    attach(model)

    assert managed(model) == {"0"}
    assert torch.equal(model(x), expected)


def test_the_smallest_that_is_streamed_is_named_by_bytes() -> None:
    side = 32
    assert side * side * 4 == SMALLEST_BYTES["cpu"]
    model = nn.ModuleList([nn.Linear(side, side, bias=False), nn.Linear(side, side - 1, bias=False)])

    attach(model.requires_grad_(False))

    assert managed(model) == {"0"}
    assert reasons(model) == {"1": "it is small"}


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, nn.TransformerEncoderLayer])
def test_parents_that_read_the_weights_of_their_children_keep_them(kind: Any) -> None:
    module = kind(64, 4, batch_first=True, **({"dim_feedforward": 64} if kind is nn.TransformerEncoderLayer else {}))
    module.requires_grad_(False).eval()
    model = nn.ModuleDict({"attention": module, "plain": big()})
    x = inputs(0)
    call = (lambda: module(x, x, x)[0]) if kind is nn.MultiheadAttention else (lambda: module(x))
    expected = call()

    attach(model)

    assert managed(model) == {"plain"}
    assert "its parent reads the weight without calling it" in reasons(model).values()
    assert torch.equal(call(), expected)
    with torch.no_grad():
        assert torch.allclose(call(), expected, atol=1e-6)


# ---- shared memory ----


def test_a_weight_tied_to_an_embedding_stays_with_it() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(128, 64), "head": nn.Linear(64, 128, bias=False), "plain": big()})
    model.head.weight = model.embed.weight
    model.requires_grad_(False)

    attach(model)

    assert managed(model) == {"plain"}
    assert reasons(model) == {"head": "its memory is shared with a module that is not streamed"}
    assert model.head.weight is model.embed.weight


def test_memory_shared_with_what_is_not_streamed_is_followed_through_ties() -> None:
    """a and b share one storage, b's bias and the norm's weight another: none of them may be torn apart."""
    both = torch.randn(128, 64)
    bias = torch.randn(128)
    model = nn.ModuleDict({"a": big(), "b": big(), "norm": nn.LayerNorm(64), "plain": big()}).requires_grad_(False)
    model.a.weight.data, model.b.weight.data = both[:64], both[32:96]
    model.b.bias.data, model.norm.weight.data = bias[:64], bias[32:96]

    attach(model)

    assert managed(model) == {"plain"}
    assert set(reasons(model)) == {"a", "b"}


def test_two_linears_with_one_parameter_are_one_weight_and_tied_afterwards() -> None:
    model = nn.Sequential(big(), big(), big())
    model[2].weight = model[0].weight
    x = inputs(0)
    expected = model(x)

    attach(model)
    first, last = model[0]._layer_memory_manager, model[2]._layer_memory_manager

    assert first.weight == last.weight != model[1]._layer_memory_manager.weight
    assert model[2].weight is model[0].weight
    for _ in range(3):
        assert torch.equal(model(x), expected)
    with torch.no_grad():
        model[0].weight.add_(1)
    assert not torch.equal(model(x), expected)
    viking.detach(model)
    assert model[2].weight is model[0].weight


def test_views_of_one_storage_stay_views_of_one_storage() -> None:
    storage = torch.randn(3 * 64, 64)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))).requires_grad_(False)
    for i, linear in enumerate(model):
        linear.weight.data = storage[32 * i : 32 * i + 64]  # each overlaps the next
    x = inputs(0)
    expected = model(x)

    attach(model)

    assert len({linear._layer_memory_manager.weight for linear in model}) == 1
    assert torch.equal(model(x), expected)
    with torch.no_grad():
        model[1].weight.zero_()
    assert not model[0].weight[32:].any()
    assert not model[2].weight[:32].any()
    assert torch.equal(model(x), torch.zeros_like(x))
    viking.detach(model)
    with torch.no_grad():
        model[0].weight.fill_(1)
    assert bool((model[1].weight[:32] == 1).all())


def part_and_outsider(offset: int) -> tuple[nn.Sequential, nn.Linear]:
    """Two Linears to attach, and one outside that begins `offset` rows after the first of them, in one storage."""
    storage = torch.randn(4 * 64, 64)
    part = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))).requires_grad_(False)
    outsider = nn.Linear(64, 64, bias=False).requires_grad_(False)
    part[0].weight.data, outsider.weight.data = storage[:64], storage[offset : offset + 64]
    return part, outsider


def test_memory_shared_with_a_module_outside_the_attached_one_stays_shared() -> None:
    part, outsider = part_and_outsider(32)
    x = inputs(0)

    with pytest.warns(UserWarning, match='^1 Linears are not streamed, as modules outside .* first: "0"'):
        attach(part)

    paths = {w.name: (w.path, w.reason) for w in viking.stats(part).weights}
    assert paths["0"] == ("unmanaged", "its memory is shared with a module outside the attached one")
    assert paths["1"][0] != "unmanaged"
    with torch.no_grad():
        outsider.weight.zero_()
    assert not part[0].weight[32:].any()
    assert torch.equal(part(x), part[1](nn.functional.linear(x, part[0].weight)))
    viking.detach(part)

    whole = nn.ModuleList([part, outsider])
    attach(whole)
    assert part[0]._layer_memory_manager.weight == outsider._layer_memory_manager.weight


@pytest.mark.parametrize("other", ["a neighbour", "a state_dict", "garbage", "the same Parameter"])
def test_who_else_holds_a_storage_may_share_no_byte_of_it(other: str) -> None:
    part, outsider = part_and_outsider(64 if other == "a neighbour" else 32)
    state = None
    if other == "a state_dict":
        del outsider
        state = part.state_dict()
    elif other == "garbage":
        outsider.itself = [outsider]
        del outsider
    elif other == "the same Parameter":
        outsider.weight = part[0].weight

    attach(part)

    assert all("_layer_memory_manager" in linear.__dict__ for linear in part)
    assert state is None or torch.equal(state["0.weight"], part[0].weight)


def test_weights_that_only_lie_beside_each_other_stream_alone() -> None:
    storage = torch.randn(2 * 64, 64)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))).requires_grad_(False)
    model[0].weight.data, model[1].weight.data = storage[:64], storage[64:]

    attach(model)

    assert model[0]._layer_memory_manager.weight != model[1]._layer_memory_manager.weight


def test_one_linear_in_two_places_is_managed_once() -> None:
    shared = big()
    model = nn.Sequential(shared, nn.GELU(), shared)
    x = inputs(0)
    expected = model(x)

    attach(model)

    assert torch.equal(model(x), expected)
    assert shared._layer_memory_manager.uses == 2
    viking.detach(model)
    assert "forward" not in shared.__dict__


def test_a_transposed_weight_streams_with_its_strides() -> None:
    linear = nn.Linear(64, 96, bias=False).requires_grad_(False)
    linear.weight.data = torch.randn(64, 96).t()
    model = nn.Sequential(linear)
    x = inputs(0)
    expected = model(x)

    attach(model)

    assert managed(model) == {"0"}
    assert linear.weight.stride() == (1, 96)
    weight, _, ticket = linear._layer_memory_manager.acquire()
    assert weight.stride() == (1, 96)
    linear._layer_memory_manager.release(ticket)
    assert torch.equal(model(x), expected)


# ---- the rest of the model ----


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Parameter(torch.randn(64))
        self.register_buffer("buffer", torch.randn(64))
        self.register_buffer("absent", None)
        self.conv = nn.Conv1d(64, 64, 1)
        self.norm = nn.BatchNorm1d(64)
        self.embedding = nn.Embedding(4, 64)
        self.linear = big()
        self.bilinear = nn.Bilinear(64, 64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2) * self.bare + self.buffer
        return self.bilinear(self.linear(y), y) + self.embedding(torch.tensor(1))[:8]


def test_modules_of_other_kinds_are_left_as_they_are() -> None:
    model = Zoo().requires_grad_(False).eval()
    x = inputs(0)
    expected = model(x)
    identities = {
        name: (id(t), t.data_ptr())
        for name, t in [*model.named_parameters(), *model.named_buffers()]
        if not name.startswith("linear.")
    }

    attach(model)

    assert managed(model) == {"linear"}
    assert identities == {
        name: (id(t), t.data_ptr())
        for name, t in [*model.named_parameters(), *model.named_buffers()]
        if not name.startswith("linear.")
    }
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("what", ["module", "parent", "weight", "bias"])
def test_what_is_ignored_is_left_alone(what: str) -> None:
    model = nn.Sequential(nn.Sequential(big()), big())
    linear = model[0][0]
    item = {"module": linear, "parent": model[0], "weight": linear.weight, "bias": linear.bias}[what]
    pointer = linear.weight.data_ptr()

    attach(model, ignore=[item])

    assert managed(model) == {"1"}
    assert linear.weight.data_ptr() == pointer
    assert reasons(model) == ({"0.0": "a parameter of it is ignored"} if what in ("weight", "bias") else {})


def test_ignored_tensors_may_be_on_the_meta_device() -> None:
    model = nn.Module()
    model.buffer_holder = nn.Module()
    model.buffer_holder.register_buffer("cache", torch.empty(4, device="meta"))
    model.linear = big()

    attach(model, ignore=[model.buffer_holder.cache])

    assert managed(model) == {"linear"}
    assert model.buffer_holder.cache.is_meta


def test_a_root_that_is_a_linear_itself() -> None:
    linear = big()
    x = inputs(0).requires_grad_(True)
    expected = linear(x)

    assert attach(linear) is linear

    assert managed(linear) == {""}
    assert torch.equal(linear(x), expected)
    viking.detach(linear)
    assert set(linear.__dict__) == set(big().__dict__)


def test_a_model_without_anything_to_stream() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    expected = model(x)

    attach(model)

    assert torch.equal(model(x), expected)
    stats = viking.stats(model)
    assert (stats.resident_bytes, stats.streamed_bytes, stats.slab_bytes) == (0, 0, 0)
    viking.detach(model)


# ---- late comers ----


def test_linears_added_after_attach_are_managed_at_the_next_entry() -> None:
    model = nn.Sequential(big(), big())
    attach(model)
    model(inputs(0))
    late = big()
    with torch.no_grad():
        expected = late(model(inputs(0)))

    model.append(late)

    assert torch.equal(model(inputs(0)), expected)
    assert managed(model) == {"0", "1", "2"}
    viking.detach(model)
    assert managed(model) == set()


def test_wrappers_put_in_after_attach_train_as_those_put_in_before() -> None:
    late = Net(checkpointing="early stop")
    attach(late)
    with torch.no_grad():
        late(inputs(7))
    wrap(late)

    mine = train(late, [p for p in late.parameters() if p.requires_grad])

    assert_same(mine, train(*build(checkpointing="early stop")))
    assert len(managed(late)) == 14


def test_two_adapters_over_each_other_one_before_and_one_after_attach() -> None:
    outcomes = []
    for streamed in (True, False):
        model = Net()
        first = hijack(model, seed=3)
        if streamed:
            attach(model)
        second = hijack(model, seed=4)
        outcomes.append(train(model, [*first.parameters(), *second.parameters()]))

    assert_same(*outcomes)


def test_modules_made_elsewhere_cost_an_attached_model_nothing() -> None:
    model, trained = build()
    attach(model)
    train(model, trained, 3)
    before = viking.stats(model)

    train(model, trained, 5, before_step=lambda step: nn.Sequential(nn.Linear(2, 2)))

    after = viking.stats(model)
    assert after.replans == before.replans
    assert after.demand_fetches == before.demand_fetches


# ---- parts of models ----


def test_a_parent_attached_after_its_child_takes_the_rest() -> None:
    model, trained = build(checkpointing="reentrant")
    attach(model.blocks[1])
    assert len(managed(model)) == 4

    attach(model)

    assert len(managed(model)) == 14
    assert len(viking.stats(model.blocks[1]).weights) >= 4
    assert_same(train(model, trained), train(*build(checkpointing="reentrant")))


@pytest.mark.parametrize("order", ["child first", "parent first"])
@pytest.mark.parametrize("attached", ["child first", "parent first"])
def test_nested_models_detach_in_either_order(attached: str, order: str) -> None:
    model, trained = build()
    child = model.blocks[1]
    keys = {name: set(m.__dict__) for name, m in model.named_modules()}
    for part in (child, model) if attached == "child first" else (model, child):
        attach(part)
    train(model, trained, 2)

    for part in (child, model) if order == "child first" else (model, child):
        viking.detach(part)
        train(model, trained, 2)

    assert keys == {name: set(m.__dict__) for name, m in model.named_modules()}
    assert managed(model) == set()
    fresh, its_trained = build()
    train(fresh, its_trained, 2)
    train(fresh, its_trained, 2)
    theirs = train(fresh, its_trained, 2)
    assert all(torch.equal(p, w) for p, w in zip(trained, theirs.weights, strict=True))


def test_after_its_child_was_detached_the_parent_takes_it_at_the_next_entry() -> None:
    model, _ = build()
    attach(model.blocks[1])
    attach(model)
    viking.detach(model.blocks[1])

    model(inputs(0))

    assert len(managed(model)) == 14


def test_attaching_changes_no_random_state_and_lays_out_the_same_every_time() -> None:
    layouts = []
    for _ in range(2):
        model, trained = build(depth=5)
        torch.manual_seed(3)
        state = torch.get_rng_state()
        attach(model, weights_budget=300_000)
        assert torch.equal(torch.get_rng_state(), state)
        train(model, trained, 3)
        slab = next(
            m.__dict__["_layer_memory_manager"] for m in model.modules() if "_layer_memory_manager" in m.__dict__
        ).manager.device.slab.data_ptr()
        layouts.append(
            [
                (
                    n,
                    m._layer_memory_manager.path,
                    m._layer_memory_manager.device_ptr and m._layer_memory_manager.device_ptr - slab,
                )
                for n, m in model.named_modules()
                if n in managed(model)
            ]
        )
        viking.detach(model)

    assert layouts[0] == layouts[1]
    assert {path for _, path, _ in layouts[0]} == {"resident", "streamed"}


def test_widths_and_dtypes_may_be_mixed() -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, 200), nn.Linear(200, 50).bfloat16(), nn.Linear(50, HIDDEN).half())
    model.requires_grad_(False)

    def run(x: torch.Tensor) -> torch.Tensor:
        for linear in model:
            x = linear(x.to(linear.weight.dtype))
        return x

    expected = run(inputs(0))
    attach(model)

    assert torch.equal(run(inputs(0)), expected)
    assert managed(model) == {"0", "1", "2"}
