"""Plans: every element has one owner, cuts are aligned, shares are fair, and nothing is random."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import bucket_sizes, layouts, plans, spec_lists, world_sizes

from shardstep.layouts.cost import newton_schulz
from shardstep.plan import (
    ALIGNMENT,
    Copy,
    Holding,
    Interval,
    Layout,
    ParamSpec,
    ShardPlan,
    Slot,
    StateSize,
    default_bucket_bytes,
    shares,
    transfers,
)
from shardstep.plan.models import model
from shardstep.plan.placement import FIRST_BUCKET_BYTES, MIN_SEGMENT_UNITS
from shardstep.plan.plan import MIN_BUCKET_BYTES
from shardstep.precision import MixedPrecision

UNIT = 64  # the documented alignment; not imported, so that changing it is noticed here

LAYOUTS = ["sliced", "whole"]


def footprint(numel: int) -> int:
    """The room one parameter takes: whole alignment units, at least one."""
    return max(UNIT, -(-numel // UNIT) * UNIT)


def owned(plan: ShardPlan, group_rank: int) -> list[tuple[int, int, int]]:
    """The trainable (param, start, stop) of a rank, by geometry rather than by `pieces`."""
    found = []
    for bucket in plan.buckets:
        start, stop = bucket.cuts[group_rank], bucket.cuts[group_rank + 1]
        for slot in bucket.slots:
            low = max(start, slot.bucket_offset)
            high = min(stop, slot.bucket_offset + slot.numel)
            if low < high and plan.specs[slot.param].trainable:
                found.append((slot.param, low - slot.bucket_offset, high - slot.bucket_offset))
    return found


# ------------------------------------------------------------------------- who owns what


@given(plans())
def test_each_element_has_one_owner_and_lies_in_its_rank_s_segment(plan: ShardPlan) -> None:
    offsets = {(b.index, s.param): s.bucket_offset for b in plan.buckets for s in b.slots}
    owners = [np.zeros(spec.numel, dtype=np.int64) for spec in plan.specs]
    holders_of_empty = [0 for _ in plan.specs]
    for group_rank in range(plan.world_size):
        pieces = list(plan.pieces(group_rank))
        assert len({piece.param for piece in pieces}) == len(pieces), "one of a parameter at most"
        assert plan.intervals(group_rank) == {p.param: p.param_interval for p in pieces}
        for piece in pieces:
            owners[piece.param][piece.param_interval.slice] += 1
            holders_of_empty[piece.param] += piece.param_interval.numel == 0
            start = offsets[piece.bucket, piece.param] + piece.param_interval.start
            assert piece.bucket_offset == start
            segment = plan.buckets[piece.bucket].segment(group_rank)
            assert segment.start <= start <= start + piece.param_interval.numel <= segment.stop
            assert piece.entire == (piece.param_interval.numel == plan.specs[piece.param].numel)
            assert piece.entire or plan.specs[piece.param].layout == "sliced"
            # Kernels see a multiple of 64 elements before the piece.
            assert piece.param_interval.start % UNIT == 0
    for spec, counts, empty in zip(plan.specs, owners, holders_of_empty, strict=True):
        assert (counts == 1).all(), spec
        assert empty == (spec.numel == 0), f"{spec} has {empty} empty pieces"


@given(plans())
def test_a_bucket_has_one_dtype_one_device_aligned_cuts_and_is_trained_or_frozen(
    plan: ShardPlan,
) -> None:
    assert ALIGNMENT == UNIT
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        assert bucket.cuts[0] == 0
        assert [*bucket.cuts] == sorted(bucket.cuts)
        assert [cut % UNIT for cut in bucket.cuts] == [0] * (plan.world_size + 1)
        assert {plan.specs[slot.param].layout for slot in bucket.slots} == {
            "sliced" if bucket.even else "whole"
        }
        ends = [0, *(slot.bucket_offset + footprint(slot.numel) for slot in bucket.slots)]
        starts = [*(slot.bucket_offset for slot in bucket.slots), bucket.numel]
        assert all(end <= start for end, start in zip(ends, starts, strict=True)), "an overlap"
        for slot in bucket.slots:
            spec = plan.specs[slot.param]
            assert slot.bucket_offset % UNIT == 0
            assert (spec.dtype, spec.device) == (bucket.dtype, bucket.device)
            assert spec.trainable is not bucket.frozen
    assert plan.training_buckets == plan.buckets[: len(plan.training_buckets)]
    assert all(bucket.frozen for bucket in plan.buckets[len(plan.training_buckets) :])
    training = [min(slot.param for slot in bucket.slots) for bucket in plan.training_buckets]
    assert training == sorted(training), "reductions leave in about the order of backward"


@given(spec_lists(), world_sizes, layouts, bucket_sizes)
def test_a_bucket_is_closed_with_the_parameter_that_fills_it(
    specs: list[ParamSpec], world_size: int, layout: str, bucket_bytes: int
) -> None:
    """Only the first and last bucket of a kind can be small: `bucket_bytes` bounds the gathers."""
    plan = ShardPlan.make(specs, world_size, layout, bucket_bytes)
    kinds: dict[object, list[list[int]]] = {}
    for bucket in plan.buckets:
        kind = kinds.setdefault((bucket.dtype, bucket.device, bucket.frozen), [])
        kind.append(sorted(slot.param for slot in bucket.slots))
    for alike in kinds.values():
        itemsize = specs[alike[0][0]].dtype.itemsize
        least = world_size * UNIT * MIN_SEGMENT_UNITS
        full = max(bucket_bytes // itemsize, least)
        small = max(min(bucket_bytes, FIRST_BUCKET_BYTES) // itemsize, least)
        for params in alike:
            limit = small if params is alike[-1] else full
            assert sum(footprint(specs[param].numel) for param in params[1:]) < limit
        for params, following in pairwise(alike):
            filled = sum(footprint(specs[param].numel) for param in following)
            assert filled >= (small if following is alike[-1] else full)
            assert params[-1] < following[0], "buckets follow the order of the parameters"


# ------------------------------------------------------------------------------ fairness


@given(plans(layout="sliced"))
def test_sliced_gives_no_rank_a_unit_per_bucket_more_than_its_share(plan: ShardPlan) -> None:
    """Precisely: per bucket, a rank holds less than (room taken) / N + 64 elements.

    Room taken is the elements plus the padding that aligns parameters, under 64 each. There is no
    such bound from below: cuts are rounded up, so the last ranks get what is left.
    """
    for bucket in plan.training_buckets:
        room = sum(footprint(slot.numel) for slot in bucket.slots)
        for group_rank in range(plan.world_size):
            held = sum(piece.param_interval.numel for piece in bucket.pieces(group_rank))
            assert held <= bucket.segment(group_rank).numel
            assert (
                bucket.segment(group_rank).numel * plan.world_size < room + UNIT * plan.world_size
            )
    numel = sum(spec.numel for spec in plan.specs if spec.trainable)
    trainable = sum(spec.trainable for spec in plan.specs)
    most = max(plan.numel(group_rank) for group_rank in range(plan.world_size))
    mean = numel / plan.world_size
    padding = UNIT * trainable / plan.world_size
    assert most <= mean + padding + UNIT * len(plan.training_buckets)


@given(spec_lists(), world_sizes)
def test_whole_gives_no_rank_more_than_the_mean_and_one_largest_parameter(
    specs: list[ParamSpec], world_size: int
) -> None:
    """In bytes, so that mixed dtypes are balanced together; Graham's bound for greedy dealing."""
    plan = ShardPlan.make(specs, world_size, "whole")
    nbytes = [spec.nbytes for spec in plan.specs if spec.trainable]
    if not nbytes:
        return
    held = [share.nbytes for share in shares(plan)]
    assert max(held) * world_size <= sum(nbytes) + (world_size - 1) * max(nbytes)


@given(spec_lists(), world_sizes, layouts, bucket_sizes)
def test_frozen_parameters_do_not_alter_where_trainable_ones_lie(
    specs: list[ParamSpec], world_size: int, layout: str, bucket_bytes: int
) -> None:
    mixed = ShardPlan.make(specs, world_size, layout, bucket_bytes)
    kept = [index for index, spec in enumerate(specs) if spec.trainable]
    alone = ShardPlan.make([specs[index] for index in kept], world_size, layout, bucket_bytes)
    assert len(mixed.training_buckets) == len(alone.training_buckets)
    for group_rank in range(world_size):
        assert owned(mixed, group_rank) == [
            (kept[param], start, stop) for param, start, stop in owned(alone, group_rank)
        ]
        assert mixed.numel(group_rank) == alone.numel(group_rank)


@given(plans())
def test_a_share_counts_what_the_pieces_and_segments_of_its_rank_say(plan: ShardPlan) -> None:
    sizes = [StateSize(index, 3 * StateSize.PER) for index in range(len(plan.specs))]
    policy = MixedPrecision(reduce_dtype=torch.float64)
    total = 0
    for group_rank, estimated in enumerate(shares(plan, policy, sizes)):
        mine = owned(plan, group_rank)
        assert plan.numel(group_rank) == sum(stop - start for _, start, stop in mine)
        assert estimated.nbytes == sum(
            (stop - start) * plan.specs[param].dtype.itemsize for param, start, stop in mine
        )
        pieces = [p for p in plan.pieces(group_rank) if plan.specs[p.param].trainable]
        numels = {piece.param: piece.param_interval.numel for piece in pieces}
        low = [n for param, n in numels.items() if plan.specs[param].dtype == torch.bfloat16]
        assert estimated.master_nbytes == 4 * sum(map(footprint, low))
        assert estimated.state_nbytes == sum(param + 3 * n for param, n in numels.items())
        gathered = reduced = gradients = 0
        for bucket in plan.training_buckets:
            own = bucket.cuts[group_rank + 1] - bucket.cuts[group_rank]
            gathered += own * (plan.world_size - 1) * bucket.dtype.itemsize
            reduced += (bucket.numel - own) * policy.wire_dtype(bucket.dtype).itemsize
            gradients += own * policy.step_dtype(bucket.dtype).itemsize
        assert estimated.gather_nbytes_sent == gathered
        assert estimated.reduce_nbytes_sent == reduced
        assert estimated.gradient_nbytes == gradients
        total += plan.numel(group_rank)
    assert total == sum(spec.numel for spec in plan.specs if spec.trainable)


@pytest.mark.parametrize("world_size", [2, 8, 64, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gpt2-124m", "llama3-8b"])
def test_known_models_are_divided_fairly(name: str, world_size: int) -> None:
    specs = model(name)
    mean = sum(spec.numel for spec in specs) / world_size
    biggest = max(spec.numel for spec in specs)
    sliced, whole = (ShardPlan.make(specs, world_size, layout) for layout in LAYOUTS)
    assert max(map(sliced.numel, range(world_size))) <= 1.01 * mean
    assert max(map(whole.numel, range(world_size))) <= 4 / 3 * max(mean, biggest)


def test_sliced_stays_fair_however_small_the_buckets_are_wanted() -> None:
    """Rounding a cut up to a unit must not cost more than a percent: buckets have a least size."""
    specs = [ParamSpec.of(f"p{number}", (4160,)) for number in range(2000)]  # 65 units each
    plan = ShardPlan.make(specs, 64, "sliced", bucket_bytes=1)
    mean = sum(spec.numel for spec in specs) / 64
    assert max(map(plan.numel, range(64))) <= 1.01 * mean


def test_whole_balances_bytes_not_elements() -> None:
    dtypes = [torch.float64, torch.float32, torch.float32]
    specs = [ParamSpec.of(f"p{n}", (1000,), dtype) for n, dtype in enumerate(dtypes)]
    plan = ShardPlan.make(specs, 2, "whole")
    assert [share.nbytes for share in shares(plan)] == [8000, 8000]


def test_a_bucket_of_exactly_bucket_bytes_is_full() -> None:
    specs = [ParamSpec.of(f"p{n}", (1024, 64)) for n in range(3)]
    plan = ShardPlan.make(specs, 2, bucket_bytes=1024 * 64 * 4)
    assert [len(bucket.slots) for bucket in plan.buckets] == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "layout", "world_size"),
    [("llama3-8b", "sliced", 1024), ("llama3-8b", "whole", 1024), ("llama3-70b", "whole", 4096)],
)
def test_a_large_model_is_planned_in_two_seconds(name: str, layout: Any, world_size: int) -> None:
    specs = [replace(s, cost=newton_schulz((*s.shape, 1)[:2], 5)) for s in model(name)]
    start = time.process_time()
    plan = ShardPlan.make(specs, world_size, layout)
    assert len(shares(plan)) == world_size
    assert len(plan.fingerprint) == 64
    assert time.process_time() - start < 2


# --------------------------------------------------------------------------- sameness


@pytest.mark.slow
def test_plans_do_not_depend_on_the_hash_seed() -> None:
    """Ranks are separate processes: nothing may follow the order of a set of strings."""
    code = (
        "import torch; from shardstep.plan import ParamSpec, ShardPlan\n"
        "specs = [ParamSpec(f'p{i}', (i * 37, 11), (11, 1), dtype, f'cuda#{i % 3}', 0, i % 4 > 0)\n"
        "         for i in range(30) for dtype in (torch.float32, torch.bfloat16)]\n"
        "print(*(ShardPlan.make(specs, 5, l, 4096).fingerprint for l in ('sliced', 'whole')))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


CHANGES: dict[str, Callable[[ParamSpec], object]] = {
    "name": lambda spec: spec.name + "'",
    "shape": lambda spec: (*spec.shape, 1),
    "stride": lambda spec: tuple(step + 1 for step in spec.stride) or (1,),
    "dtype": lambda spec: torch.float16,
    "device": lambda spec: "xpu#0",
    "group": lambda spec: spec.group + 1,
    "trainable": lambda spec: not spec.trainable,
    "layout": lambda spec: {"sliced": "whole", "whole": "sliced"}[spec.layout],
    "cost": lambda spec: spec.cost + 1,
}


@given(st.data(), world_sizes, layouts)
def test_any_change_of_any_spec_changes_the_fingerprint(
    data: st.DataObject, world_size: int, layout: str
) -> None:
    specs = [replace(spec, layout=layout) for spec in data.draw(spec_lists())]
    index = data.draw(st.integers(0, len(specs) - 1))
    field = data.draw(st.sampled_from(sorted(CHANGES)))
    changed = list(specs)
    changed[index] = replace(specs[index], **{field: CHANGES[field](specs[index])})
    before, after = (ShardPlan.make(each, world_size) for each in (specs, changed))
    assert before.fingerprint != after.fingerprint


assert {field.name for field in dataclasses.fields(ParamSpec)} == CHANGES.keys()


def test_the_fingerprint_tells_world_sizes_layouts_orders_and_buckets_apart() -> None:
    specs = [ParamSpec.of("a", (300, 300)), ParamSpec.of("b", (300, 300))]
    prints = [
        ShardPlan.make(specs, 2).fingerprint,
        ShardPlan.make(specs, 3).fingerprint,
        ShardPlan.make(specs, 2, "whole").fingerprint,
        ShardPlan.make(specs, 2, bucket_bytes=1).fingerprint,
        ShardPlan.make(specs[::-1], 2).fingerprint,
        ShardPlan.make(specs[:1], 2).fingerprint,
    ]
    assert len(set(prints)) == len(prints)


def test_a_plan_in_which_nothing_trains_can_be_made() -> None:
    frozen = replace(ParamSpec.of("w", (10, 10)), trainable=False)
    plan = ShardPlan.make([frozen], 3)
    assert plan.training_buckets == ()
    assert [plan.numel(rank) for rank in range(3)] == [0, 0, 0]


# -------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "at least one rank"),
        ({"world_size": -3}, "world_size=-3"),
        ({"world_size": 2, "bucket_bytes": 0}, "bucket_bytes must be positive, not 0"),
        ({"world_size": 2, "layout": "auto"}, r"\['sliced', 'whole'\], not 'auto'"),
    ],
)
def test_make_refuses_what_cannot_be_planned(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardPlan.make([ParamSpec.of("w", (4,))], **options)


def good_plan(layout: str = "sliced", world_size: int = 2) -> ShardPlan:
    """`w` (192 elements), `v` (128) and a frozen `u` (64): one bucket of 320 and one of 64."""
    u = replace(ParamSpec.of("u", (64,)), trainable=False)
    return ShardPlan.make(
        [ParamSpec.of("w", (3, 64)), ParamSpec.of("v", (128,)), u], world_size, layout
    )


def with_bucket(plan: ShardPlan, **changes: object) -> ShardPlan:
    """`plan` with another first bucket; the constructor checks it anew."""
    first = replace(plan.buckets[0], **changes)
    return replace(plan, buckets=(first, *plan.buckets[1:]))


W, V = Slot(0, 0, 192), Slot(1, 192, 128)

#: Changes of the first bucket, or of the plan, and what is wrong with it then.
CORRUPTIONS: list[tuple[dict[str, object] | Callable[[ShardPlan], object], str]] = [
    ({"slots": (W, Slot(1, 128, 128))}, "'v'.* overlaps"),
    ({"slots": (V, W)}, "'w'.* overlaps"),
    ({"slots": (W,)}, "'v'.* is placed nowhere"),
    ({"slots": (W, V, Slot(0, 320, 192)), "cuts": (0, 256, 512)}, "'w'.* is placed twice"),
    ({"slots": (W, Slot(1, 192, 64))}, "'v'.* is placed with 64 elements"),
    ({"slots": (W, Slot(1, 200, 128))}, "'v'.* starts off a unit"),
    ({"cuts": (0, 100, 384)}, "alignment unit"),
    ({"cuts": (0, 448, 384)}, "out of order"),
    ({"cuts": (64, 192, 384)}, "does not start at 0"),
    ({"cuts": (0, 384)}, "too few or many cuts"),
    ({"cuts": (0, 128, 256, 384)}, "too few or many cuts"),
    ({"cuts": (0, 64, 256)}, "too short"),
    ({"dtype": torch.float64}, "'w'.* lies in a torch.float64 bucket"),
    ({"device": "cuda#0"}, "'w'.* bucket on cuda#0"),
    ({"frozen": True}, "'w'.* lies in the wrong bucket"),
    ({"index": 5}, "has index 5"),
    (lambda plan: replace(plan, world_size=3), "cuts"),
    (lambda plan: replace(plan, buckets=plan.buckets[:1]), "'u'.* is placed nowhere"),
    (
        lambda plan: replace(
            with_bucket(plan, cuts=(0, 128, 384)),
            specs=tuple(replace(spec, layout="whole") for spec in plan.specs),
        ),
        "'v'.* is cut in two|'w'.* is cut in two",
    ),
    (
        lambda plan: with_bucket(good_plan("whole"), cuts=(0, 192, 192), slots=(W, V)),
        "",  # a parameter behind the last cut
    ),
]


@pytest.mark.parametrize(("corruption", "message"), CORRUPTIONS)
def test_a_corrupted_plan_is_refused(corruption: Any, message: str) -> None:
    plan = good_plan()
    assert plan.buckets[0].slots == (W, V)
    assert list(plan.buckets[0].cuts) == [0, 192, 384]
    with pytest.raises(ValueError, match=f"this is not a plan: .*{message}"):
        corruption(plan) if callable(corruption) else with_bucket(plan, **corruption)


def test_a_valid_plan_writes_no_messages() -> None:
    """They took half of the time to plan a large model."""
    specs = [ParamSpec.of("w", (3, 64))]
    with mock.patch.object(ParamSpec, "__str__", side_effect=AssertionError):
        ShardPlan.make(specs, 2)


@pytest.mark.parametrize(
    ("numel", "layout", "backend", "mib"),
    [
        (1000, "sliced", "gloo", 1),
        (1000, "whole", "gloo", 1),
        (1000, "sliced", "nccl", 8),
        (1000, "whole", "nccl", 25),
        (48 * 2**20, "sliced", "gloo", 12),
        (48 * 2**20, "sliced", "nccl", 12),
        (2**30, "sliced", "nccl", 25),
    ],
)
def test_the_default_bucket(numel: int, layout: Layout, backend: str, mib: int) -> None:
    specs = [replace(ParamSpec.of("weight", (numel,)), layout=layout)]
    assert default_bucket_bytes(specs, MIN_BUCKET_BYTES[backend]) == mib * 2**20


# ------------------------------------------------------------------- from plan to plan


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
    copies = check_transfers([s.numel for s in specs], before.holdings, after.holdings)
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
    copies = check_transfers([spec.numel for spec in plan.specs], plan.holdings, wanted)
    assert {copy.target for copy in copies} == {to}


@given(plans())
def test_transfers_from_a_plan_to_itself_stay_at_home(plan: ShardPlan) -> None:
    copies = list(transfers(plan.holdings, plan.holdings))
    assert all(copy.source == copy.target for copy in copies)
    assert len(copies) == sum(len(holding) for holding in plan.holdings)


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
