"""ZeRO-2 trains to the same numbers as DDP and the same optimizer: to the bit at two ranks, where
the order of every sum is the same, and from run to run at any number of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from models import (
    ADAMW,
    PROBLEMS,
    SGD,
    Kind,
    Problem,
    channels_last,
    furthest,
    train,
    with_ddp,
    with_plain,
    with_zero,
)
from problems import differing, same_bits
from ranks import run_ranks
from torch import nn, optim

from shardstep import ZeroRedundancyOptimizer

STEPS = range(50)
WAYS: list[dict[str, Any]] = [
    {"layout": "sliced", "overlap": True, "bucket_bytes": 1},
    {"layout": "sliced", "overlap": False, "bucket_bytes": 200_000},
    {"layout": "sliced", "overlap": True, "bucket_bytes": 1 << 30},
    {"layout": "whole", "overlap": True, "bucket_bytes": 200_000},
    {"layout": "whole", "overlap": False, "bucket_bytes": 1},
]


def _unlike_ddp(names: list[str], kind: Kind, steps: range) -> tuple[list[str], dict[str, set]]:
    failures: list[str] = []
    num_buckets: dict[str, set[int]] = {}
    for name in names:
        problem = PROBLEMS[name]
        ddp = with_ddp(problem.fresh(), kind, find_unused_parameters=problem.find_unused)
        losses = train(ddp, problem, steps)
        # DDP evens buffers out before a forward pass, shardstep after a step.
        problem.loss(ddp.model, 1)
        for way in WAYS:
            zero = with_zero(problem.fresh(), kind, **way)
            got = train(zero, problem, steps)
            num_buckets.setdefault(name, set()).add(len(zero.opt.plan.training_buckets))
            problem.loss(zero.model, 1)
            for what, expected, found in (
                ("losses", losses, got),
                ("parameters", ddp.params, zero.params),
                ("buffers", list(ddp.module.buffers()), list(zero.module.buffers())),
            ):
                if differing(expected, found):
                    failures.append(f"{name}, {way}: {what} {differing(expected, found)}")
    return failures, num_buckets


@pytest.mark.parametrize(
    "kind", [ADAMW, pytest.param(SGD, marks=pytest.mark.slow)], ids=["AdamW", "SGD"]
)
def test_two_ranks_equal_ddp_at_every_step_to_the_bit(kind: Kind) -> None:
    names = ["gpt", "conv", "branching"]
    for failures, num_buckets in run_ranks(_unlike_ddp, 2, names, kind, STEPS, timeout=110):
        assert failures == []
        # One bucket, a few, and many.
        assert len(num_buckets["gpt"]) == 3
        assert min(num_buckets["gpt"]) == 1
        assert max(num_buckets["gpt"]) >= 6


def _with_other_dtypes_and_formats() -> list[str]:
    failures, _ = _unlike_ddp(["mixed dtypes"], SGD, range(20))
    problem = Problem(channels_last, PROBLEMS["conv"].loss)
    for kind, overlap in itertools.product((ADAMW, SGD), (True, False)):
        ddp, zero = (
            with_ddp(problem.fresh(), kind),
            with_zero(problem.fresh(), kind, overlap=overlap),
        )
        losses, got = (train(setup, problem, range(10)) for setup in (ddp, zero))
        if differing([*losses, *ddp.params], [*got, *zero.params]):
            failures.append(f"channels last, {kind}, overlap {overlap}")
        weight = zero.module.get_parameter("one.weight")
        if not weight.is_contiguous(memory_format=torch.channels_last):
            failures.append("the weight is not channels-last any more")
    return failures


def test_mixed_dtypes_and_channels_last_equal_ddp_to_the_bit() -> None:
    assert run_ranks(_with_other_dtypes_and_formats, 2) == [[], []]


def _at_four() -> tuple[list[str], list[torch.Tensor], float]:
    failures: list[str] = []
    far = 0.0
    outcomes = []
    for name in ("gpt", "branching"):
        problem = PROBLEMS[name]
        ddp = with_ddp(problem.fresh(), SGD, find_unused_parameters=problem.find_unused)
        expected = [*train(ddp, problem, range(8)), *ddp.params]
        for layout in ("sliced", "whole"):
            runs = []
            for overlap in (True, False, True):
                zero = with_zero(problem.fresh(), SGD, layout=layout, overlap=overlap)
                runs.append([*train(zero, problem, range(8)), *zero.params])
            if any(differing(runs[0], run) for run in runs[1:]):
                failures.append(f"{name}, {layout}: differs between runs or with overlap")
            far = max(far, furthest(expected, runs[0]))
            outcomes += runs[0][8:]
    return failures, outcomes, far


@pytest.mark.slow
def test_four_ranks_repeat_themselves_to_the_bit_and_come_close_to_ddp() -> None:
    first, *others = run_ranks(_at_four, 4, timeout=110)
    for failures, params, far in (first, *others):
        assert failures == []
        assert differing(first[1], params) == []  # all ranks alike
        assert far < 1e-4  # four addends are added in another order than DDP's


def _alone() -> list[str]:
    failures = []
    for (name, problem), kind in itertools.product(PROBLEMS.items(), (ADAMW, SGD)):
        for layout in ("sliced", "whole"):
            plain, zero = (
                with_plain(problem.fresh(), kind),
                with_zero(problem.fresh(), kind, layout=layout),
            )
            expected, got = (train(setup, problem, range(5)) for setup in (plain, zero))
            if differing([*expected, *plain.params], [*got, *zero.params]):
                failures.append(f"{name}, {kind}, {layout}")
    return failures


def test_one_rank_in_a_group_equals_the_plain_optimizer_to_the_bit() -> None:
    assert run_ranks(_alone, 1) == [[]]


def test_without_a_process_group_it_equals_the_plain_optimizer_to_the_bit() -> None:
    assert _alone() == []


def _start() -> list[list[torch.Tensor]]:
    """Parameters and buffers of this rank before and after construction."""
    torch.manual_seed(5 + torch.distributed.get_rank())
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].running_mean.normal_()
    model[2].weight.requires_grad_(False)  # frozen, but of the model all the same
    before = [t.detach().clone() for t in model.state_dict().values()]
    ZeroRedundancyOptimizer(
        [p for p in model.parameters() if p.requires_grad], optim.SGD, module=model, lr=0.1
    )
    return [before, [t.detach().clone() for t in model.state_dict().values()]]


def test_all_ranks_start_with_rank_0s_parameters_and_buffers() -> None:
    (before, after), (before_there, after_there) = run_ranks(_start, 2)
    assert differing(before, after) == []
    assert differing(before, after_there) == []
    assert not same_bits(before[0], before_there[0])


class Anchored(optim.Optimizer):
    """Pulls parameters back to where they were when it was made."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["anchor"] = param.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
                    param.lerp_(self.state[param]["anchor"], 0.5)


def _anchors(dtype: torch.dtype) -> list[torch.Tensor]:
    """What the class has noted down of rank 0's parameters, and where a step leads from there."""
    torch.manual_seed(5 + torch.distributed.get_rank())
    model = nn.Linear(30, 40).to(dtype)
    opt = ZeroRedundancyOptimizer(model.parameters(), Anchored, module=model)
    start = [param.detach().float() for param in model.parameters()]
    noted = [opt.full_state(name)["anchor"] for name in ("weight", "bias")]
    assert differing(start, noted) == []
    model(torch.ones(2, 30, dtype=dtype)).sum().backward()
    opt.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_that_looks_at_parameters_when_it_is_made_sees_rank_0s(dtype: torch.dtype) -> None:
    (expected,) = run_ranks(_anchors, 1, dtype)
    for got in run_ranks(_anchors, 2, dtype):
        assert differing(expected, got) == []
