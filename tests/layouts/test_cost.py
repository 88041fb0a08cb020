"""The cost of a step on a matrix is known in advance, and ranks share the work by it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.layout_table import table
from hypothesis import given
from plans import costly, world_sizes
from torch import optim

from shardstep.layouts.cost import count, newton_schulz, step_cost
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.plan import ParamSpec, ShardPlan, shares
from shardstep.plan.models import model


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64), (1, 7)])
@pytest.mark.parametrize("options", [({}, {}), ({"ns_steps": 3}, {}), ({}, {"ns_steps": 3})])
def test_what_is_known_of_muon_is_what_is_counted(shape: tuple[int, ...], options: Any) -> None:
    recipe = OptimizerRecipe(optim.Muon, *options)
    assert count(recipe, shape) == step_cost(recipe, shape) > 0


class Declares(optim.SGD):
    @staticmethod
    def shardstep_cost(shape: tuple[int, ...]) -> float:
        return 2.5 * shape[0]


class Asks(optim.SGD):
    """Asks for a value, which a tensor without data has none of."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].sum().item()


def test_what_is_not_known_costs_nothing_and_what_is_declared_counts() -> None:
    assert step_cost(OptimizerRecipe(Declares, {"lr": 0.1}), (30, 7)) == 75
    assert step_cost(OptimizerRecipe(partial(Declares, lr=0.1), {}), (30, 7)) == 75
    assert step_cost(OptimizerRecipe(Asks, {"lr": 0.1}), (30, 7)) == 0
    assert step_cost(OptimizerRecipe(optim.AdamW, {}), (30, 7)) == 0
    assert step_cost(OptimizerRecipe(optim.Muon, {}), (30,)) == 0


def held(plan: ShardPlan, group_rank: int) -> tuple[int, int]:
    """Bytes and cost of the parameters that a rank holds uncut."""
    own = [plan.specs[piece.param] for piece in plan.pieces(group_rank)]
    own = [spec for spec in own if spec.layout == "whole" and spec.trainable]
    return sum(spec.nbytes for spec in own), sum(spec.cost or spec.nbytes for spec in own)


@given(costly(), world_sizes)
def test_no_rank_has_more_than_twice_the_mean_and_one_parameter(
    specs: list[ParamSpec], world_size: int
) -> None:
    """In bytes and in cost; to be exact, in the larger of both fractions."""
    plan = ShardPlan.make(specs, world_size)
    dealt = [spec for spec in specs if spec.layout == "whole" and spec.trainable]
    nbytes = sum(spec.nbytes for spec in dealt)
    cost = sum(spec.cost or spec.nbytes for spec in dealt)
    if not nbytes or not cost:
        return
    largest = max(max(s.nbytes / nbytes, (s.cost or s.nbytes) / cost) for s in dealt)
    for group_rank in range(world_size):
        own_nbytes, own_cost = held(plan, group_rank)
        assert own_nbytes / nbytes <= 2 / world_size + largest + 1e-9
        assert own_cost / cost <= 2 / world_size + largest + 1e-9


def with_muon(specs: list[ParamSpec]) -> list[ParamSpec]:
    """Muon for the matrices of the blocks, an element-wise class for the rest."""
    outside = ("wte", "wpe", "embed_tokens", "lm_head")
    return [
        dataclasses.replace(spec, layout="whole", cost=newton_schulz(spec.shape, 5))
        if len(spec.shape) == 2 and not spec.name.startswith(outside)
        else spec
        for spec in specs
    ]


@pytest.mark.parametrize(
    ("name", "world_size", "most_cost", "most_bytes"),
    [
        ("gpt2-124m", 8, 1.03, 1.01),
        ("llama3-8b", 8, 1.01, 1.01),
        pytest.param("llama3-8b", 64, 1.06, 1.07, marks=pytest.mark.slow),
    ],
)
def test_muon_is_dealt_fairly(
    name: str, world_size: int, most_cost: float, most_bytes: float
) -> None:
    plan = ShardPlan.make(with_muon(model(name)), world_size)
    costs = [held(plan, rank)[1] for rank in range(world_size)]
    sizes = [share.nbytes for share in shares(plan)]
    assert max(costs) <= most_cost * sum(costs) / world_size
    assert max(sizes) <= most_bytes * sum(sizes) / world_size


def test_more_ranks_than_matrices_leave_no_rank_with_two() -> None:
    plan = ShardPlan.make(with_muon(model("gpt2-124m")), 64)
    matrices = {index for index, spec in enumerate(plan.specs) if spec.layout == "whole"}
    assert len(matrices) == 48
    assert max(len(matrices & plan.intervals(rank).keys()) for rank in range(64)) == 1


def test_a_costly_matrix_and_a_large_one_go_to_different_ranks() -> None:
    """By bytes alone, or by cost alone, one of the two ranks would have next to nothing to do."""
    table = dataclasses.replace(ParamSpec.of("table", (1000, 64)), layout="whole", cost=1)
    dense = [
        dataclasses.replace(ParamSpec.of(f"w{n}", (64, 64)), layout="whole", cost=10**6)
        for n in range(4)
    ]
    plan = ShardPlan.make([table, *dense], 2)
    owners = {param: rank for rank in range(2) for param in plan.intervals(rank)}
    assert len({owners[0], owners[1], owners[2]}) == 2
    assert sum(owners[n] != owners[0] for n in range(1, 5)) >= 3


@pytest.mark.slow
def test_the_page_has_the_table_as_it_is_made() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()
