"""Ranks with fewer inputs than others do not hold them up: `Join` beyond the scenarios.

The scenarios in `uneven` equal DDP.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import MLP_PROBLEM, PROBLEMS, SGD, noise, rank, train, with_zero, world_size
from on_ranks import on_ranks
from problems import LAYOUTS, assert_same, copies, differing, make_params, set_gradients
from ranks import each_raises_on_every_rank, run_ranks
from scenarios import ALL, MODULE, distance, sharded, unsharded
from torch import Tensor, nn, optim
from torch.distributed.algorithms.join import Join, Joinable
from uneven import PLAIN_SGD, joined

from shardstep import ZeroRedundancyOptimizer
from shardstep.gradients import lockstep

OPTIONS = {"lr": 0.05, "momentum": 0.9}
COMBINATIONS = list(itertools.product(LAYOUTS, (False, True)))

# ------------------------------------------------------------------------------------------ drop-in


def _inputs() -> int:
    """Return the number of this rank's inputs. The last rank has the most."""
    return 3 + 2 * rank()


def _params() -> list[nn.Parameter]:
    """Return parameters with gradients that are the same at every step.

    A rank that has joined has the right ones then.
    """
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
    return 3 + 2 * (world_size() - 1)


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
    last = world_size() - 1
    assert_same(_unsharded(2 * last), _joined(2 * (last - rank())))


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


@on_ranks(3)
def test_joining_within_a_subgroup() -> list[int]:
    """Ranks 1 and 2 join; their group's ranks are 0 and 1."""
    group = dist.new_group([1, 2])
    if rank() == 0:
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
    joined(setup, 4 * rank())
    opt.consolidate_state_dict(to=0)
    if opt.rank == 0:
        steps = {int(entry["step"]) for entry in opt.state_dict()["state"].values()}
        assert steps == {4}


@pytest.mark.parametrize("mode", ALL)
@on_ranks(2)
def test_after_join_is_not_within_join(mode: str) -> None:
    """What needs every rank works again, and training goes on without joined ranks."""
    setup = sharded(mode, MLP_PROBLEM.fresh())
    for epoch in range(2):
        joined(setup, 2 + 2 * rank())
        setup.opt.apply(lambda _: None)
        if mode in MODULE:
            setup.opt.recover()
        train(setup, MLP_PROBLEM, range(epoch, epoch + 2))
        setup.opt.verify()


# ------------------------------------------------------------------------------------------ module=


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


def _throwing(with_module: bool) -> None:
    """Let ranks end at different times, with the optimizer as the only joinable."""
    if with_module:
        joined(with_zero(MLP_PROBLEM.fresh(), SGD), 3 + rank(), throw_on_early_termination=True)
    else:
        _joined(_inputs(), throw_on_early_termination=True)


@pytest.mark.parametrize("mode", ["drop-in", "module"])
@on_ranks(2)
def test_after_an_error_within_join_ranks_train_on(mode: str) -> None:
    """As DDP does. With `module=`, the other ranks may wait for an announcement."""
    expected, setup = (
        make(MLP_PROBLEM.fresh(), SGD) for make in (unsharded, partial(sharded, mode))
    )
    for each in (expected, setup):
        with pytest.raises(RuntimeError, match="exhausted"):
            joined(each, 2 + 2 * rank(), throw_on_early_termination=True)
        if mode == "module" and each is setup:
            with pytest.raises(RuntimeError, match=r"enter Join\(\[\.\.\.\], enable=False\)"):
                each.opt.recover()
            with Join([each.opt], enable=False):
                each.opt.recover()
            each.opt.apply(lambda local: None)
        each.opt.zero_grad()
        train(each, MLP_PROBLEM, range(4, 6))
    assert_same(expected.params, setup.params)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("inputs", [(3, 1), (1, 3)])
@on_ranks(2)
def test_a_rank_may_join_before_ddp_has_rebuilt_its_buckets(
    inputs: tuple[int, int], view: bool
) -> None:
    """DDP does it in its own join hook then, before any hook of the optimizer."""
    seen = []
    for make in (unsharded, partial(sharded, "register")):
        setup = make(MLP_PROBLEM.fresh(), PLAIN_SGD, gradient_as_bucket_view=view)
        with Join([each for each in (setup.model, setup.opt) if isinstance(each, Joinable)]):
            for step in range(inputs[rank()]):
                setup.opt.zero_grad()
                MLP_PROBLEM.loss(setup.model, step).backward()
                setup.opt.step()
        seen.append(setup.params)
    assert_same(*seen)


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


def _differ_after_a_rank_has_joined(edit: bool, clip: bool, late: bool) -> None:
    """With `late`, as on an accelerator, where notes are compared in the next step."""
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    group = zero.opt.param_groups[0]
    waited_for = () if late else lockstep.WAITED_FOR
    with mock.patch.object(lockstep, "WAITED_FOR", waited_for), Join([zero.opt]):
        for step in range(5 if rank() else 2):
            if step == 3 and rank() == 1:
                group["params"].pop() if edit else group.update(lr=0.1)
            zero.backward(step)
            if clip:
                zero.clip(1.0)
            zero.finish()


@pytest.mark.parametrize("clip", [False, True])
def test_a_difference_is_named_on_ranks_without_data_too(clip: bool) -> None:
    differ = _differ_after_a_rank_has_joined
    each_raises_on_every_rank(
        3,
        [
            (differ, ValueError, "rank 1: .* no longer in it", True, clip, False),
            (differ, RuntimeError, "on rank 1 and .* 2", False, clip, False),
            (differ, RuntimeError, "rank 1 has arguments .* where rank 2", False, clip, True),
        ],
    )


def test_early_ends_other_joinables_first_and_different_acts_are_errors_on_every_rank() -> None:
    cases: list[tuple[Any, ...]] = [
        (_throwing, RuntimeError, "exhausted", False),
        (_throwing, RuntimeError, "exhausted", True),
        (_not_first, RuntimeError, r"the first in Join\(\[\.\.\.\]\)"),
        (_different_acts, RuntimeError, "rank 0 has action .* where rank 1 has"),
    ]
    each_raises_on_every_rank(2, cases)


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
    assert distance(params, zero.params) < 1e-5


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
