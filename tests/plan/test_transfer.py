"""Transfers bring every element from one placement to another, from its owner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import bucket_sizes, layouts, plans, spec_lists, world_sizes

from shardstep.plan import Copy, Holding, Interval, ParamSpec, ShardPlan, transfers


def holdings(plan: ShardPlan) -> list[Holding]:
    return [plan.intervals(group_rank) for group_rank in range(plan.world_size)]


def check_transfers(
    numels: Sequence[int], held: Sequence[Holding], wanted: Sequence[Holding]
) -> list[Copy]:
    """Play the copies element by element; the source of each must be its owner."""
    nowhere = -1
    owner = [np.full(numel, nowhere) for numel in numels]
    for source, holding in enumerate(held):
        for param, interval in holding.items():
            owner[param][interval.slice] = source
    copies = list(transfers(held, wanted))
    for target, holding in enumerate(wanted):
        for param, interval in holding.items():
            came_from = np.full(numels[param], nowhere)
            for copy in copies:
                if (copy.target, copy.param) == (target, param):
                    piece = came_from[copy.param_interval.slice]
                    assert len(piece) == copy.param_interval.numel
                    assert (piece == nowhere).all(), "an element arrives twice"
                    piece[:] = copy.source
            expected = np.full(numels[param], nowhere)
            expected[interval.slice] = owner[param][interval.slice]
            np.testing.assert_array_equal(came_from, expected)
    for copy in copies:
        assert copy.param in wanted[copy.target], "no rank asked for this"
    order = [(copy.source, copy.target, copy.param) for copy in copies]
    assert order == sorted(order)
    return copies


@settings(max_examples=60)
@given(spec_lists(max_size=6), world_sizes, world_sizes, layouts, layouts, bucket_sizes)
def test_transfers_bring_every_element_from_plan_a_to_plan_b(
    specs: list[ParamSpec],
    ranks_before: int,
    ranks_after: int,
    layout_before: str,
    layout_after: str,
    bucket_bytes: int,
) -> None:
    before = ShardPlan.make(specs, ranks_before, layout_before, bucket_bytes)
    after = ShardPlan.make(specs, ranks_after, layout_after)
    copies = check_transfers([s.numel for s in specs], holdings(before), holdings(after))
    # Empty parameters have state too, so each still goes from somewhere to somewhere.
    empty = {index for index, spec in enumerate(specs) if not spec.numel}
    assert sorted(c.param for c in copies if c.param in empty) == sorted(empty)


@given(plans(), st.integers(0, 16))
def test_transfers_bring_everything_to_one_rank_and_nothing_to_the_others(
    plan: ShardPlan, to: int
) -> None:
    to %= plan.world_size
    everything = {index: Interval(0, spec.numel) for index, spec in enumerate(plan.specs)}
    wanted = [everything if rank == to else {} for rank in range(plan.world_size)]
    copies = check_transfers([spec.numel for spec in plan.specs], holdings(plan), wanted)
    assert {copy.target for copy in copies} == {to}


@given(plans())
def test_transfers_from_a_plan_to_itself_stay_at_home(plan: ShardPlan) -> None:
    copies = list(transfers(holdings(plan), holdings(plan)))
    assert all(copy.source == copy.target for copy in copies)
    assert len(copies) == sum(len(holding) for holding in holdings(plan))


def intervals(numel: int) -> st.SearchStrategy[Interval]:
    ends = st.tuples(st.integers(0, numel), st.integers(0, numel))
    return ends.filter(lambda e: e[0] != e[1]).map(lambda e: Interval(min(e), max(e)))


@given(intervals(20), intervals(20), st.integers(-5, 5))
def test_intervals_intersect_and_shift_as_sets_of_positions(
    one: Interval, other: Interval, offset: int
) -> None:
    both = one.intersect(other)
    assert set(range(*both)) == set(range(*one)) & set(range(*other))
    assert both.numel == len(range(*both))
    assert list(range(*one.shift(offset))) == [position + offset for position in range(*one)]
    assert list(range(30))[one.slice] == list(range(*one))
