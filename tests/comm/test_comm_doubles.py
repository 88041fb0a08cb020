"""Steps through doubles of communication: nothing is read early, reused early or forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from doubles import AnyOrder, Counting, LateArrival, behind_the_door
from problems import assert_same, copies, make_params, train
from ranks import run_ranks

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import Comm
from shardstep.gradients.lockstep import Lockstep

STEPS = 3

WAYS = [(layout, view) for layout in ("sliced", "whole") for view in (False, True)]
DOUBLES: dict[str, Callable[[Comm], Comm]] = {
    "late": LateArrival,
    "any order": AnyOrder,
    "counting": Counting,
}

each_way = pytest.mark.parametrize(("layout", "view"), WAYS)


SHAPES = [(170, 150), (5,), (), (160, 160), (7, 3, 2, 2), (0,), (200, 130), (161, 160), (33,)]
SHAPES += [(150, 170), (65,)]


def make() -> list[torch.nn.Parameter]:
    """Five fp32 buckets and a double one at up to three ranks, with odd, empty and frozen ones."""
    params = make_params(SHAPES, frozen=())
    params[4].data = params[4].data.contiguous(memory_format=torch.channels_last)
    return [*params, *make_params([(90, 11), (99,)], frozen=(1,), dtypes=(torch.float64,))]


def step_through(double: str, layout: str, view: bool) -> dict[str, Any]:
    params = make()
    with behind_the_door(DOUBLES[double]) as doubles:
        opt = ZeroRedundancyOptimizer(
            params,
            torch.optim.AdamW,
            layout=layout,
            parameters_as_bucket_view=view,
            bucket_bytes=1,
            lr=0.1,
        )
    (comm,) = doubles
    by_step = []
    for step in range(STEPS):
        train(opt, params, range(step, step + 1), missing=False)
        if isinstance(comm, Counting):
            by_step.append((len(comm.launched), comm.unawaited))
    return {
        "comm": {key: value for key, value in vars(comm).items() if not key.startswith("_")},
        "by step": by_step,
        "params": copies(params),
        "cuts": [tuple(bucket.cuts) for bucket in opt.plan.training_buckets],
    }


def assert_unsharded(params: list[torch.Tensor]) -> None:
    plain = make()
    expected = train(torch.optim.AdamW(plain, lr=0.1), plain, range(STEPS), missing=False)
    assert_same(expected, params)


@each_way
@pytest.mark.parametrize("double", ["late", "any order"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gathers_may_be_late_and_finish_in_any_order(
    double: str, layout: str, view: bool, world_size: int
) -> None:
    ranks = run_ranks(step_through, world_size, double, layout, view)
    if double == "any order":
        assert any(rank["comm"]["landed_early"] for rank in ranks), "the order was never another"
    for rank in ranks:
        assert_unsharded(rank["params"])


@each_way
def test_a_step_gathers_each_training_bucket_once_and_waits_for_all(
    layout: str, view: bool
) -> None:
    ranks = run_ranks(step_through, 2, "counting", layout, view)
    cuts = ranks[0]["cuts"]
    assert len(cuts) >= 5, "too few buckets to tell"
    each = [(0, Lockstep.nbytes, 2 * Lockstep.nbytes), *cuts]  # the ranks' positions come first
    for rank in ranks:
        seen = rank["comm"]
        assert seen["launched"] == each * STEPS, "one gather per bucket, in the plan's order"
        assert rank["by step"] == [(len(each) * (step + 1), []) for step in range(STEPS)]
        assert sorted(seen["waited"]) == list(range(len(each) * STEPS)), "each waited for, once"
        assert seen["most_in_flight"] == (len(cuts) if view else 2)
        assert_unsharded(rank["params"])


@each_way
def test_one_rank_gathers_nothing(layout: str, view: bool) -> None:
    seen = step_through("counting", layout, view)
    assert seen["comm"]["launched"] == []
    assert_unsharded(seen["params"])
