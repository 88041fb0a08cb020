"""What trains may change at any time: state, traffic and checkpoints follow."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from problems import (
    COMBINATIONS,
    Case,
    copies,
    differing,
    follow,
    in_turn,
    make_params,
    set_gradients,
    train,
)
from ranks import each_raises_on_every_rank
from torch import nn, optim
from traffic import counted

from shardstep import ZeroRedundancyOptimizer
from shardstep.gradients.lockstep import Lockstep
from shardstep.plan import shares

SHAPES = [(53, 17), (7,), (131, 67), (), (64,), (0,), (1009,), (40, 33)]
CLASSES = [
    Case(optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    Case(optim.Adam, {"amsgrad": True}),
    Case(optim.AdamW, {"fused": True}),
    Case(optim.Adagrad, {"initial_accumulator_value": 0.1}),
]


def freeze(params: list[nn.Parameter], *numbers: int) -> None:
    for number in numbers:
        params[number].requires_grad_(False)
        params[number].grad = None


def unfreeze(params: list[nn.Parameter], *numbers: int) -> None:
    for number in numbers:
        params[number].requires_grad_(True)


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

    make = partial(make_params, SHAPES, frozen=())
    for number, case in enumerate(CLASSES):
        follow(script, case, make, combinations=in_turn(number))


@on_ranks(3)
def test_a_step_is_one_gather_per_bucket_without_frozen_parameters() -> None:
    for layout, view in COMBINATIONS:
        params = make_params([*SHAPES, (300, 300), (200, 200)], frozen=())
        with counted() as traffic:
            opt = ZeroRedundancyOptimizer(
                params, optim.SGD, None, view, layout=layout, bucket_bytes=1 << 12, lr=0.1
            )
        assert len(opt.plan.training_buckets) > 1

        def sent(step: int, params: Any = params, opt: Any = opt, traffic: Any = traffic) -> int:
            """Take a step; return the bytes that all ranks send for it."""
            traffic.reset()
            set_gradients(params, step, missing=False)
            opt.step()
            # A gather for each bucket, and one for the ranks' notes.
            assert traffic.calls["all_gather"] == len(opt.plan.training_buckets) + 1
            nbytes = traffic.nbytes["all_gather"] - Lockstep.nbytes * (opt.world_size - 1)
            assert nbytes == shares(opt.plan)[opt.rank].gather_nbytes_sent, step
            everyones = torch.tensor(nbytes)
            dist.all_reduce(everyones)
            trained = sum(p.numel() for p in params if p.requires_grad) * 4
            # Each parameter is padded to 64 elements at most, and each segment once more.
            room = (len(params) + opt.world_size) * 64 * 4
            assert everyones <= (trained + room) * (opt.world_size - 1), step
            return int(everyones)

        all_of_them = sent(0)
        freeze(params, 0, 2, 8)
        assert sent(1) < all_of_them / 2
        freeze(params, *range(len(params)))
        assert sent(2) == 0
        unfreeze(params, *range(len(params)))
        assert sent(3) == all_of_them
        assert sent(4) == all_of_them
        assert traffic.calls.keys() == {"all_gather", "header"}, "steps that change nothing"
        assert traffic.calls["header"] == 1


@on_ranks(2, raises=ValueError, match="param 0|param 2")
def test_ranks_that_freeze_different_parameters_are_told() -> None:
    params = make_params(SHAPES, frozen=())
    opt = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1)
    train(opt, params, range(2))
    # Both change something, so both notice; what they changed is not the same.
    freeze(params, 0 if opt.rank else 2)
    train(opt, params, range(2, 3))


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


def _other_length(rows: int, with_module: bool) -> None:
    """The same memory and strides: a table that has room for more rows."""
    table = torch.ones(12, 4)
    module = nn.Embedding(10, 4)
    module.weight.data = table[:10]
    tie = {"module": module} if with_module else {}
    opt = ZeroRedundancyOptimizer(module.parameters(), optim.SGD, lr=0.1, momentum=0.9, **tie)
    for _ in range(2):
        module(torch.arange(4)).sum().backward()
        opt.step()
        opt.zero_grad()
        module.weight.data = module.weight.data.as_strided((rows, 4), (4, 1))


@pytest.mark.parametrize("rows", [6, 12])
def test_a_table_that_grows_or_shrinks_in_place_is_refused_everywhere(rows: int) -> None:
    match = rf"'.*' was given data of shape \({rows}, 4\) in place of \(10, 4\)"
    modes = (False, True) if rows < 10 else (False,)  # `module=` moves the parameter elsewhere
    cases = [(_other_length, RuntimeError, match, rows, module) for module in modes]
    each_raises_on_every_rank(2, cases)


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
