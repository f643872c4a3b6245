"""Whatever is done to a model in whatever order, it does the same as a copy that never met Viking.

Hypothesis draws the order. Every rule is applied to a pair: a model that is attached now and then, whole or in parts,
and its plain twin. After each rule parameters, gradients, outputs and state dicts of the two are compared bit for bit,
parameters must be the objects that they were, and the engine's numbers must add up.

    VIKING_STATE_MACHINE_EXAMPLES=2000 pytest tests/test_state_machine.py     at length, other orders every time
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn
from torch.utils.checkpoint import CheckpointError

import viking
from support.models import CHECKPOINTING, HIDDEN, Block, LoRA, Net, Wrapper
from support.threads import together
from viking import _engine
from viking.nn import latecomers
from viking.nn.device import DeviceEngine

EXAMPLES = int(os.environ.get("VIKING_STATE_MACHINE_EXAMPLES", "0"))
OF_OURS = ("_memory_manager", "_layer_memory_manager", "_viking_restore", "_apply")
ENGINES: dict[str, Any] = {
    "as it comes": None,
    "slow": {"bytes_per_second": 400_000_000, "delay_ns": 100_000},
    "delays": {"bytes_per_second": 2_000_000_000, "delay_ns": 200_000},
    "nothing can be pinned": {"bytes_per_second": 1_000_000_000, "delay_ns": 50_000, "pin_limit_bytes": 1},
}
SHAPES = [(2, 5, HIDDEN), (1, 1, HIDDEN), (3, 7, HIDDEN), (6, HIDDEN), (1, 12, HIDDEN)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: of all Linear bytes; None: the budget that is there, or the automatic one
BUDGETS = [0.0, 0.3, 0.6, 2.0, None]

numbers = st.integers(0, 999)
shares = st.sampled_from(BUDGETS)
shapes = st.sampled_from(SHAPES)
homes = st.sampled_from(["device", "host"])  # of what is trained
checkpointings = st.sampled_from(CHECKPOINTING)
autocasts = st.sampled_from([None, None, torch.bfloat16, torch.float16])
seen: Counter[str] = Counter()


class Stumble(Exception):
    """Raised inside a model on purpose."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C inside a model."""


def noise(seed: int, shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def is_outgrown(error: BaseException) -> bool:
    return isinstance(error, ValueError) and "is too small: the smallest that works is" in str(error)


def pick(items: list[Any], number: int) -> Any:
    return items[number % len(items)]


class Side:
    """A model, and the LoRA network that stands beside it with hijacked forwards."""

    def __init__(self, seed: int, depth: int, bias: bool) -> None:
        self.model = Net(depth=depth, bias=bias, seed=seed)
        self.network = nn.ModuleList()
        self.removed = nn.ModuleList()  # modules that once were in the model

    def modules(self) -> dict[str, nn.Module]:
        everything = {"model": self.model, "network": self.network, "removed": self.removed}
        return {f"{a}.{b}": m for a, root in everything.items() for b, m in root.named_modules(remove_duplicate=False)}

    def parameters(self) -> dict[str, nn.Parameter]:
        return {f"{a}.{b}": p for a, m in self.modules().items() for b, p in m._parameters.items() if p is not None}

    def trained(self) -> list[nn.Parameter]:
        return list({id(p): p for p in self.parameters().values() if p.requires_grad}.values())

    def linears(self) -> list[nn.Linear]:
        return [m for m in self.model.modules() if isinstance(m, nn.Linear)]

    def places(self) -> list[tuple[nn.Module, str]]:
        """(parent, name) of the Linears that stand where the model was built with them."""
        return [
            (parent, name)
            for parent in self.model.modules()
            if isinstance(parent, (Net, Block))
            for name, child in parent.named_children()
            if isinstance(child, nn.Linear)
        ]

    def parts(self) -> list[nn.Module]:
        """What may be attached."""
        return [self.model, self.model, *self.model.blocks, self.model.blocks, self.model.enter, *self.removed]

    def zero_grad(self) -> None:
        for p in self.parameters().values():
            p.grad = None


class Pair:
    def __init__(self, seed: int, depth: int, bias: bool) -> None:
        self.streamed, self.plain = Side(seed, depth, bias), Side(seed, depth, bias)
        self.sides = (self.streamed, self.plain)
        self.dtype = torch.float32
        self.overlaps = False  # two parameters were made views of one storage
        self.detach_everything: Callable[[], None] = lambda: None
        self.note_identities()

    def note_identities(self) -> None:
        """A rule replaced parameters: from now on these are the ones."""
        self.identities = {name: id(p) for name, p in self.streamed.parameters().items()}

    def linear_bytes(self) -> int:
        return sum(p.nbytes for m in self.streamed.linears() for p in m.parameters(recurse=False))

    def both(self, what: Callable[[Side], Any]) -> list[Any]:
        """Do it to both sides, with the same random numbers; raise what was raised if both raise the same."""
        results: list[Any] = []
        errors: list[BaseException | None] = []
        for side in self.sides:
            torch.manual_seed(0)
            try:
                results.append(what(side))
                errors.append(None)
            except (Stumble, Interrupted, RuntimeError) as error:
                errors.append(error)
            except ValueError as error:  # weights have grown, by a tie or a larger dtype
                if not is_outgrown(error) or side is self.plain:
                    raise
                self.detach_everything()
                side.zero_grad()
                return self.both(what)
        mine, theirs = errors
        if mine is not None and (theirs is None or type(mine) is not type(theirs)):
            raise mine
        if theirs is not None:
            assert mine is not None, f"only the plain model raises {theirs!r}"
            raise theirs
        return results

    def compare(self, mine: Any, theirs: Any) -> None:
        assert len(mine) == len(theirs) > 0
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert same(a, b), f"result {i} differs"

    def compare_gradients(self, may_be_missing: bool = False) -> None:
        theirs = self.plain.parameters()
        for name, p in self.streamed.parameters().items():
            if not (may_be_missing and p.grad is None):
                assert same(p.grad, theirs[name].grad), f"the gradient of {name} differs"

    def edit(self, what: Callable[[Side], Any]) -> None:
        """An edit that may replace parameters."""
        self.both(what)
        self.note_identities()


def losses(side: Side, x: torch.Tensor, autocast: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        # Not the leaf itself: torch would cast it once for all its uses and add up their gradients in half precision.
        y = side.model(x * 1)
    return y, y.float().square().mean()


def leaf(seed: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return noise(seed, shape, dtype).requires_grad_(True)


@contextlib.contextmanager
def stumbling(module: nn.Module, where: str, error: type[BaseException]) -> Iterator[None]:
    """Its next forward, or the backward of it, raises."""

    def fall(*unused: Any) -> None:
        raise error

    def in_backward(m: nn.Module, args: Any, y: torch.Tensor) -> None:
        if y.requires_grad:
            y.register_hook(fall)

    hooks = {
        "before": lambda: module.register_forward_pre_hook(fall),
        "after": lambda: module.register_forward_hook(fall),
        "backward": lambda: module.register_forward_hook(in_backward),
    }
    handle = hooks[where]()
    try:
        yield
    finally:
        handle.remove()


def close_everything() -> None:
    """What an example that failed has left would be the next one's failure."""
    DeviceEngine.make_engine = None
    for manager in list(latecomers._watched.values()):
        with contextlib.suppress(RuntimeError, ValueError):  # in the middle of a use, or of a growth
            manager.stop()
    latecomers._watched.clear()
    for hook in latecomers._hooks:
        hook.remove()
    latecomers._hooks.clear()
    DeviceEngine._open.clear()


class Twins(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        close_everything()
        self.pairs: list[Pair] = []
        self.attached: list[tuple[nn.Module, dict[str, Any]]] = []  # with their arguments
        self.has_trained = False  # a Linear was unfrozen in this run

    def pair(self, number: int) -> Pair:
        return pick(self.pairs, number)

    def add_pair(self, pair: Pair) -> None:
        pair.detach_everything = self.detach_everything
        self.pairs.append(pair)

    def detach_everything(self) -> None:
        for module, _ in self.attached:
            viking.detach(module)
        self.attached.clear()

    def is_attached(self, module: nn.Module) -> bool:
        return any(m is module for m, _ in self.attached)

    # ---- models and engines ----

    def look(self, pair: Pair) -> None:
        with torch.no_grad():
            pair.compare(*pair.both(lambda side: [side.model(noise(1, (2, HIDDEN), pair.dtype))]))

    @initialize(
        engine=st.sampled_from(sorted(ENGINES)),
        depth=st.integers(1, 3),
        bias=st.booleans(),
        seed=numbers,
        attached=st.sampled_from([True, True, True, False]),
        share=shares,
        trained=homes,
    )
    def begin(
        self, engine: str, depth: int, bias: bool, seed: int, attached: bool, share: float | None, trained: str
    ) -> None:
        self.choose_engine(engine, seed)
        pair = Pair(1, depth, bias)
        self.add_pair(pair)
        if attached:
            self.attach_part(pair, pair.streamed.model, share, trained=trained)

    @rule(engine=st.sampled_from(sorted(ENGINES)), seed=numbers)
    def choose_engine(self, engine: str, seed: int) -> None:
        """For the next time that the first model is attached."""
        how = ENGINES[engine]
        DeviceEngine.make_engine = None if how is None else lambda device: _engine.Engine("host", seed=seed + 1, **how)

    @precondition(lambda self: len(self.pairs) == 1)
    @rule(depth=st.integers(1, 2), bias=st.booleans(), share=shares)
    def a_second_model(self, depth: int, bias: bool, share: float | None) -> None:
        self.add_pair(Pair(2, depth, bias))
        self.attach_part(self.pairs[-1], self.pairs[-1].streamed.model, share)

    @precondition(lambda self: len(self.pairs) == 2)
    @rule(number=numbers)
    def a_model_goes(self, number: int) -> None:
        pair = self.pair(number)
        for module, _ in list(self.attached):
            if any(module is m for m in pair.streamed.modules().values()):
                viking.detach(module)
                self.attached = [a for a in self.attached if a[0] is not module]
        self.pairs.remove(pair)

    # ---- attach and detach ----

    def attach_part(self, pair: Pair, part: nn.Module, share: float | None, **more: Any) -> None:
        budget = None if share is None else int(pair.linear_bytes() * share)
        how = {"weights_budget": budget, **more}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the budget of the device is now another one
            try:
                viking.attach(part, "cpu", progress=False, **how)
            except ValueError as error:
                if not is_outgrown(error):
                    raise
                return
        self.attached.append((part, how))

    @rule(number=numbers, part=numbers, share=shares, trained=homes)
    def attach(self, number: int, part: int, share: float | None, trained: str) -> None:
        pair = self.pair(number)
        module = pair.streamed.model if pair.overlaps else pick(pair.streamed.parts(), part)
        if not self.is_attached(module):
            self.attach_part(pair, module, share, trained=trained)

    @rule(number=numbers, part=numbers, share=shares, ignored=numbers)
    def attach_and_ignore(self, number: int, part: int, share: float | None, ignored: int) -> None:
        pair = self.pair(number)
        if pair.overlaps:  # a part that leaves tears them apart, as .to(device) does
            return
        module = pick(pair.streamed.parts(), part)
        item = pick([*list(module.modules())[1:], *module.parameters()], ignored)
        if not self.is_attached(module):
            self.attach_part(pair, module, share, ignore=(item,))

    @precondition(lambda self: self.attached)
    @rule(which=numbers)
    def attach_again(self, which: int) -> None:
        module, how = pick(self.attached, which)
        viking.attach(module, "cpu", progress=False, **how)
        with pytest.raises(ValueError, match="attached already, with other arguments"):
            viking.attach(module, "cpu", progress=False, weights_budget=123_456_789)

    @precondition(lambda self: self.attached)
    @rule(which=numbers)
    def detach(self, which: int) -> None:
        module, _ = self.attached.pop(which % len(self.attached))
        viking.detach(module)
        viking.detach(module)

    @precondition(lambda self: self.attached)
    @rule(which=numbers, share=shares, trained=homes)
    def change_the_budget(self, which: int, share: float | None, trained: str) -> None:
        module, _ = self.attached.pop(which % len(self.attached))
        pair = next((p for p in self.pairs if any(module is m for m in p.streamed.modules().values())), self.pairs[0])
        viking.detach(module)
        self.attach_part(pair, module, share, trained=trained)

    # ---- steps ----

    @rule(
        number=numbers,
        seed=numbers,
        shape=shapes,
        checkpointing=checkpointings,
        autocast=autocasts,
        accumulate=st.sampled_from([1, 1, 2, 3]),
        optimizer=st.sampled_from(["none", "sgd", "foreach", "fused", "adamw", "stochastic"]),
    )
    def train(
        self,
        number: int,
        seed: int,
        shape: Any,
        checkpointing: str,
        autocast: torch.dtype | None,
        accumulate: int,
        optimizer: str,
    ) -> None:
        pair = self.pair(number)
        wide = [m for m in pair.plain.linears() if m.in_features >= HIDDEN <= m.out_features]
        trained = any(p.requires_grad for m in wide for p in m.parameters())
        if trained or pair.dtype not in (torch.float32, autocast):
            autocast = None  # as with leaves above; layer_norm itself refuses two half precisions

        def step(side: Side) -> list[torch.Tensor]:
            side.model.checkpointing = checkpointing
            results = []
            for part in range(accumulate):
                x = leaf(seed + part, shape, pair.dtype)
                y, loss = losses(side, x, autocast)
                loss.backward()
                results += [y.detach(), loss.detach(), x.grad]
            return results

        pair.compare(*pair.both(step))
        pair.compare_gradients()
        self.optimize(pair, optimizer, seed)
        pair.both(Side.zero_grad)

    def optimize(self, pair: Pair, optimizer: str, seed: int) -> None:
        def update(side: Side) -> None:
            trained = side.trained()
            if not trained or optimizer == "none":
                return
            if optimizer == "adamw":
                torch.optim.AdamW(trained, lr=1e-3).step()
            elif optimizer == "stochastic":
                viking.stochastic_rounding(torch.optim.SGD(trained, lr=1e-2), seed=seed).step()
            else:
                how = {"sgd": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[optimizer]
                torch.optim.SGD(trained, lr=1e-2, **how).step()

        pair.both(update)

    def refresh_all(self, side: Side) -> None:
        for root in (side.model, *side.removed):
            with contextlib.suppress(ValueError):  # not attached
                viking.refresh(root)

    @rule(number=numbers, seed=numbers, shape=shapes, mode=st.sampled_from(["no_grad", "inference_mode", "eval"]))
    def sample(self, number: int, seed: int, shape: Any, mode: str) -> None:
        pair = self.pair(number)

        def sampling(side: Side) -> list[torch.Tensor]:
            side.model.train(mode != "eval")
            with getattr(torch, mode, torch.no_grad)():
                x = noise(seed, shape, pair.dtype)
                return [side.model(x), side.model(x + 1)]

        pair.compare(*pair.both(sampling))

    @rule(number=numbers, seed=numbers, checkpointing=checkpointings, between=numbers, part=numbers, share=shares)
    def something_between_forward_and_backward(
        self, number: int, seed: int, checkpointing: str, between: int, part: int, share: float | None
    ) -> None:
        """Sampling, another model's coming or going, a refresh, an edit: backward does what torch's own does."""
        pair = self.pair(number)
        started: dict[Side, Any] = {}
        what = pick(["sample", "attach", "another", "refresh", "second forward", "edit"], between)

        def forward(side: Side) -> None:
            side.model.checkpointing = checkpointing
            x = leaf(seed, (2, 5, HIDDEN), pair.dtype)
            started[side] = (x, losses(side, x, None)[1])

        def backward(side: Side) -> list[Any]:
            x, loss = started[side]
            loss.backward()
            return [loss.detach(), x.grad]

        pair.both(forward)
        if what == "sample":
            with torch.no_grad():
                pair.compare(*pair.both(lambda side: [side.model(noise(seed + 1, (3, HIDDEN), pair.dtype))]))
        elif what == "attach":
            other = self.pair(part)
            module = pick(other.streamed.parts(), part)
            managed = any("_layer_memory_manager" in m.__dict__ for m in pair.streamed.model.modules())
            if not self.is_attached(module) and not other.overlaps and (managed or other is not pair):
                self.attach_part(other, module, share)
        elif what == "another":
            visitor = Net(depth=1, seed=5)
            expected = visitor(noise(seed, (2, HIDDEN)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    viking.attach(visitor, "cpu", weights_budget="10MB" if part % 2 else None, progress=False)
                except ValueError as error:  # beside the others it has no room in the budget that is there
                    if not is_outgrown(error):
                        raise
            assert same(visitor(noise(seed, (2, HIDDEN))), expected)
            viking.detach(visitor)
        elif what == "refresh":
            self.refresh_all(pair.streamed)
        elif what == "second forward":
            first = dict(started)
            pair.both(forward)
            pair.compare(*pair.both(backward))
            started.update(first)
        elif what == "edit":
            index = part % len(pair.plain.linears())

            def edit(side: Side) -> None:
                with torch.no_grad():
                    side.linears()[index].weight.mul_(0.9)

            pair.both(edit)
        try:
            results = pair.both(backward)
        except RuntimeError as error:
            edited = what == "edit" and "modified by an inplace operation" in str(error)
            recomputed_by_us = what == "attach" and isinstance(error, CheckpointError)
            if self.attached and not edited and not recomputed_by_us:
                raise
        else:
            pair.compare(*results)
            pair.compare_gradients()
        pair.both(Side.zero_grad)

    @rule(
        number=numbers,
        seed=numbers,
        checkpointing=checkpointings,
        where=st.sampled_from(["before", "after", "backward"]),
        which=numbers,
        error=st.sampled_from([Stumble, Interrupted]),
    )
    def stumble(
        self, number: int, seed: int, checkpointing: str, where: str, which: int, error: type[BaseException]
    ) -> None:
        pair = self.pair(number)
        index = which % len(list(pair.plain.model.modules()))

        def step(side: Side) -> list[Any]:
            side.model.checkpointing = checkpointing
            with stumbling(list(side.model.modules())[index], where, error):
                x = leaf(seed, (2, 5, HIDDEN), pair.dtype)
                y, loss = losses(side, x, None)
                loss.backward()
                return [y.detach(), loss.detach(), x.grad]

        with contextlib.suppress(Stumble, Interrupted):  # neither where what stumbles was skipped
            pair.compare(*pair.both(step))
        pair.compare_gradients(may_be_missing=True)
        pair.both(Side.zero_grad)

    @precondition(lambda self: len(self.pairs) == 2)
    @rule(seed=numbers, first=checkpointings, second=checkpointings)
    def two_threads(self, seed: int, first: str, second: str) -> None:
        def job(side: Side, dtype: torch.dtype, checkpointing: str) -> Callable[[], list[Any]]:
            def run() -> list[Any]:
                side.model.checkpointing = checkpointing
                results = []
                for i in range(2):
                    x = leaf(seed + i, (2, 5, HIDDEN), dtype)
                    y, loss = losses(side, x, None)
                    loss.backward()
                    results += [y.detach(), loss.detach(), x.grad]
                return results

            return run

        both = list(zip(self.pairs, (first, second), strict=True))
        jobs = [job(pair.streamed, pair.dtype, how) for pair, how in both]
        try:
            mine = together(*jobs)
        except ValueError as error:
            if not is_outgrown(error):
                raise
            self.detach_everything()
            for pair in self.pairs:
                pair.streamed.zero_grad()
            mine = together(*jobs)
        theirs = [job(pair.plain, pair.dtype, how)() for pair, how in both]
        for pair, a, b in zip(self.pairs, mine, theirs, strict=True):
            pair.compare(a, b)
            pair.compare_gradients()
            pair.both(Side.zero_grad)

    @precondition(lambda self: self.attached)
    @rule(which=numbers, seed=numbers, checkpointing=checkpointings)
    def backward_after_detach(self, which: int, seed: int, checkpointing: str) -> None:
        module, _ = self.attached.pop(which % len(self.attached))
        pair = next((p for p in self.pairs if any(module is m for m in p.streamed.model.modules())), None)
        if pair is None:
            viking.detach(module)
            return
        pair.streamed.model.checkpointing = checkpointing
        try:
            loss = losses(pair.streamed, leaf(seed, (2, 5, HIDDEN), pair.dtype), None)[1]
        except ValueError as error:
            if not is_outgrown(error):
                raise
            viking.detach(module)
            return
        viking.detach(module)
        try:
            loss.backward()
        except RuntimeError as error:
            # Or torch's own, where a checkpointed block recomputes without us and saves more than it did.
            if "detached from Viking" not in str(error) and not isinstance(error, CheckpointError):
                raise
        pair.both(Side.zero_grad)

    # ---- orders ----

    @rule(number=numbers, order=st.lists(numbers, min_size=1, max_size=5), as_it_stands=st.booleans())
    def other_order(self, number: int, order: list[int], as_it_stands: bool) -> None:
        for side in self.pair(number).sides:
            side.model.order = None if as_it_stands else [i % len(side.model.blocks) for i in order]

    # ---- edits of weights ----

    @rule(
        number=numbers,
        which=numbers,
        how=st.sampled_from(["weight", "bias", "rows", "inference", "copy"]),
        seed=numbers,
    )
    def edit_in_place(self, number: int, which: int, how: str, seed: int) -> None:
        """As torch counts it: nobody is told."""
        pair = self.pair(number)

        def edit(side: Side) -> None:
            for linear in side.linears()[which % 2 :: 2]:
                weight = linear.weight
                with torch.no_grad():
                    if how == "weight":
                        weight.mul_(0.9)
                    elif how == "bias" and linear.bias is not None:
                        linear.bias.add_(0.1)
                    elif how == "rows":
                        weight[1:5] = 0.01
                    elif how == "inference":
                        with torch.inference_mode():
                            weight.mul_(1.05)
                    elif how == "copy":
                        weight.copy_(noise(seed, weight.shape) / 8)

        self.look(pair)
        pair.both(edit)
        self.look(pair)

    @rule(number=numbers, which=numbers, how=st.sampled_from(["data", "numpy", "editing"]))
    def edit_uncounted(self, number: int, which: int, how: str) -> None:
        """In ways that torch does not count: refresh or editing."""
        pair = self.pair(number)

        def edit(side: Side) -> None:
            managed = any("_layer_memory_manager" in m.__dict__ for m in side.model.modules())
            with viking.editing(side.model) if managed and how == "editing" else contextlib.nullcontext():
                for linear in side.linears()[which % 2 :: 2]:
                    weight = linear.weight.data
                    old = weight.clone()
                    if how == "numpy" and weight.dtype != torch.bfloat16:
                        weight.numpy()[:] = old.numpy() * 0.5
                    else:
                        weight.fill_(float("nan"))
                        weight.copy_(old * 0.5)
            if how != "editing" and side is pair.streamed:
                self.refresh_all(side)

        self.look(pair)
        pair.both(edit)
        self.look(pair)

    @rule(number=numbers, seed=numbers, assign=st.booleans(), part=numbers)
    def load_state_dict(self, number: int, seed: int, assign: bool, part: int) -> None:
        pair = self.pair(number)

        def load(side: Side) -> None:
            root = pick(side.parts(), part)
            state = {
                name: (t.detach() * 0.5 + noise(seed, t.shape, t.dtype) / 16).to(t.dtype)
                for name, t in root.state_dict().items()
            }
            root.load_state_dict(state, assign=assign)

        pair.edit(load)

    @rule(
        number=numbers,
        which=numbers,
        seed=numbers,
        how=st.sampled_from(["data", "parameter", "strides", "tie", "view", "no bias", "new bias", "swap"]),
    )
    def replace_a_weight(self, number: int, which: int, seed: int, how: str) -> None:
        pair = self.pair(number)
        index = which % len(pair.plain.linears())
        if how == "view":
            if self.attached or len(pair.plain.removed):
                return
            pair.overlaps = True

        def replace(side: Side) -> None:
            linear = side.linears()[index]
            weight = linear.weight
            fresh = (noise(seed, weight.shape) / 8).to(weight.dtype)
            others = [
                m
                for m in side.linears()
                if m is not linear
                and m.weight.shape == weight.shape
                and m.weight.dtype == weight.dtype
                and m.weight.requires_grad == weight.requires_grad
            ]
            if how == "data":
                weight.data = fresh
            elif how == "parameter":
                linear.weight = nn.Parameter(fresh, requires_grad=weight.requires_grad)
            elif how == "strides":
                linear.weight = nn.Parameter(fresh.t().contiguous().t(), requires_grad=weight.requires_grad)
            elif how == "tie" and others:
                linear.weight = pick(others, seed).weight
            elif how == "view" and others:
                storage = noise(seed, (2 * weight.shape[0], weight.shape[1]), weight.dtype) / 8
                half = weight.shape[0] // 2
                weight.data = storage[: weight.shape[0]]
                if not pick(others, seed).weight.requires_grad:
                    pick(others, seed).weight.data = storage[half : half + weight.shape[0]]
            elif how == "no bias":
                linear.bias = None
            elif how == "new bias":
                linear.bias = nn.Parameter(noise(seed, (linear.out_features,), weight.dtype), requires_grad=False)
            elif how == "swap" and others:
                other = pick(others, seed)
                linear.weight, other.weight = other.weight, linear.weight

        pair.edit(replace)

    @rule(number=numbers, which=numbers, what=st.sampled_from(["weight", "bias", "norm", "freeze all", "freeze all"]))
    def train_or_freeze(self, number: int, which: int, what: str) -> None:
        pair = self.pair(number)
        index = which % len(pair.plain.linears())
        self.has_trained = True

        def change(side: Side) -> None:
            linear = side.linears()[index]
            if what == "weight":
                linear.weight.requires_grad_(not linear.weight.requires_grad)
            elif what == "bias" and linear.bias is not None:
                linear.bias.requires_grad_(not linear.bias.requires_grad)
            elif what == "norm":
                pick(list(side.model.blocks), which).norm.requires_grad_(True)
            elif what == "freeze all":
                for linear in side.linears():
                    if linear.in_features == HIDDEN and linear.out_features >= HIDDEN:
                        linear.requires_grad_(False)

        pair.both(change)

    @rule(number=numbers, dtype=st.sampled_from(DTYPES), how=st.sampled_from(["to", "force", "double and back"]))
    def other_dtype(self, number: int, dtype: torch.dtype, how: str) -> None:
        pair = self.pair(number)

        def convert(side: Side) -> None:
            for root in (side.model, side.removed):
                if how == "to":
                    root.to(dtype)
                elif how == "double and back":
                    root.double().to(pair.dtype)
                elif side is pair.streamed or pair.overlaps:
                    viking.force_to_bf16(root)
                else:
                    for p in root.parameters():
                        p.data = p.data.to(torch.bfloat16)

        pair.both(convert)
        if how != "double and back":
            pair.dtype = dtype if how == "to" else torch.bfloat16

    # ---- edits of modules ----

    @rule(number=numbers, which=numbers, seed=numbers)
    def wrap_in_a_lora(self, number: int, which: int, seed: int) -> None:
        pair = self.pair(number)
        if not pair.plain.places():
            return

        def wrap(side: Side) -> None:
            parent, name = pick(side.places(), which)
            torch.manual_seed(seed)
            setattr(parent, name, Wrapper(getattr(parent, name)))

        pair.edit(wrap)

    @rule(number=numbers, which=numbers)
    def unwrap(self, number: int, which: int) -> None:
        pair = self.pair(number)

        def undo(side: Side) -> None:
            for parent in list(side.model.modules()):
                for name, child in list(parent.named_children()):
                    if isinstance(child, Wrapper):
                        setattr(parent, name, child.base_layer)

        pair.edit(undo)

    @rule(number=numbers, which=numbers, seed=numbers)
    def hijack_a_forward(self, number: int, which: int, seed: int) -> None:
        pair = self.pair(number)
        if len(pair.plain.network) > 4 or not pair.plain.places():
            return

        def take(side: Side) -> None:
            parent, name = pick(side.places(), which)
            linear = getattr(parent, name)
            torch.manual_seed(seed)
            lora = LoRA(linear, linear.forward)
            linear.forward = lora.forward
            side.network.append(lora)

        pair.edit(take)

    @rule(
        number=numbers,
        which=numbers,
        seed=numbers,
        how=st.sampled_from(["Linear", "block in", "block out", "block back", "more blocks", "same block twice"]),
    )
    def replace_a_module(self, number: int, which: int, seed: int, how: str) -> None:
        pair = self.pair(number)
        if pair.overlaps:
            return

        def replace(side: Side) -> None:
            model = side.model
            torch.manual_seed(seed)
            model.order = None
            if how == "Linear" and side.places():
                parent, name = pick(side.places(), which)
                old = getattr(parent, name)
                fresh = nn.Linear(old.in_features, old.out_features, bias=bool(seed % 2)).requires_grad_(False)
                setattr(parent, name, fresh.to(pair.dtype))
                side.removed.append(old)
            elif how == "block in":
                side.removed.append(model.blocks[which % len(model.blocks)])
                model.blocks[which % len(model.blocks)] = Block().requires_grad_(False).to(pair.dtype)
            elif how == "block out" and len(model.blocks) > 1:
                side.removed.append(model.blocks[which % len(model.blocks)])
                del model.blocks[which % len(model.blocks)]
            elif how == "block back":
                for i, module in enumerate(side.removed):
                    if isinstance(module, Block):
                        del side.removed[i]
                        model.blocks.append(module)
                        break
            elif how == "more blocks" and len(model.blocks) < 4:
                model.blocks.append(Block().requires_grad_(False).to(pair.dtype))
            elif how == "same block twice" and len(model.blocks) < 4:
                model.blocks.append(model.blocks[which % len(model.blocks)])

        pair.edit(replace)

    @precondition(lambda self: any(len(pair.streamed.removed) for pair in self.pairs))
    @rule(number=numbers, which=numbers, seed=numbers)
    def use_what_was_removed(self, number: int, which: int, seed: int) -> None:
        pair = self.pair(number)
        if len(pair.plain.removed) == 0:
            return

        def use(side: Side) -> list[Any]:
            module = pick(list(side.removed), which)
            width = module.in_features if isinstance(module, nn.Linear) else HIDDEN
            x = leaf(seed, (2, 5, width), pair.dtype)
            y = module(x)
            y.float().square().mean().backward()
            return [y.detach(), x.grad]

        pair.compare(*pair.both(use))
        pair.compare_gradients()
        pair.both(Side.zero_grad)

    # ---- copies ----

    @rule(number=numbers)
    def save(self, number: int) -> None:
        pair = self.pair(number)
        buffer = io.BytesIO()
        torch.save(pair.streamed.model.state_dict(), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        theirs = pair.plain.model.state_dict()
        assert list(loaded) == list(theirs)
        assert all(same(loaded[name], t) for name, t in theirs.items())

    @rule(number=numbers, seed=numbers)
    def copy(self, number: int, seed: int) -> None:
        pair = self.pair(number)
        model = pair.streamed.model
        if any(name in m.__dict__ for m in model.modules() for name in OF_OURS):
            with pytest.raises(TypeError, match=r"streamed cannot be"):
                copy.deepcopy(model)
            if len(pair.streamed.network) == 0:
                with pytest.raises(TypeError, match=r"streamed cannot be"):
                    pickle.dumps(model)
        elif len(pair.streamed.network) == 0:
            twin = copy.deepcopy(model)
            x = noise(seed, (2, HIDDEN), pair.dtype)
            assert same(twin(x), pair.plain.model(x))

    # ---- what always holds ----

    @invariant()
    def twins_are_the_same(self) -> None:
        for pair in self.pairs:
            theirs = pair.plain.parameters()
            mine = pair.streamed.parameters()
            assert list(mine) == list(theirs)
            for name, p in mine.items():
                assert id(p) == pair.identities[name], f"{name} is another object"
                assert same(p, theirs[name]), f"{name} differs"
                assert (p.requires_grad, p.is_leaf, p.stride()) == (
                    theirs[name].requires_grad,
                    theirs[name].is_leaf,
                    theirs[name].stride(),
                ), name
            assert list(pair.streamed.model.state_dict()) == list(pair.plain.model.state_dict())

    @invariant()
    def what_is_detached_is_clean(self) -> None:
        if self.attached:
            return
        assert not DeviceEngine._open
        assert not latecomers._watched
        assert not latecomers._hooks
        for pair in self.pairs:
            theirs = pair.plain.modules()
            for name, module in pair.streamed.modules().items():
                assert set(module.__dict__) == set(theirs[name].__dict__), name
                owner = getattr(module.__dict__.get("forward"), "__self__", None)
                assert not isinstance(owner, viking.LinearLayerMemoryManager), name
                for kind, hooks in theirs[name].__dict__.items():
                    if "_hooks" in kind and hooks is not None and hasattr(hooks, "__len__"):
                        assert len(module.__dict__[kind]) == len(hooks), (name, kind)

    @invariant()
    def the_numbers_add_up(self) -> None:
        for device in DeviceEngine._open.values():
            sizes = {number: -(-linears[0].nbytes // 256) * 256 for number, linears in device.linears.items()}
            totals = device.engine.stats()
            assert totals["resident_bytes"] + totals["streamed_bytes"] == sum(sizes.values()), (totals, sizes)
            if sizes:
                assert device.slab is not None
                assert totals["slab_bytes"] == device.slab.numel() <= totals["budget_bytes"]
            assert totals["written_bytes"] == 0 or self.has_trained
            assert totals["staged_bytes"] <= totals["streamed_bytes"]
        for module, _ in self.attached:
            assert module.__dict__["_memory_manager"].module is module
            stats = viking.stats(module)
            assert stats.slab_bytes <= stats.weights_budget_bytes or stats.slab_bytes == 0
            managed = [m for m in module.modules() if "_layer_memory_manager" in m.__dict__]
            assert sum(w.path != "unmanaged" for w in stats.weights) == len(managed)
            for linear in managed:
                assert linear._layer_memory_manager.module is linear

    def check_invariants(self, *args: Any, **more: Any) -> None:
        seen["rules"] += 1
        super().check_invariants(*args, **more)

    def teardown(self) -> None:
        self.detach_everything()
        self.twins_are_the_same()
        self.what_is_detached_is_clean()
        for pair in self.pairs:
            self.look(pair)
        DeviceEngine.make_engine = None


def test_a_model_does_what_its_plain_twin_does_whatever_happens_to_it() -> None:
    settings = hypothesis.settings(
        max_examples=EXAMPLES or 60,
        stateful_step_count=50 if EXAMPLES else 25,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(Twins, settings=settings)
    if EXAMPLES:
        print(dict(seen))
