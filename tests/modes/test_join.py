"""Ranks with fewer inputs than others do not hold them up: a drop-in optimizer under `Join`.

Gradients are set by hand and are the same at every step, so that a rank that has joined has the
right ones. What is done under DDP is in `uneven`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from problems import LAYOUTS, copies, differing, make_params, set_gradients
from ranks import run_ranks
from torch import Tensor, nn, optim
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

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


def _alone() -> list[list[int]]:
    """Torch's own class hangs when it is the first or only joinable."""
    expected = _unsharded(_most())
    return [differing(expected, _joined(_inputs(), *each)) for each in COMBINATIONS]


@pytest.mark.parametrize("world_size", [2, 3])
def test_joined_ranks_go_on_updating_what_they_own(world_size: int) -> None:
    assert run_ranks(_alone, world_size) == [[[]] * 4] * world_size


class _Beat(Joinable):
    """A first joinable that only counts: torch's own class cannot be the first."""

    class _Nothing(JoinHook):
        """Does nothing while others go on."""

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self._Nothing()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


def _behind_another() -> list[list[int]]:
    """The second of two joinables, as it is with DDP."""

    def run(make: Callable[[list[nn.Parameter]], Any]) -> list[Tensor]:
        params = make_params([(53, 17), (7,), (1009,), (1,)], frozen=())
        opt, beat = make(params), _Beat()
        set_gradients(params, 0, missing=False)
        with Join([beat, opt]):
            for _ in range(_inputs()):
                Join.notify_join_context(beat)
                opt.step()
        return copies(params)

    def ours(params: list[nn.Parameter], layout: str, view: bool) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(params, optim.SGD, None, view, layout=layout, **OPTIONS)

    expected = run(lambda params: TorchZero(params, optim.SGD, **OPTIONS))
    return [
        differing(expected, run(lambda params, each=each: ours(params, *each)))
        for each in COMBINATIONS
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_joining_behind_another_joinable_equals_torchs_own_class(world_size: int) -> None:
    assert run_ranks(_behind_another, world_size) == [[[]] * 4] * world_size


@on_ranks(3)
def test_a_rank_without_any_input_takes_every_step() -> list[int]:
    """Rank 0 goes on longest, and one rank has no input at all."""
    last = dist.get_world_size() - 1
    return differing(_unsharded(2 * last), _joined(2 * (last - dist.get_rank())))


def _even_inputs() -> list[list[int]]:
    return [differing(_unsharded(3), _joined(3, enable=enable)) for enable in (True, False)]


def test_even_inputs_and_a_disabled_context_change_nothing() -> None:
    assert run_ranks(_even_inputs, 2) == [[[], []]] * 2


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


def _state_after_joining() -> list[int]:
    """Every rank has kept its part of the state current, so what is saved is the last step's."""
    opt = ZeroRedundancyOptimizer(_params(), optim.Adam)
    assert isinstance(opt, Joinable)
    assert (str(opt.join_device), opt.join_process_group) == ("cpu", dist.group.WORLD)
    with Join([opt]):
        for _ in range(_inputs()):
            opt.step()
    opt.consolidate_state_dict(to=0)
    state = {} if opt.rank else opt.state_dict()["state"]
    return sorted({int(entry["step"]) for entry in state.values()})


def test_the_state_of_joined_ranks_is_current() -> None:
    assert run_ranks(_state_after_joining, 2) == [[5], []]
