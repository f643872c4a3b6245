"""What scripts do to a module, done to an attached model and to its plain twin: the same happens, or one sentence."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import viking
from support.models import Net
from support.state import Snapshot
from support.training import inputs

OURS = {"_memory_manager", "_layer_memory_manager", "_viking_restore", "_apply", "__prepare_scriptable__"}


def build(count: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(count)), nn.LayerNorm(64))
    return model.requires_grad_(False)


def attach(model: nn.Module, **how: Any) -> nn.Module:
    return viking.attach(model, "cpu", progress=False, **{"weights_budget": 0, **how})


def managed(model: nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if "_layer_memory_manager" in m.__dict__}


def reason(model: nn.Module, name: str) -> str:
    return next(w.reason for w in viking.stats(model).weights if w.name == name and w.path == "unmanaged")


def outcome(model: nn.Module, x: torch.Tensor) -> Any:
    """Output and input's gradient, or the exception; what the parameters are."""
    parameters = [(n, p.dtype, p.device, p.shape, p.stride(), p.requires_grad) for n, p in model.named_parameters()]
    x = x.to(next(iter(model.parameters())).dtype).requires_grad_(True)
    try:
        y = model(x)
        (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
    except Exception as error:
        return type(error), str(error).splitlines()[0], parameters
    return y.detach().clone(), gradient, parameters


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


class OtherClass(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * 2, self.bias)


class Bytes(nn.Module):
    """As quantisers put in the place of a Linear: its weight is a buffer of bytes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


def pruned_for_good(m: nn.Module) -> None:
    prune.l1_unstructured(m[0], "weight", amount=0.3)
    m(inputs(3))
    prune.remove(m[0], "weight")


def weight_norm_and_back(m: nn.Module) -> None:
    parametrizations.weight_norm(m[0])
    m(inputs(3))
    parametrize.remove_parametrizations(m[0], "weight")


def weight_deleted_and_given_as(kind: str) -> Callable[[nn.Module], None]:
    def change(m: nn.Module) -> None:
        weight = m[0].weight.detach() * 2
        del m[0].weight
        if kind == "buffer":
            m[0].register_buffer("weight", weight)
        elif kind == "attribute":
            m[0].weight = weight

    return change


def data(value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def change(m: nn.Module) -> None:
        m[1].weight.data = value(m[1].weight.data)

    return change


def parameter(value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def change(m: nn.Module) -> None:
        m[1].weight = nn.Parameter(value(m[1].weight.detach()), requires_grad=False)

    return change


def with_seed(change: Callable[[nn.Module], Any]) -> Callable[[nn.Module], None]:
    def seeded(m: nn.Module) -> None:
        torch.manual_seed(5)
        change(m)

    return seeded


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "half and float": lambda m: m.half().float(),
    "double": nn.Module.double,
    "double and float": lambda m: m.double().float(),
    "cpu": nn.Module.cpu,
    "to a device": lambda m: m.to("cpu"),
    "to a dtype": lambda m: m.to(torch.bfloat16),
    "to both": lambda m: m.to("cpu", torch.float16, non_blocking=True),
    "to a tensor's": lambda m: m.to(torch.zeros(1, dtype=torch.bfloat16)),
    "to another memory format": lambda m: m.to(memory_format=torch.channels_last),
    "to complex numbers": lambda m: m.to(torch.complex64),
    "type": lambda m: m.type(torch.float16),
    "type by name": lambda m: m.type("torch.DoubleTensor"),
    "to the meta device": lambda m: m.to("meta"),
    "a Linear to the meta device": lambda m: m[0].to("meta"),
    "emptied onto the meta device": lambda m: m.to_empty(device="meta"),
    "emptied and filled": lambda m: m.to_empty(device="cpu") and [nn.init.ones_(p) for p in m.parameters()],
    "under another default device": lambda m: _under_meta(m),
    "a Linear of two in half precision": lambda m: m[1].half(),
    "a Linear in double precision": lambda m: m[1].double(),
    "a Linear in eight bits": lambda m: m[1].to(torch.float8_e4m3fn),
    "initialised": lambda m: [nn.init.constant_(p, 0.5) for p in m.parameters()],
    "initialised by apply": lambda m: m.apply(lambda k: isinstance(k, nn.Linear) and nn.init.eye_(k.weight)),
    "reset": with_seed(lambda m: [k.reset_parameters() for k in m]),
    "old weight norm": lambda m: nn.utils.weight_norm(m[0]),
    "weight norm": lambda m: parametrizations.weight_norm(m[0]),
    "weight norm and back": weight_norm_and_back,
    "spectral norm": with_seed(lambda m: parametrizations.spectral_norm(m.eval()[1])),
    "orthogonal": lambda m: parametrizations.orthogonal(m[0]),
    "parametrized bias": lambda m: parametrize.register_parametrization(m[0], "bias", nn.Tanh()),
    "pruned": lambda m: prune.l1_unstructured(m[0], "weight", amount=0.3),
    "pruned for good": pruned_for_good,
    "another Parameter": parameter(torch.ones_like),
    "a Parameter of bytes": parameter(lambda w: torch.zeros(64, 64, dtype=torch.uint8)),
    "a Parameter of float8": parameter(lambda w: w.to(torch.float8_e5m2)),
    "a Parameter in double precision": parameter(torch.Tensor.double),
    "no weight": lambda m: setattr(m[0], "weight", None),
    "the weight deleted": weight_deleted_and_given_as("nothing"),
    "the weight as a buffer": weight_deleted_and_given_as("buffer"),
    "the weight as an attribute": weight_deleted_and_given_as("attribute"),
    "no bias": lambda m: setattr(m[0], "bias", None),
    "the bias deleted": lambda m: delattr(m[0], "bias"),
    "other data": data(lambda w: w * 2),
    "data of another dtype": data(torch.Tensor.double),
    "data with gaps": data(lambda w: torch.ones(64, 128)[:, ::2]),
    "no data": data(lambda w: torch.empty(0)),
    "other shape": lambda m: (parameter(lambda w: w[:1])(m), setattr(m[1], "bias", None)),
    "swapped contents": lambda m: torch.utils.swap_tensors(
        m[0].weight, nn.Parameter(torch.ones(64, 64), requires_grad=False)
    ),
    "swapped weights": lambda m: torch.utils.swap_tensors(m[0].weight, m[2].weight),
    "trained": lambda m: m.requires_grad_(True),
    "another class": lambda m: setattr(m[1], "__class__", OtherClass),
    "another forward": lambda m: setattr(m[1], "forward", lambda x: nn.functional.linear(x, m[1].weight * 2)),
    "another module": lambda m: m.__setitem__(1, nn.Linear(64, 64, bias=False).requires_grad_(False).to_empty(
        device="cpu").apply(lambda k: nn.init.eye_(k.weight))),
    "a module less": lambda m: m.__delitem__(1),
    "quantised to bytes": lambda m: m.__setitem__(1, Bytes(m[1])),
}


def _under_meta(m: nn.Module) -> None:
    with torch.device("meta"):
        m.to(torch.bfloat16)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:Casting complex")
@pytest.mark.filterwarnings("ignore:Complex modules", "ignore:.*is deprecated")
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_a_model_gives_what_it_gives_without_us(change: str) -> None:
    results = []
    for streamed in (True, False):
        model = build()
        if streamed:
            attach(model)
        found = [outcome(model, inputs(0))]
        CHANGES[change](model)
        found += [outcome(model, inputs(1)), outcome(model, inputs(2))]
        viking.detach(model)
        found.append(outcome(model, inputs(3)))
        assert not any(OURS & m.__dict__.keys() for m in model.modules())
        results.append(found)

    for mine, theirs in zip(*results, strict=True):
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True)), (mine, theirs)


UNSTREAMABLE = {
    "weight norm": "it has no weight parameter of its own (parametrized?)",
    "parametrized bias": "it has no bias parameter of its own (parametrized?)",
    "a Linear in double precision": "its dtype is torch.float64",
    "a Parameter of bytes": "its dtype is torch.uint8",
    "no weight": "it has no weight parameter of its own (parametrized?)",
    "data with gaps": "its memory has gaps",
    "another class": "OtherClass has a forward of its own",
}


@pytest.mark.parametrize("change", UNSTREAMABLE)
def test_what_cannot_be_streamed_any_more_becomes_an_ordinary_module_and_says_why(change: str) -> None:
    model = attach(build())
    model(inputs(0))
    name = "0" if change in ("weight norm", "parametrized bias", "no weight") else "1"
    home = model[int(name)]._layer_memory_manager.home

    CHANGES[change](model)
    outcome(model, inputs(0))

    assert managed(model) == {"0", "1", "2"} - {name}
    assert reason(model, name) == UNSTREAMABLE[change]
    assert not OURS & model[int(name)].__dict__.keys()
    assert not home.pinned


def test_what_can_be_streamed_again_is_managed_again() -> None:
    model, plain = attach(build()), build()
    good = model[1].weight
    parameter(torch.Tensor.double)(model)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        model(inputs(0))

    model[1].weight = good

    assert torch.equal(model(inputs(0)), plain(inputs(0)))
    assert managed(model) == {"0", "1", "2"}


def test_a_model_on_the_meta_device_holds_no_home_and_comes_back_by_assigned_weights() -> None:
    model, plain = attach(build()), build()
    x = inputs(0)
    expected = plain(x)
    assert torch.equal(model(x), expected)

    model.to("meta")
    totals = viking.stats(model)
    assert managed(model) == set()
    assert totals.resident_bytes + totals.streamed_bytes == 0
    model.load_state_dict({name: tensor.clone() for name, tensor in plain.state_dict().items()}, assign=True)

    assert torch.equal(model(x), expected)
    assert managed(model) == {"0", "1", "2"}


@pytest.mark.parametrize("held", [False, True])
def test_linears_that_are_replaced_go_with_the_last_who_holds_them(held: bool) -> None:
    model, plain = attach(build()), build()
    model(inputs(0))
    old = [model[1]] if held else []

    for m in (model, plain):
        m[1] = Bytes(m[1])
    assert torch.equal(model(inputs(1)), plain(inputs(1)))

    totals = viking.stats(model)
    left = sum(w.nbytes for w in viking.stats(model).weights if w.path != "unmanaged")
    assert managed(model) == {"0", "2"}
    assert totals.resident_bytes + totals.streamed_bytes == (3 if held else 2) * 16640
    assert left == 2 * 16640
    if held:
        assert torch.equal(old[0](inputs(2)), build()[1](inputs(2)))
        assert old[0]._layer_memory_manager.uses > 1
    viking.detach(model)
    assert not any(OURS & m.__dict__.keys() for m in [*model.modules(), *old])


def test_weights_assigned_by_a_state_dict_cost_one_layout() -> None:
    model, plain = attach(build()), build()
    for _ in range(3):
        model(inputs(0))
    before = viking.stats(model).replans
    state = {name: t * 2 for name, t in plain.state_dict().items()}

    for m in (model, plain):
        m.load_state_dict(state, assign=True, strict=False)

    assert torch.equal(model(inputs(0)), plain(inputs(0)))
    assert viking.stats(model).replans == before + 1


# ---- ties ----


@pytest.mark.parametrize("what", ["weight", "weight and bias", "a view"])
def test_a_tie_made_after_attach_is_one_weight_at_its_next_use_and_stays_it(what: str) -> None:
    def tie(m: nn.Module) -> None:
        if what == "a view":
            m[2].weight = nn.Parameter(m[0].weight.detach(), requires_grad=False)
        else:
            m[2].weight = m[0].weight
        if what == "weight and bias":
            m[2].bias = m[1].bias

    model, plain = attach(build()), build()
    model(inputs(0))
    for m in (model, plain):
        tie(m)
    assert torch.equal(model(inputs(0)), plain(inputs(0)))
    homes = [m._layer_memory_manager.home for m in model if isinstance(m, nn.Linear)]
    numbers = {m._layer_memory_manager.weight for m in model if isinstance(m, nn.Linear)}

    assert len(numbers) == (1 if what == "weight and bias" else 2)
    for edited in (False, True):
        for m in (model, plain) if edited else ():
            with torch.no_grad():
                m[0].weight.mul_(1.5)
        assert torch.equal(model(inputs(1)), plain(inputs(1)))
        assert [m._layer_memory_manager.home for m in model if isinstance(m, nn.Linear)] == homes
    viking.detach(model)
    assert model[2].weight.data_ptr() == model[0].weight.data_ptr()


def test_a_linear_tied_to_an_embedding_after_attach_stays_with_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head, self.between = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
            self.requires_grad_(False)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.head(self.between(self.embed(i)))

    model, plain = attach(Tied()), Tied()
    i = torch.arange(7)
    model(i)
    pointer = model.embed.weight.data_ptr()
    for m in (model, plain):
        m.head.weight = m.embed.weight

    assert torch.equal(model(i), plain(i))

    assert managed(model) == {"between"}
    assert reason(model, "head") == "its memory is shared with a module that is not streamed"
    assert model.embed.weight.data_ptr() == pointer


# ---- state, copies ----


def test_parameters_are_the_same_objects_in_the_same_order_by_every_way_to_ask() -> None:
    model = build()
    before = list(model.named_parameters())
    attach(model)
    model(inputs(0))

    ways = [model.named_parameters(), model.state_dict(keep_vars=True).items()]
    for now in ways:
        assert [(n, id(p)) for n, p in now] == [(n, id(p)) for n, p in before]
    assert [id(p) for p in model.parameters()] == [id(p) for _, p in before]
    assert [id(m.weight) for m in model] == [id(model.get_parameter(f"{i}.weight")) for i in range(4)]


def test_a_shallow_copy_computes_with_the_model_it_was_made_of() -> None:
    model = attach(build())
    x = inputs(0)
    twin = copy.copy(model)
    linear = copy.copy(model[0])

    with torch.no_grad():
        model[0].weight.mul_(2)

    assert torch.equal(twin(x), model(x))
    assert torch.equal(linear(x), model[0](x))
    viking.detach(model)
    assert torch.equal(twin(x), model(x))
    assert torch.equal(linear(x), model[0](x))


def test_shared_memory_is_refused_in_one_sentence() -> None:
    model = attach(build())

    with pytest.raises(RuntimeError, match=r"cannot be put into shared memory: call viking\.detach\(model\) first"):
        model.share_memory()

    viking.detach(model)
    model.share_memory()
    assert model[0].weight.is_shared()


# ---- hooks ----


def test_hooks_with_keywords_and_tensor_hooks_see_the_same_before_and_after_attach() -> None:
    seen: dict[bool, list[Any]] = {True: [], False: []}

    def hooks(model: nn.Module, log: list[Any]) -> None:
        def before(m: nn.Module, args: Any, kwargs: Any) -> Any:
            log.append(("before", len(args), sorted(kwargs)))
            return (), {"input": (args[0] if args else kwargs["input"]) * 1.5}

        def after(m: nn.Module, args: Any, kwargs: Any, y: torch.Tensor) -> torch.Tensor:
            log.append(("after", len(args), sorted(kwargs), y.detach().clone()))
            if y.requires_grad:
                y.register_hook(lambda g: log.append(("gradient", g.clone())))
            return y + 1

        model[1].register_forward_pre_hook(before, with_kwargs=True)
        model[1].register_forward_hook(after, with_kwargs=True, always_call=True)
        model[1].register_full_backward_pre_hook(lambda m, g: log.append(("back", g[0].clone())))

    results = []
    for streamed in (True, False):
        model = build()
        hooks(model, seen[streamed])
        if streamed:
            attach(model)
        hooks(model, seen[streamed])
        results.append(outcome(model, inputs(0)))
        viking.detach(model)
        results[-1] += outcome(model, inputs(1))

    assert all(same(a, b) for a, b in zip(*results, strict=True))
    assert len(seen[True]) == len(seen[False]) > 8
    for mine, theirs in zip(seen[True], seen[False], strict=True):
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True))


# ---- other ways to call ----


@pytest.mark.parametrize("kind", ["tensors", "Parameters", "one weight", "the same", "of another model"])
@pytest.mark.parametrize("late", [False, True], ids=["", "with late comers"])
def test_functional_call_computes_with_what_it_is_given(kind: str, late: bool) -> None:
    def given(m: nn.Module) -> dict[str, torch.Tensor]:
        other = build()
        own = {name: p for name, p in m.named_parameters() if name != "late"}
        return {
            "tensors": {name: p.detach() * 2 for name, p in own.items()},
            "Parameters": {name: nn.Parameter(p.detach() * 2) for name, p in own.items()},
            "one weight": {"1.weight": own["1.weight"].detach() * 2},
            "the same": own,
            "of another model": dict(other.named_parameters()),
        }[kind]

    model, plain = attach(build()), build()
    model(inputs(0))
    for m in (model, plain) if late else ():
        m.register_parameter("late", nn.Parameter(torch.zeros(1)))
    names = managed(model)
    homes = [model[i]._layer_memory_manager.home for i in range(3)]
    results = []
    for m in (model, plain):
        lent = given(m)
        before = {name: t.data_ptr() for name, t in lent.items()}
        x = inputs(1).requires_grad_(True)
        wanted = [x, *(t for t in lent.values() if t.requires_grad)]
        y = torch.func.functional_call(m, lent, (x,))
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), wanted), m(inputs(2))])
        assert {name: t.data_ptr() for name, t in lent.items()} == before

    assert all(same(a, b) for a, b in zip(*results, strict=True))
    assert managed(model) == names
    assert [model[i]._layer_memory_manager.home for i in range(3)] == homes
    if kind == "the same":
        assert model[0]._layer_memory_manager.uses > 3


def test_transforms_over_given_parameters_are_those_of_the_plain_model() -> None:
    results = []
    for streamed in (True, False):
        model = build()
        if streamed:
            attach(model)
        x = inputs(0)
        given = {name: p.detach() for name, p in model.named_parameters()}

        def loss(given: dict[str, torch.Tensor], model: nn.Module = model, x: torch.Tensor = x) -> torch.Tensor:
            return torch.func.functional_call(model, given, (x,)).square().sum()

        gradients = torch.func.grad(loss)(given)
        _, tangent = torch.func.jvp(loss, (given,), (given,))
        stacked = {name: torch.stack([t, t * 2]) for name, t in given.items()}
        results.append([*gradients.values(), tangent, torch.func.vmap(loss)(stacked), model(x)])

    assert all(same(a, b) for a, b in zip(*results, strict=True))


def second_derivative(m: nn.Module) -> Any:
    x = inputs(0).requires_grad_(True)
    (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), x)


def forward_mode(m: nn.Module) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return m(torch.autograd.forward_ad.make_dual(inputs(0), inputs(1)))


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "grad": (lambda m: torch.func.grad(lambda x: m(x).sum())(inputs(0)), "cannot be transformed by torch.func"),
    "vmap": (lambda m: torch.func.vmap(m)(inputs(0)), "cannot be transformed by torch.func"),
    "jvp": (lambda m: torch.func.jvp(m, (inputs(0),), (inputs(1),)), "cannot be transformed by torch.func"),
    "jacrev": (lambda m: torch.func.jacrev(m)(inputs(0)[0, 0]), "cannot be transformed by torch.func"),
    "forward mode": (forward_mode, "has no forward-mode derivative: use torch.autograd.grad"),
    "second derivative": (second_derivative, "cannot be differentiated twice"),
    "hessian-vector product": (
        lambda m: torch.autograd.functional.hvp(lambda x: m(x).square().sum(), inputs(0), inputs(1)),
        "cannot be differentiated twice",
    ),
    "trace": (lambda m: torch.jit.trace(m, inputs(0)), "cannot be compiled by torch.jit"),
    "script": (lambda m: torch.jit.script(m), "cannot be compiled by torch.jit"),
    "script of a Linear": (lambda m: torch.jit.script(m[1]), "cannot be compiled by torch.jit"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_the_weight_after_its_use_is_refused_in_one_sentence_and_harms_nothing(what: str) -> None:
    model, plain = attach(build()), build()
    model(inputs(0))
    call, sentence = REFUSED[what]

    with pytest.raises(RuntimeError, match=sentence + r".*viking\.detach\(model\)"):
        call(model)

    assert all(same(a, b) for a, b in zip(outcome(model, inputs(1)), outcome(plain, inputs(1)), strict=True))
    viking.detach(model)
    call(model)


def test_a_gradient_with_create_graph_that_nobody_differentiates_is_right() -> None:
    results = []
    for streamed in (True, False):
        model = build()
        if streamed:
            attach(model)
        model[0].weight.requires_grad_(True)
        x = inputs(0).requires_grad_(True)
        gradients = torch.autograd.grad(model(x).square().sum(), [x, model[0].weight], create_graph=True)
        results.append([g.detach() for g in gradients])

    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_a_symbolic_trace_calls_the_streamed_linears() -> None:
    model, plain = attach(build()), build()

    traced = torch.fx.symbolic_trace(model)

    assert [node.op for node in traced.graph.nodes][1:-1] == ["call_module"] * 4
    assert torch.equal(traced(inputs(0)), plain(inputs(0)))


def test_an_export_holds_the_weights_and_leaves_the_model_attached() -> None:
    model, plain = attach(build()), build()
    model(inputs(0))
    before = managed(model)

    exported = torch.export.export(model, (inputs(0),)).module()

    assert torch.equal(exported(inputs(1)), plain(inputs(1)))
    assert managed(model) == before
    assert torch.equal(model(inputs(1)), plain(inputs(1)))
    viking.detach(model)
    assert not any(OURS & m.__dict__.keys() for m in model.modules())


# ---- torch.compile ----


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["model", "model before attach", "block"])
def test_a_compiled_model_breaks_its_graph_at_the_linears_and_settles(what: str, backend: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    results = []
    for streamed in (True, False):
        model = Net(depth=2)
        call: Any = model
        if streamed:
            if what != "model before attach":
                attach(model)
            if what == "block":
                for block in model.blocks:
                    block.compile(backend=backend)
            else:
                call = torch.compile(model, backend=backend)
            if what == "model before attach":
                call(inputs(0))
                attach(model)
        found = []
        for step in range(7):
            x = inputs(step).requires_grad_(True)
            y = call(x)
            found += [y.detach(), *torch.autograd.grad(y.square().sum(), x)]
            if streamed and step == 3:
                frames, graphs = counters["frames"]["total"], counters["stats"]["unique_graphs"]
        if streamed:
            assert (counters["frames"]["total"], counters["stats"]["unique_graphs"]) == (frames, graphs)
            assert frames > 0
        results.append(found)

    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_nothing_of_this_package_is_compiled() -> None:
    from torch._dynamo import trace_rules

    model = attach(build())

    assert trace_rules.check(type(model._memory_manager)._enter)


# ---- forwards that somebody else keeps ----


class Adapter:
    """As LoRA in kohya's style: keeps the forward that it replaces, and can be taken off and put on again."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear, self.org_forward = linear, linear.forward
        linear.forward = self.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.org_forward(x) * 2


@pytest.mark.parametrize("taken_off", [False, True])
def test_a_linear_hijacked_while_attached_is_streamed_again_by_the_next_attach(taken_off: bool) -> None:
    model, plain = attach(build()), build()
    adapters = [Adapter(m[1]) for m in (model, plain)]
    x = inputs(0)
    assert torch.equal(model(x), plain(x))
    if taken_off:
        del model[1].forward
    viking.detach(model)
    if taken_off:
        model[1].forward = adapters[0].forward
    else:
        assert adapters[0].org_forward == nn.Linear.forward.__get__(model[1])
    before = Snapshot(model)
    assert torch.equal(model(x), plain(x))

    attach(model)

    assert managed(model) == {"0", "1", "2"}
    assert torch.equal(model(x), plain(x))
    assert model[1]._layer_memory_manager.uses == 1
    viking.detach(model)
    before.assert_unchanged()
    assert torch.equal(model(x), plain(x))


# ---- edits on the host ----


def test_a_lora_merged_and_taken_out_again_in_place_gives_the_base_back() -> None:
    model, plain = attach(build()), build()
    up, down = torch.randn(64, 4), torch.randn(4, 64)
    x = inputs(0)
    saved = plain[1].weight.clone()
    for sign in (1, -1):
        for m in (model, plain):
            with torch.no_grad():
                m[1].weight.add_(up @ down, alpha=sign)
            if sign < 0:
                m[1].weight.data.copy_(saved)
        viking.refresh(model)
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), build()(x))


@pytest.mark.parametrize("budget", [0, "1MB"])
def test_numpy_writes_are_seen_after_refresh(budget: Any) -> None:
    model, plain = attach(build(), weights_budget=budget), build()
    x = inputs(0)
    for _ in range(3):
        model(x)
    for m in (model, plain):
        m[0].weight.numpy()[3:9] = 0.25
        m[2].bias.numpy()[:] = 1

    viking.refresh(model)

    assert torch.equal(model(x), plain(x))


def test_saving_inside_a_step_saves_the_bytes_of_now() -> None:
    model = attach(build())
    buffer = io.BytesIO()
    y = model(inputs(0).requires_grad_(True))
    torch.save(model.state_dict(), buffer)
    y.sum().backward()
    buffer.seek(0)

    loaded = torch.load(buffer, weights_only=True)

    assert all(torch.equal(loaded[name], t) for name, t in build().state_dict().items())
