"""Uneven inputs with `module=`: what goes beyond the scenarios that equal DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MLP_PROBLEM, PROBLEMS, SGD, furthest, noise, rank, with_zero, world_size
from on_ranks import on_ranks
from problems import copies, differing
from ranks import each_raises_on_every_rank, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from uneven import joined

from shardstep import ZeroRedundancyOptimizer

Loss = Callable[[nn.Module, int, int], Tensor]


def _mlp_loss(model: nn.Module, step: int, ranks: Sequence[int]) -> Tensor:
    losses = [model(noise(step, 6, 16, of=each)).square().mean() for each in ranks]
    return torch.stack(losses).sum()


def _num_inputs(of: int, reverse: bool) -> int:
    return 3 + 2 * (world_size() - 1 - of if reverse else of)


def _buffers_around_forward(reverse: bool) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return the buffers before and after each forward pass, the final ones behind the first."""
    zero, conv = with_zero(PROBLEMS["conv"].fresh(), SGD), PROBLEMS["conv"]
    before: list[list[Tensor]] = []
    after: list[list[Tensor]] = []
    zero.module.register_forward_pre_hook(lambda *_: before.append(copies(zero.module.buffers())))
    zero.module.register_forward_hook(lambda *_: after.append(copies(zero.module.buffers())))
    with Join([zero.opt]):
        for step in range(_num_inputs(rank(), reverse)):
            zero.backward(step, conv)
            zero.finish()
    return [*before, copies(zero.module.buffers())], after


@pytest.mark.parametrize("reverse", [False, True])
def test_buffers_are_those_of_the_first_rank_with_data(reverse: bool) -> None:
    ranks = run_ranks(_buffers_around_forward, 2, reverse)
    for step in range(5):
        source = next(after for _, after in ranks if len(after) > step)
        for before, after in ranks:
            if len(after) > step + 1 or step == 4:
                at = step + 1 if len(after) > step + 1 else -1
                assert differing(source[step], before[at]) == []


def _throwing() -> None:
    joined(with_zero(MLP_PROBLEM.fresh(), SGD), 3 + rank(), throw_on_early_termination=True)


def _not_first() -> None:
    one, two = with_zero(MLP_PROBLEM.fresh(), SGD), with_zero(MLP_PROBLEM.fresh(), SGD)
    with Join([one.opt, two.opt]):
        two.backward(0)
        two.finish()


def _different_acts() -> None:
    """One rank clips and the other does not: an error for both, and no hang."""
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    with Join([zero.opt]):
        zero.backward(0)
        if rank() == 0:
            zero.clip(1.0)
        zero.opt.step()


def test_early_ends_other_joinables_first_and_different_acts_are_errors_on_every_rank() -> None:
    cases = {
        _throwing: "exhausted",
        _not_first: r"the first in Join\(\[\.\.\.\]\)",
        _different_acts: "different things",
    }
    each_raises_on_every_rank(2, [(fn, RuntimeError, match) for fn, match in cases.items()])


def test_without_a_process_group_join_is_not_needed() -> None:
    model: Any = MLP_PROBLEM.fresh()
    opt = ZeroRedundancyOptimizer(model.parameters(), SGD[0], module=model, **SGD[1])
    _mlp_loss(model, 0, [0]).backward()
    opt.step()


@pytest.mark.parametrize("when", ["before another backward", "before clipping", "before the step"])
@on_ranks(3)
def test_ranks_without_data_forget_the_gradients_that_others_clear_by_hand(when: str) -> None:
    """Some gradients are cleared by hand, and not by `zero_grad`; the first rank has less data."""
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    module = copy.deepcopy(zero.module)
    plain = SGD[0](module.parameters(), **SGD[1])
    ranks = range(world_size())

    def turn(model: nn.Module, step: int, of: Sequence[int], opt: Any, clip: Any) -> None:
        _mlp_loss(model, step, of).backward()
        if when != "before the step":
            model.get_submodule("layers.0").zero_grad()
            model.get_parameter("layers.3.weight").grad = None
            if when == "before clipping":
                clip(0.01)
            _mlp_loss(model, step + 100, of).backward()
        model.get_submodule("layers.1").zero_grad()
        opt.step()
        opt.zero_grad()

    with Join([zero.opt]):
        for step in range(_num_inputs(rank(), reverse=False)):
            turn(zero.module, step, [rank()], zero.opt, zero.clip)
    # Gradients are summed over ranks here, and divided when they are stepped on.
    params = list(module.parameters())
    clip = lambda max_norm: nn.utils.clip_grad_norm_(params, max_norm * world_size())  # noqa: E731
    plain.register_step_pre_hook(
        lambda *_: [p.grad.div_(world_size()) for p in params if p.grad is not None] and None
    )
    for step in range(max(_num_inputs(of, reverse=False) for of in ranks)):
        active = [of for of in ranks if _num_inputs(of, reverse=False) > step]
        turn(module, step, active, plain, clip)
    assert furthest(params, zero.params) < 1e-5


@on_ranks(2)
def test_buffers_that_a_forward_pass_evens_out_reach_ranks_without_data() -> None:
    """Two passes per step outside of `no_sync`: the second evens buffers out, everywhere."""
    zero = with_zero(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), SGD)
    with Join([zero.opt]):
        for step in range(2 + 2 * rank()):
            for part in range(2):
                zero.model(noise(10 * step + part, 4, 8)).square().mean().backward()
            zero.finish()
    for value in zero.module.state_dict().values():
        both = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(both, value.clone())
        assert torch.equal(*both)
