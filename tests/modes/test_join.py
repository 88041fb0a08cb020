"""Ranks with fewer inputs than others do not hold them up: a drop-in optimizer under `Join`.

Gradients are set by hand and are the same at every step, so that a rank that has joined has the
right ones. What is done under DDP is in `uneven`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch.distributed as dist
from models import MLP_PROBLEM
from on_ranks import on_ranks
from problems import LAYOUTS, assert_same, copies, differing, make_params, set_gradients
from scenarios import sharded
from torch import Tensor, nn, optim
from torch.distributed.algorithms.join import Join, Joinable
from uneven import joined

from shardstep import ZeroRedundancyOptimizer

OPTIONS = {"lr": 0.05, "momentum": 0.9}
COMBINATIONS = list(itertools.product(LAYOUTS, (False, True)))


def _inputs() -> int:
    """The last rank has the most."""
    return 3 + 2 * dist.get_rank()


def _params() -> list[nn.Parameter]:
    params = make_params(frozen=())
    set_gradients(params, 0, missing=False)
    return params


def _unsharded(steps: int) -> list[Tensor]:
    params = _params()
    plain = optim.SGD(params, **OPTIONS)
    for _ in range(steps):
        plain.step()
    return copies(params)


def _most() -> int:
    return 3 + 2 * (dist.get_world_size() - 1)


def _joined(inputs: int, layout: str = "sliced", view: bool = False, **join: Any) -> list[Tensor]:
    params = _params()
    opt = ZeroRedundancyOptimizer(params, optim.SGD, None, view, layout=layout, **OPTIONS)
    with Join([opt], **join):
        for _ in range(inputs):
            opt.step()
    return copies(params)


@on_ranks(2, 3)
def test_joined_ranks_go_on_updating_what_they_own() -> None:
    """As the only joinable, where torch's own class hangs."""
    expected = _unsharded(_most())
    for each in COMBINATIONS:
        assert_same(expected, _joined(_inputs(), *each), each)
    # Rank 0 goes on longest, and one rank has no input at all.
    last = dist.get_world_size() - 1
    assert_same(_unsharded(2 * last), _joined(2 * (last - dist.get_rank())))


@on_ranks(2)
def test_several_optimizers_join_together() -> list[int]:
    params = _params()
    halves = [params[:4], params[4:]]
    opts = [ZeroRedundancyOptimizer(half, optim.SGD, **OPTIONS) for half in halves]
    with Join(opts):
        for _ in range(_inputs()):
            for opt in opts:
                opt.step()
    return differing(_unsharded(_most()), params)


@on_ranks(2, raises=RuntimeError, match="exhausted")
def test_early_termination_can_be_an_error_on_every_rank() -> None:
    _joined(_inputs(), throw_on_early_termination=True)


@on_ranks(3)
def test_joining_within_a_subgroup() -> list[int]:
    """Ranks 1 and 2 join; their group's ranks are 0 and 1."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    params = _params()
    opt = ZeroRedundancyOptimizer(params, optim.SGD, group, **OPTIONS)
    assert opt.join_process_group is group
    with Join([opt]):
        for _ in range(2 + opt.rank):
            opt.step()
    return differing(_unsharded(3), params)


@pytest.mark.parametrize("mode", ["drop-in", "module"])
@on_ranks(2)
def test_the_state_of_joined_ranks_is_current(mode: str) -> None:
    """Every rank has kept its part of the state current, so what is saved is the last step's."""
    setup = sharded(mode, MLP_PROBLEM.fresh())
    opt = setup.opt
    assert isinstance(opt, Joinable)
    assert (str(opt.join_device), opt.join_process_group) == ("cpu", dist.group.WORLD)
    joined(setup, 4 * dist.get_rank())
    opt.consolidate_state_dict(to=0)
    if opt.rank == 0:
        steps = {int(entry["step"]) for entry in opt.state_dict()["state"].values()}
        assert steps == {4}
