"""A step that fails on one rank fails on all, at once and by name; so do ranks that die."""

from __future__ import annotations

import contextlib
import os
import re
import time
from unittest import mock

import pytest
import torch
from ddp_ways import WAYS
from doubles import Wrapped, behind_the_door
from models import MLP_PROBLEM, SGD, Failing, Setup, from_rank, rank, with_zero
from on_ranks import on_ranks
from problems import assert_same
from ranks import RankFailure, run_ranks
from scenarios import sharded
from torch import nn

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


# ----------------------------------------------------------------------------- ranks that die


def _die_in_backward() -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    if rank() == 1:
        zero.module.get_parameter("layers.1.weight").register_hook(lambda grad: os._exit(17))
    zero.backward(0)
    zero.opt.step()


def test_when_a_rank_dies_in_backward_the_others_raise_and_name_the_operation() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"shardstep: rank 0: reducing gradients failed"):
        run_ranks(_die_in_backward, 2, timeout=120)
    assert time.monotonic() - start < 50, "not by a timeout, which takes 60 seconds"


def _die_around_the_gather(when: str) -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    zero.backward(0)
    zero.opt.clip_grad_norm_(1.0)  # everybody has what they need for the step
    if rank() == 1:
        time.sleep(0.3 if when == "in flight" else 0.0)
        os._exit(17)
    time.sleep(0.0 if when == "in flight" else 0.5)
    errors = []
    try:
        zero.opt.step()
        time.sleep(0.8)  # by now the peer is dead, or a read waits for its end
    except RuntimeError as error:
        errors.append(str(error))
    # It is no use to ask again: what did not come is not taken for what should have come.
    params = list(zero.module.parameters())
    for param in params:
        for _ in range(2):
            try:
                param.sum()
            except RuntimeError as error:
                errors.append(str(error))
    # The header of the step is waited for ahead of its gathers.
    assert all(re.search("rank 0: .*(step|parameters) failed", error) for error in errors)
    assert len(errors) >= 2 * len(params)
    # Another model may be compiled all the same.
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    raise RuntimeError("every read raised")


@pytest.mark.parametrize("when", ["in flight", "before the launch"])
def test_parameters_that_did_not_arrive_can_never_be_read(when: str) -> None:
    with pytest.raises(RankFailure, match="every read raised"):
        run_ranks(_die_around_the_gather, 2, when, timeout=60)
