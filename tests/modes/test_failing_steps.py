"""A step that fails on one rank fails on all, at once and by name; so do ranks out of step."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
from ddp_ways import WAYS
from doubles import Wrapped, behind_the_door
from models import MLP_PROBLEM, Failing, Setup, noise, rank, with_zero
from on_ranks import on_ranks
from ranks import RankFailure, run_ranks
from scenarios import sharded
from torch import nn

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import Work
from shardstep.comm.api import NOTHING_TO_DO
from shardstep.gradients.used import OutOfStepError
from shardstep.modes import lockstep

KIND = (Failing, {"lr": 0.1})


def _make(mode: str) -> Setup:
    return sharded(mode, MLP_PROBLEM.fresh(), KIND, zero={"layout": "sliced"})


def _fail(way: str, iteration: int) -> list[str]:
    """Return the errors of each rank, which catches them and goes on living."""
    setup = _make(way)
    start = time.monotonic()
    errors = []
    Failing.armed = False
    try:
        for step in range(iteration + 2):
            Failing.armed = step == iteration
            setup.backward(step)
            setup.finish()
    except (RuntimeError, ArithmeticError) as error:
        errors.append(f"{type(error).__name__}: {error}")
    Failing.armed = False
    if time.monotonic() - start > 20:
        errors.append("too late")
    alike = setup.params
    torch.distributed.barrier()
    return [*errors, str([float(param.double().sum()) for param in alike])]


@pytest.mark.parametrize("way", ["drop-in", "module", *WAYS])
@pytest.mark.parametrize("iteration", [0, 2])
def test_a_step_that_fails_on_one_rank_fails_on_every_rank(way: str, iteration: int) -> None:
    first, second = run_ranks(_fail, 2, way, iteration)
    assert second[0] == "ArithmeticError: no step on this rank"
    assert first[0].startswith("RuntimeError: rank 0: the optimizer's step failed on rank 1, so it")
    assert first[0].endswith("ArithmeticError: no step on this rank")
    assert first[1:] == second[1:], "every rank has the same parameters"


class Unheard(Wrapped):
    """Shares no errors, as over NCCL: reading them would hold up the accelerator."""

    def share_error(self, error: str | None) -> Work:
        return NOTHING_TO_DO


def _go_on_after(way: str) -> tuple[int, str]:
    """Return the step that raises on this rank if rank 1 catches the error of step 2."""
    with behind_the_door(Unheard), mock.patch.object(lockstep, "WAITED_FOR", ()):
        setup = _make(way)
        for step in range(6):
            Failing.armed = step == 2
            try:
                setup.backward(step)
                setup.finish()
            except ArithmeticError:
                setup.opt.zero_grad()
            except OutOfStepError as error:
                return step, str(error)
    return -1, ""


@pytest.mark.parametrize("way", ["drop-in", "module", *WAYS])
def test_an_accelerator_s_ranks_learn_of_a_failed_step_in_the_second_one_after_it(way: str) -> None:
    said = "rank 0 counts 0 calls of step() that raised where rank 1 counts 1"
    for step, error in run_ranks(_go_on_after, 2, way):
        assert step == 4
        assert said in error


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


def _extra(what: str) -> None:
    setup = with_zero(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    for step in range(3):
        if step == 2 and rank() == 0:
            if what == "forward":
                setup.module(noise(step, 6, 16))
            else:
                setup.opt.clip_grad_norm_(1.0)
        setup.module(noise(step, 6, 16)).sum().backward()
        if step == 2 and what == "clip" and rank() == 0:
            setup.opt.clip_grad_norm_(1.0)
        setup.finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "operation"),
    [("forward", "copying buffers"), ("clip", "computing the norm of the gradients")],
)
def test_an_extra_call_on_one_rank_times_out_by_name(what: str, operation: str) -> None:
    with pytest.raises(RankFailure, match=rf"rank 0: {operation} failed: (to|from) rank 1: .*imed"):
        run_ranks(_extra, 2, what, timeout=8)


@on_ranks(2, raises=ValueError, match="SparseAdam takes sparse gradients")
def test_a_class_that_needs_sparse_gradients_is_refused_with_module() -> None:
    table = nn.Embedding(50, 8, sparse=True)
    ZeroRedundancyOptimizer(table.parameters(), torch.optim.SparseAdam, module=table)


@on_ranks(2, raises=ValueError, match="buffer 'scale' is expanded")
def test_an_expanded_buffer_is_refused_on_every_rank() -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("scale", torch.ones(1).expand(3))
    with_zero(module)
