"""A step that fails on one rank fails on all, at once and by name; so do ranks out of step."""

from __future__ import annotations

import contextlib
import time
from unittest import mock

import pytest
import torch
from ddp_ways import WAYS
from doubles import Wrapped, behind_the_door
from models import MLP_PROBLEM, Failing, Setup, from_rank, rank, with_zero
from on_ranks import on_ranks
from problems import assert_same
from scenarios import sharded
from torch import nn

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import OutOfStepError, Work
from shardstep.comm.api import NOTHING_TO_DO
from shardstep.gradients import lockstep

KIND = (Failing, {"lr": 0.1})


def _make(mode: str) -> Setup:
    return sharded(mode, MLP_PROBLEM.fresh(), KIND, zero={"layout": "sliced"})


def _fail(setup: Setup, iteration: int) -> None:
    """Fail in this iteration; another rank may learn of it in the next."""
    for step in range(iteration + 2):
        Failing.armed = step == iteration
        setup.backward(step)
        setup.finish()


@pytest.mark.parametrize("way", ["drop-in", "module", *WAYS])
@on_ranks(2)
def test_a_step_that_fails_on_one_rank_fails_on_every_rank(way: str) -> None:
    """Each rank catches the error and goes on living."""
    here = (RuntimeError, "^rank 0: the optimizer's step failed on rank 1, so it .*no step on this")
    there = (ArithmeticError, "^no step on this rank$")
    for iteration in (0, 2):
        setup, start = _make(way), time.monotonic()
        error, match = there if rank() == 1 else here
        with pytest.raises(error, match=match):
            _fail(setup, iteration)
        Failing.armed = False
        assert time.monotonic() - start < 20
        assert_same(from_rank(0, setup.params), setup.params)


class Unheard(Wrapped):
    """Shares no errors, as over NCCL: reading them would hold up the accelerator."""

    def share_error(self, error: str | None) -> Work:
        return NOTHING_TO_DO


@pytest.mark.parametrize("way", ["drop-in", "module", *WAYS])
@on_ranks(2)
def test_an_accelerator_s_ranks_learn_of_a_failed_step_in_the_second_one_after_it(way: str) -> None:
    """Rank 1 catches the error of step 2."""
    said = r"rank 0 counts 0 calls of step\(\) that raised where rank 1 counts 1"
    with behind_the_door(Unheard), mock.patch.object(lockstep, "WAITED_FOR", ()):
        setup = _make(way)
        for step in range(5):
            Failing.armed = step == 2
            late = pytest.raises(OutOfStepError, match=said)
            with late if step == 4 else contextlib.suppress(ArithmeticError):
                setup.backward(step)
                setup.finish()
            if step == 2 and rank() == 1:
                setup.opt.zero_grad()


@pytest.mark.parametrize("way", ["drop-in", "module"])
@on_ranks(2)
def test_a_step_that_fails_on_every_rank_may_be_repeated(way: str) -> None:
    """Call `step` in a way that every rank's optimizer refuses, and then as it should be."""
    setup = _make(way)
    Failing.armed = False
    setup.backward(0)
    with pytest.raises(TypeError):
        setup.opt.step(nonsense=1)
    setup.finish()
    setup.opt.verify()


@on_ranks(2, raises=ValueError, match="SparseAdam takes sparse gradients")
def test_a_class_that_needs_sparse_gradients_is_refused_with_module() -> None:
    table = nn.Embedding(50, 8, sparse=True)
    ZeroRedundancyOptimizer(table.parameters(), torch.optim.SparseAdam, module=table)


@on_ranks(2, raises=ValueError, match="buffer 'scale' is expanded")
def test_an_expanded_buffer_is_refused_on_every_rank() -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("scale", torch.ones(1).expand(3))
    with_zero(module)
