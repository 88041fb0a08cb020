"""Steps through doubles of communication: nothing is read early, reused early or forgotten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from doubles import AnyOrder, Counting, LateArrival
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import SoloComm

STEPS = 3

WAYS = [(layout, view) for layout in ("sliced", "whole") for view in (False, True)]
each_way = pytest.mark.parametrize(("layout", "view"), WAYS)


def make_params() -> list[torch.Tensor]:
    """Five fp32 buckets and a double one at up to three ranks, with odd, empty and frozen ones."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(170, 150), (5,), (), (160, 160), (7, 3, 2, 2), (0,), (200, 130), (161, 160), (33,)]
    shapes += [(150, 170), (65,)]
    data = [torch.rand(shape, generator=generator) - 0.5 for shape in shapes]
    data[4] = data[4].contiguous(memory_format=torch.channels_last)
    data.append(torch.rand(90, 11, generator=generator, dtype=torch.float64))
    params: list[torch.Tensor] = [torch.nn.Parameter(each) for each in data]
    params.append(torch.nn.Parameter(torch.ones(99), requires_grad=False))
    return params


def fill_gradients(params: list[torch.Tensor], step: int) -> None:
    """The same on every rank, as DDP leaves them."""
    for index, param in enumerate(params):
        if param.requires_grad:
            generator = torch.Generator().manual_seed(1000 * step + index)
            param.grad = torch.rand(param.shape, generator=generator).to(param.dtype) - 0.5


def unsharded() -> list[torch.Tensor]:
    params = make_params()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for step in range(STEPS):
        fill_gradients(params, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


def step_through(double: str, layout: str, view: bool) -> dict[str, Any]:
    params = make_params()
    opt = ZeroRedundancyOptimizer(
        params,
        torch.optim.AdamW,
        layout=layout,
        parameters_as_bucket_view=view,
        bucket_bytes=1,
        lr=0.1,
    )
    inner = opt._comm
    if double == "late":
        inner = LateArrival(inner)
    elif double == "any order":
        inner = AnyOrder(inner, seed=dist.get_rank())  # another order on every rank
    opt._comm = counting = Counting(inner)
    launched_by_step, unawaited_by_step = [], []
    for step in range(STEPS):
        fill_gradients(params, step)
        opt.step()
        launched_by_step.append(len(counting.launched))
        unawaited_by_step.append(counting.unawaited)
    return {
        "params": [param.detach().clone() for param in params],
        "launched": counting.launched,
        "launched by step": launched_by_step,
        "waited": sorted(counting.waited),
        "unawaited by step": unawaited_by_step,
        "most in flight": counting.most_in_flight,
        "landed early": getattr(inner, "landed_early", 0),
        "cuts": [tuple(bucket.cuts) for bucket in opt.plan.training_buckets],
    }


def assert_unsharded(params: list[torch.Tensor]) -> None:
    for index, (param, expected) in enumerate(zip(params, unsharded(), strict=True)):
        assert torch.equal(param, expected), f"param {index} differs from the unsharded run"


@each_way
@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_read_from_a_gather_that_has_not_arrived(
    layout: str, view: bool, world_size: int
) -> None:
    for rank in run_ranks(step_through, world_size, "late", layout, view):
        assert_unsharded(rank["params"])


@each_way
@pytest.mark.parametrize("world_size", [2, 3])
def test_gathers_may_finish_in_any_order(layout: str, view: bool, world_size: int) -> None:
    ranks = run_ranks(step_through, world_size, "any order", layout, view)
    assert any(rank["landed early"] for rank in ranks), "the order was never another"
    for rank in ranks:
        assert_unsharded(rank["params"])


@each_way
def test_a_step_gathers_each_training_bucket_once_and_waits_for_all(
    layout: str, view: bool
) -> None:
    ranks = run_ranks(step_through, 2, "none", layout, view)
    cuts = ranks[0]["cuts"]
    assert len(cuts) >= 5, "too few buckets to tell"
    for rank in ranks:
        assert rank["launched"] == cuts * STEPS, "one gather per bucket, in the plan's order"
        assert rank["launched by step"] == [len(cuts) * (n + 1) for n in range(STEPS)]
        assert rank["waited"] == list(range(len(cuts) * STEPS)), "each waited for, once"
        assert rank["unawaited by step"] == [[]] * STEPS
        assert rank["most in flight"] == (len(cuts) if view else 2)
        assert_unsharded(rank["params"])


@each_way
def test_one_rank_gathers_nothing(layout: str, view: bool) -> None:
    params = make_params()
    opt = ZeroRedundancyOptimizer(
        params, torch.optim.AdamW, layout=layout, parameters_as_bucket_view=view, lr=0.1
    )
    assert isinstance(opt._comm, SoloComm)
    opt._comm = counting = Counting(opt._comm)
    for step in range(STEPS):
        fill_gradients(params, step)
        opt.step()
    assert counting.launched == []
    assert_unsharded(params)
