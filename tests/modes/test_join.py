"""Ranks with fewer inputs than others do not hold them up: a drop-in optimizer under `Join`."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problems import LAYOUTS, copies, differing, make_params, set_gradients
from ranks import raises_on_every_rank, run_ranks
from torch import optim
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from shardstep import ZeroRedundancyOptimizer

OPTIONS = {"lr": 0.05, "momentum": 0.9}
COMBINATIONS = list(itertools.product(LAYOUTS, (False, True)))


def _inputs() -> int:
    """The last rank has the most; the first but one runs out before it."""
    return 3 + 2 * dist.get_rank()


def _alone() -> list[str]:
    """Gradients are set by hand, and are the same at every step, so that a rank that has joined
    has the right ones. (Torch's own class hangs when it is the first or only joinable.)"""

    def run(make: Any) -> list[torch.Tensor]:
        params = make_params(frozen=())
        opt = make(params)
        set_gradients(params, 0, missing=False)
        with Join([opt]):
            for _ in range(_inputs()):
                opt.step()
        return copies(params)

    params = make_params(frozen=())
    plain = optim.SGD(params, **OPTIONS)
    set_gradients(params, 0, missing=False)
    for _ in range(3 + 2 * (dist.get_world_size() - 1)):
        plain.step()
    expected = copies(params)
    results = {}
    for layout, view in COMBINATIONS:
        results[f"layout {layout}, view {view}"] = run(
            lambda params, layout=layout, view=view: ZeroRedundancyOptimizer(
                params, optim.SGD, None, view, layout=layout, **OPTIONS
            )
        )
    return [name for name, got in results.items() if differing(expected, got)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_joined_ranks_go_on_updating_what_they_own(world_size: int) -> None:
    assert run_ranks(_alone, world_size) == [[]] * world_size


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


def _behind_another() -> list[str]:
    """The second of two joinables, as DDP's companion is, and beside torch's own class."""

    def run(make: Any) -> list[torch.Tensor]:
        params = make_params([(53, 17), (7,), (1009,), (1,)], frozen=())
        opt = make(params)
        beat = _Beat()
        set_gradients(params, 0, missing=False)
        with Join([beat, opt]):
            for _ in range(_inputs()):
                Join.notify_join_context(beat)
                opt.step()
        return copies(params)

    expected = run(lambda params: TorchZero(params, optim.SGD, **OPTIONS))
    results = {}
    for layout, view in COMBINATIONS:
        results[f"layout {layout}, view {view}"] = run(
            lambda params, layout=layout, view=view: ZeroRedundancyOptimizer(
                params, optim.SGD, None, view, layout=layout, **OPTIONS
            )
        )
    return [name for name, got in results.items() if differing(expected, got)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_joining_behind_another_joinable_equals_torchs_own_class(world_size: int) -> None:
    assert run_ranks(_behind_another, world_size) == [[]] * world_size


def _inputs_the_other_way_round() -> list[int]:
    """Rank 0 goes on longest, and one rank has no input at all."""
    params = make_params(frozen=())
    opt = ZeroRedundancyOptimizer(params, optim.SGD, **OPTIONS)
    set_gradients(params, 0, missing=False)
    with Join([opt]):
        for _ in range(2 * (opt.world_size - 1 - opt.rank)):
            opt.step()
    expected = make_params(frozen=())
    plain = optim.SGD(expected, **OPTIONS)
    set_gradients(expected, 0, missing=False)
    for _ in range(2 * (opt.world_size - 1)):
        plain.step()
    return differing(expected, params)


def test_a_rank_without_any_input_takes_every_step() -> None:
    assert run_ranks(_inputs_the_other_way_round, 3) == [[], [], []]


def _even_inputs() -> list[int]:
    params, expected = make_params(), make_params()
    opt = ZeroRedundancyOptimizer(params, optim.SGD, **OPTIONS)
    plain = optim.SGD(expected, **OPTIONS)
    for enable in (True, False):
        with Join([opt], enable=enable):
            for step in range(3):
                set_gradients(params, step)
                set_gradients(expected, step)
                opt.step()
                plain.step()
    return differing(expected, params)


def test_even_inputs_and_a_disabled_context_change_nothing() -> None:
    assert run_ranks(_even_inputs, 2) == [[], []]


def _two_optimizers() -> list[list[int]]:
    params = make_params(frozen=())
    halves = [params[:4], params[4:]]
    opts = [ZeroRedundancyOptimizer(half, optim.SGD, **OPTIONS) for half in halves]
    set_gradients(params, 0, missing=False)
    with Join(opts):
        for _ in range(_inputs()):
            for opt in opts:
                opt.step()
    expected = make_params(frozen=())
    plain = optim.SGD(expected, **OPTIONS)
    set_gradients(expected, 0, missing=False)
    for _ in range(3 + 2 * (dist.get_world_size() - 1)):
        plain.step()
    return [differing(expected, params)]


def test_several_optimizers_join_together() -> None:
    assert run_ranks(_two_optimizers, 2) == [[[]], [[]]]


def _throwing() -> None:
    params = make_params(frozen=())
    opt = ZeroRedundancyOptimizer(params, optim.SGD, **OPTIONS)
    set_gradients(params, 0, missing=False)
    with Join([opt], throw_on_early_termination=True):
        for _ in range(_inputs()):
            opt.step()


def test_early_termination_can_be_an_error_on_every_rank() -> None:
    raises_on_every_rank(_throwing, 2, RuntimeError, match="exhausted")


def _in_a_subgroup() -> list[int]:
    """Ranks 1 and 2 join; their group's ranks are 0 and 1."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    params = make_params(frozen=())
    opt = ZeroRedundancyOptimizer(params, optim.SGD, group, **OPTIONS)
    assert opt.join_process_group is group
    set_gradients(params, 0, missing=False)
    with Join([opt]):
        for _ in range(2 + opt.rank):
            opt.step()
    expected = make_params(frozen=())
    plain = optim.SGD(expected, **OPTIONS)
    set_gradients(expected, 0, missing=False)
    for _ in range(3):
        plain.step()
    return differing(expected, params)


def test_joining_within_a_subgroup() -> None:
    assert run_ranks(_in_a_subgroup, 3) == [[], [], []]


def _properties() -> tuple[str, bool]:
    opt = ZeroRedundancyOptimizer(make_params(), optim.SGD)
    assert isinstance(opt, Joinable)
    return str(opt.join_device), opt.join_process_group is dist.group.WORLD


def test_join_device_and_process_group() -> None:
    assert run_ranks(_properties, 2) == [("cpu", True)] * 2


def _checkpoint_after_joining() -> list[int]:
    """Every rank has kept its part of the state current, so what is saved is the last step's."""
    params = make_params(frozen=())
    opt = ZeroRedundancyOptimizer(params, optim.Adam)
    set_gradients(params, 0, missing=False)
    with Join([opt]):
        for _ in range(_inputs()):
            opt.step()
    opt.consolidate_state_dict(to=0)
    if opt.rank:
        return []
    state = copy.deepcopy(opt.state_dict())["state"]
    return sorted({int(entry["step"]) for entry in state.values()})


def test_the_state_of_joined_ranks_is_current() -> None:
    assert run_ranks(_checkpoint_after_joining, 2) == [[5], []]
