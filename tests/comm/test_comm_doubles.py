"""A step gathers each bucket once and forgets none; a double really changes the order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from doubles import AnyOrder, Counting, behind_the_door
from models import MLP_PROBLEM, with_zero
from on_ranks import on_ranks
from problems import assert_same, copies, make_params, train
from ranks import run_ranks

from shardstep import ZeroRedundancyOptimizer
from shardstep.gradients.lockstep import Lockstep

STEPS = 3

WAYS = [(layout, view) for layout in ("sliced", "whole") for view in (False, True)]
each_way = pytest.mark.parametrize(("layout", "view"), WAYS)


SHAPES = [(170, 150), (5,), (), (160, 160), (7, 3, 2, 2), (0,), (200, 130), (161, 160), (33,)]
SHAPES += [(150, 170), (65,)]


def make() -> list[torch.nn.Parameter]:
    """Five fp32 buckets and a double one at up to three ranks, with odd, empty and frozen ones."""
    params = make_params(SHAPES, frozen=())
    params[4].data = params[4].data.contiguous(memory_format=torch.channels_last)
    return [*params, *make_params([(90, 11), (99,)], frozen=(1,), dtypes=(torch.float64,))]


def step_through(layout: str, view: bool) -> dict[str, Any]:
    params = make()
    with behind_the_door(Counting) as doubles:
        opt = ZeroRedundancyOptimizer(
            params,
            torch.optim.AdamW,
            layout=layout,
            parameters_as_bucket_view=view,
            bucket_bytes=1,
            lr=0.1,
        )
    (comm,) = doubles
    assert isinstance(comm, Counting)
    by_step = []
    for step in range(STEPS):
        train(opt, params, range(step, step + 1), missing=False)
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
def test_a_step_gathers_each_training_bucket_once_and_waits_for_all(
    layout: str, view: bool
) -> None:
    ranks = run_ranks(step_through, 2, layout, view)
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
    seen = step_through(layout, view)
    assert seen["comm"]["launched"] == []
    assert_unsharded(seen["params"])


@on_ranks(2)
def test_operations_really_finish_in_another_order() -> None:
    with behind_the_door(AnyOrder):
        zero = with_zero(MLP_PROBLEM.fresh())
    for step in range(4):
        zero.backward(step)
        zero.finish()
    zero.opt.shards.wait_for_params()
    assert zero.opt.mode.comm.landed_early
    assert zero.opt.mode.gather_comm.landed_early
