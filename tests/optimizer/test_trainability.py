"""What trains may change at any time: state, traffic and checkpoints follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from follow import COMBINATIONS, follow, in_turn
from models import consolidated
from on_ranks import on_ranks
from problems import (
    ELEMENT_WISE,
    LAYOUTS,
    Case,
    assert_alike,
    copies,
    differing,
    make_params,
    set_gradients,
    train,
)
from ranks import each_raises_on_every_rank
from torch import nn, optim
from traffic import counted

from shardstep import ZeroRedundancyOptimizer
from shardstep.gradients.lockstep import Lockstep
from shardstep.modes.drop_in import CHECKED_STEPS
from shardstep.plan import share

SHAPES = [(53, 17), (7,), (131, 67), (), (64,), (0,), (1009,), (40, 33)]
CLASSES = [
    Case(optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    Case(optim.Adam, {"amsgrad": True}),
    Case(optim.AdamW, {"fused": True}),
    Case(optim.Adagrad, {"initial_accumulator_value": 0.1}),
]


def follow_each(script: Callable[[Any, list[nn.Parameter]], None], cases: Iterable[Case]) -> None:
    make = partial(make_params, SHAPES, frozen=())
    for number, case in enumerate(cases):
        follow(script, case, make, combinations=in_turn(number))


def freeze(params: list[nn.Parameter], *numbers: int) -> None:
    for number in numbers:
        params[number].requires_grad_(False)
        params[number].grad = None


def unfreeze(params: list[nn.Parameter], *numbers: int) -> None:
    for number in numbers:
        params[number].requires_grad_(True)


@pytest.mark.slow
@on_ranks(2)
def test_the_state_of_every_class_follows_the_plan() -> None:
    def script(opt: Any, params: list[nn.Parameter]) -> None:
        train(opt, params, range(3), missing=False)
        freeze(params, 0, 2)
        train(opt, params, range(3, 5), missing=False)
        unfreeze(params, 2)
        train(opt, params, range(5, 8), missing=False)

    firsts = {case.optimizer_class: case for case in reversed(ELEMENT_WISE)}
    follow_each(script, firsts.values())


@on_ranks(2, 3)
def test_a_frozen_parameter_with_a_gradient_is_updated_as_torch_does() -> None:
    """`torch.optim` looks at the gradient, not at `requires_grad`: a parameter frozen while it has
    one goes on being updated."""

    def script(opt: Any, params: list[nn.Parameter]) -> None:
        train(opt, params, range(2), missing=False)
        for number in (0, 2, 6):
            params[number].requires_grad_(False)  # and its gradient stays
        for step in range(2, 5):
            set_gradients([p for p in params if p.requires_grad], step)
            before = copies(params)
            opt.step()
            assert {0, 2, 6} <= set(differing(before, copies(params)))
        opt.zero_grad(set_to_none=False)  # momentum carries on with a gradient of zero
        opt.step()
        opt.zero_grad()
        before = copies(params)
        opt.step()
        assert not differing(before, copies(params))

    follow_each(script, CLASSES)


@on_ranks(3)
def test_frozen_parameters_are_not_communicated() -> None:
    for layout, view in COMBINATIONS:
        params = make_params(SHAPES, frozen=())
        with counted() as traffic:
            opt = ZeroRedundancyOptimizer(params, optim.SGD, None, view, layout=layout, lr=0.1)

        def sent(step: int, params: Any = params, opt: Any = opt, traffic: Any = traffic) -> int:
            """Take a step; return the bytes that all ranks send for it."""
            traffic.reset()
            set_gradients(params, step, missing=False)
            opt.step()
            nbytes = traffic.nbytes["all_gather"] - Lockstep.nbytes * (opt.world_size - 1)
            assert nbytes == share(opt.plan, opt.rank).gather_nbytes_sent, step
            everyones = torch.tensor(nbytes)
            dist.all_reduce(everyones)
            trained = sum(p.numel() for p in params if p.requires_grad) * 4
            # Each parameter is padded to 64 elements at most, and each segment once more.
            room = (len(params) + opt.world_size) * 64 * 4
            assert everyones <= (trained + room) * (opt.world_size - 1), step
            return int(everyones)

        all_of_them = sent(0)
        freeze(params, 0, 2)
        assert sent(1) < all_of_them / 2
        freeze(params, *range(len(params)))
        assert sent(2) == 0
        unfreeze(params, *range(len(params)))
        assert sent(3) == all_of_them


@on_ranks(2)
def test_a_step_without_changes_is_one_gather_per_bucket_a_note_and_a_verdict() -> None:
    """Noticing changes costs no communication while there are none."""
    params = make_params(SHAPES, frozen=(1, 2))
    with counted() as traffic:
        opt = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1)
    train(opt, params, range(CHECKED_STEPS))  # compares some gradients
    traffic.reset()
    train(opt, params, range(5))
    assert traffic.calls.total() == 15


@on_ranks(2, raises=ValueError, match="param 0|param 2")
def test_ranks_that_freeze_different_parameters_are_told() -> None:
    params = make_params(SHAPES, frozen=())
    opt = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1)
    train(opt, params, range(2))
    # Both change something, so both notice; what they changed is not the same.
    freeze(params, 0 if opt.rank else 2)
    train(opt, params, range(2, 3))


# ---------------------------------------------------------- checkpoints after such changes


def _other_shape(rows: int, with_module: bool) -> None:
    module = nn.Linear(16, 64)
    tie = {"module": module} if with_module else {}
    opt = ZeroRedundancyOptimizer(module.parameters(), optim.AdamW, **tie)
    for _ in range(2):
        module(torch.ones(2, 16)).sum().backward()
        opt.step()
        opt.zero_grad()
        module.weight.data, module.bias.data = torch.ones(rows, 16), torch.ones(rows)


def test_data_of_a_shape_that_state_does_not_fit_is_refused_everywhere() -> None:
    match = r"'.*' was given data of shape \(80, 16\) in place of \(64, 16\)"
    cases = [(_other_shape, RuntimeError, match, 80, module) for module in (False, True)]
    each_raises_on_every_rank(2, cases)


def _in_place(opt: Any) -> Any:
    opt.load_state_dict(consolidated(opt, 1))
    return opt


def _into_a_new_one(opt: Any, view: bool) -> Any:
    groups = [{"params": group["params"]} for group in opt.param_groups]
    other = LAYOUTS[opt.plan.layout == "sliced"]
    new = ZeroRedundancyOptimizer(groups, optim.Adam, None, view, layout=other)
    new.load_state_dict(consolidated(opt, 1))
    return new


@on_ranks(2)
def test_checkpoints_are_right_after_every_change() -> None:
    def script(opt: Any, params: list[nn.Parameter], reload: Callable[[Any], Any]) -> Any:
        train(opt, params[:5], range(2))
        opt = reload(opt)
        opt.add_param_group({"params": params[5:], "lr": 0.02})
        opt = reload(opt)
        train(opt, params, range(2, 4))
        freeze(params, 0, 6)
        opt = reload(opt)  # frozen, but no step yet has seen it
        train(opt, params, range(4, 6))
        opt = reload(opt)
        unfreeze(params, 0)
        opt = reload(opt)
        train(opt, params, range(6, 8))
        state = consolidated(opt, 1)
        return [*copies(params), {**state, "state": dict(sorted(state["state"].items()))}]

    params = make_params(SHAPES, frozen=())
    expected = script(optim.Adam(params[:5]), params, _in_place)
    for layout, view in COMBINATIONS:
        for reload in (_in_place, partial(_into_a_new_one, view=view)):
            params = make_params(SHAPES, frozen=())
            opt = ZeroRedundancyOptimizer(params[:5], optim.Adam, None, view, layout=layout)
            assert_alike(expected, script(opt, params, reload), (layout, view, reload))


@on_ranks(2)
def test_a_parameter_may_be_transposed_where_it_lies() -> None:
    """A square matrix, so that nothing but the order of its elements is another one."""

    def script(opt: Any, params: list[nn.Parameter]) -> None:
        train(opt, params, range(2), missing=False)
        params[0].data = params[0].data.t()
        train(opt, params, range(2, 4), missing=False)

    case = Case(optim.SGD, {"lr": 0.1, "momentum": 0.9})
    make = partial(make_params, [(70, 70)], frozen=())
    # Its state lies in memory as it does; the unsharded one stays as it was made.
    each = [("sliced", False), ("sliced", True)]
    follow(script, case, make, combinations=each, unsharded=optim.SGD)
