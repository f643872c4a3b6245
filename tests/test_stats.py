"""viking.stats: what it counts is what happened."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import viking
from support.models import Net, build
from support.training import inputs, one_step, train


def attach(model: nn.Module, budget: object = 0) -> nn.Module:
    return viking.attach(model, "cpu", weights_budget=budget, progress=False)


def bytes_of(model: nn.Module) -> int:
    return sum(-(-p.nbytes // 256) * 256 for m in model.modules() if "_layer_memory_manager" in m.__dict__
               for p in m.parameters(recurse=False))


@pytest.mark.parametrize("budget", [0, 250_000, "1MB"])
def test_resident_and_streamed_bytes_add_up_to_the_weights(budget: object) -> None:
    model, trained = build()
    attach(model, budget)
    train(model, trained, 3)

    stats = viking.stats(model)

    assert stats.resident_bytes + stats.streamed_bytes == pytest.approx(bytes_of(model), rel=0.01)
    assert stats.slab_bytes <= stats.weights_budget_bytes
    by_path = {path: sum(w.nbytes for w in stats.weights if w.path == path) for path in ("resident", "streamed")}
    assert by_path["resident"] == pytest.approx(stats.resident_bytes, rel=0.02)
    assert by_path["streamed"] == pytest.approx(stats.streamed_bytes, rel=0.02)


def test_a_weight_is_on_demand_until_its_order_is_known_and_says_so() -> None:
    model, trained = build()
    attach(model)
    before = {w.path for w in viking.stats(model).weights}

    train(model, trained, 4)

    after = {w.path: w.reason for w in viking.stats(model).weights}
    assert before == {"demand", "unmanaged"}
    assert after.pop("unmanaged") in ("it is small", "it is trained")
    assert after == {"streamed": "the budget does not hold every weight"}


def test_every_linear_of_the_model_is_listed_once() -> None:
    model, _ = build()
    attach(model)

    names = [w.name for w in viking.stats(model).weights]

    assert sorted(names) == sorted(n for n, m in model.named_modules() if isinstance(m, nn.Linear))


def test_steps_count_training_passes_and_nothing_else() -> None:
    model, _ = build()
    attach(model)
    for _ in range(4):
        one_step(model, inputs(0))
        with torch.no_grad():
            model(inputs(0))

    assert viking.stats(model).steps in (3, 4)  # the last one may not be over yet


def test_what_is_resident_is_fetched_once() -> None:
    model, trained = build()
    attach(model, "1MB")
    train(model, trained, 4)

    stats = viking.stats(model)

    assert (stats.fetched_bytes, stats.streamed_bytes, stats.plan_ratio) == (0, 0, 1.0)
    assert all(m._layer_memory_manager.fetches == 1 for m in model.modules() if "_layer_memory_manager" in m.__dict__)


def test_no_plan_is_better_than_the_least_where_a_part_of_the_model_has_a_backward() -> None:
    model = attach(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).requires_grad_(False))
    model[5].register_forward_pre_hook(lambda module, args: (args[0].detach().requires_grad_(True),))

    for _ in range(6):
        model(inputs(0)).sum().backward()

    stats = viking.stats(model)
    assert stats.fetched_bytes >= 6 * 64 * 64 * 4  # of 8 weights, two were there
    assert 1.0 <= stats.plan_ratio < 1.5


def test_no_weight_is_fetched_more_than_twice_in_a_checkpointed_step() -> None:
    model, trained = build(checkpointing="no early stop", depth=5)
    attach(model, 300_000)  # a block has 133 kB
    linears = [m._layer_memory_manager for m in model.modules() if "_layer_memory_manager" in m.__dict__]
    train(model, trained, 4)
    before = [linear.fetches for linear in linears]

    train(model, trained, 10)

    assert all(linear.fetches - b <= 20 for linear, b in zip(linears, before, strict=True))
    assert viking.stats(model).fetched_bytes <= 2 * bytes_of(model)


def test_parts_of_a_model_have_stats_of_their_own_and_totals_of_the_engine() -> None:
    model, _ = build()
    attach(model)

    whole, part = viking.stats(model), viking.stats(model.blocks[1])

    assert [w.name for w in part.weights if w.path != "unmanaged"] == [
        f"{name}.base_layer" for name in ("qkv", "proj", "up", "down")]
    assert dataclasses.replace(whole, weights=[]) == dataclasses.replace(part, weights=[])


def test_two_models_share_one_engine_and_one_budget() -> None:
    first, second = Net(), Net(seed=5)
    attach(first, 300_000)
    alone = viking.stats(first)

    viking.attach(second, "cpu", progress=False)

    both = viking.stats(first)
    assert both.weights_budget_bytes == alone.weights_budget_bytes == 300_000
    assert both.slab_bytes <= 300_000
    assert both.resident_bytes + both.streamed_bytes == 2 * (alone.resident_bytes + alone.streamed_bytes)
    assert len(both.weights) == len(viking.stats(second).weights) == 14
    viking.detach(second)
    assert viking.stats(first).streamed_bytes == alone.streamed_bytes


def test_a_time_is_measured_now_and_then() -> None:
    model, trained = build()
    attach(model)

    train(model, trained, 40)

    assert viking.stats(model).stall_ns > 0
