"""What trains may change at any time: groups are added, parameters are frozen and unfrozen."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from problems import (
    ELEMENT_WISE,
    LAYOUTS,
    Case,
    copies,
    difference,
    differing,
    make_params,
    set_gradients,
    train,
)
from ranks import each_raises_on_every_rank, run_ranks
from torch import nn, optim
from traffic import counted

from shardstep import ZeroRedundancyOptimizer
from shardstep.gradients.unsynchronised import STEPS
from shardstep.modes.lockstep import Lockstep
from shardstep.plan import share

SHAPES = [(53, 17), (7,), (131, 67), (), (64,), (0,), (1009,), (40, 33)]
CLASSES = [
    Case(optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    Case(optim.Adam, {"amsgrad": True}),
    Case(optim.AdamW, {"fused": True}),
    Case(optim.Adagrad, {"initial_accumulator_value": 0.1}),
]
COMBINATIONS = list(itertools.product(LAYOUTS, (False, True)))

Script = Callable[[Any, list[nn.Parameter]], None]


def follow(script: Script, cases: list[Case] = CLASSES, given: slice = slice(None)) -> list[str]:
    """Run `script` on the plain class and on ours, and compare parameters and consolidated state.

    Ours in both layouts, one of them with bucket views; the next class has it the other way.
    """
    failures = []
    for number, case in enumerate(cases):
        params = make_params(SHAPES, frozen=())
        plain = case.optimizer_class(params[given], **case.fresh_options())
        script(plain, params)
        expected, state_dict = copies(params), plain.state_dict()
        state_dict["state"] = dict(sorted(state_dict["state"].items()))
        for turn, layout in enumerate(LAYOUTS):
            view = (number + turn) % 2 == 0
            params = make_params(SHAPES, frozen=())
            opt = ZeroRedundancyOptimizer(
                params[given],
                case.optimizer_class,
                layout=layout,
                parameters_as_bucket_view=view,
                **case.fresh_options(),
            )
            script(opt, params)
            name = f"{case}, layout {layout}, view {view}"
            if wrong := differing(expected, copies(params)):
                failures.append(f"{name}: parameters {wrong}")
            opt.consolidate_state_dict()
            if opt.rank == 0 and (found := difference(state_dict, opt.state_dict())):
                failures.append(f"{name}: {found}")
    return failures


# ------------------------------------------------------------------------ adding groups


@on_ranks(1, 2, 3)
def test_groups_may_be_added_at_any_time() -> list[str]:
    def script(opt: Any, params: list[nn.Parameter]) -> None:
        opt.add_param_group({"params": params[2]})  # before any step, a bare tensor
        train(opt, params[:3], range(3))
        opt.add_param_group({"params": params[3:5], "lr": 0.3, "weight_decay": 0.2})
        train(opt, params[:5], range(3, 6))
        opt.add_param_group({"params": (p for p in params[5:])})
        train(opt, params, range(6, 9))

    cases = [case for case in CLASSES if case.optimizer_class is not optim.Adagrad]
    return follow(script, cases, slice(0, 2))


@on_ranks(4)
def test_groups_may_be_added_with_more_ranks_than_parameters() -> list[str]:
    def script(opt: Any, params: list[nn.Parameter]) -> None:
        train(opt, params[:1], range(3))
        opt.add_param_group({"params": [params[1]], "lr": 0.3})
        train(opt, params[:2], range(3, 6))

    return follow(script, CLASSES[:2], slice(1))


@on_ranks(2)
def test_an_added_group_may_be_frozen_first() -> list[str]:
    def script(opt: Any, params: list[nn.Parameter]) -> None:
        train(opt, params[:4], range(2))
        for param in params[4:]:
            param.requires_grad_(False)
        opt.add_param_group({"params": params[4:], "lr": 0.02})
        train(opt, params, range(2, 4))
        for param in params[4:]:
            param.requires_grad_(True)
        train(opt, params, range(4, 8))

    return follow(script, CLASSES[:3], slice(4))


# ------------------------------------------------------------------ freezing, unfreezing


def freeze(params: list[nn.Parameter], *numbers: int) -> None:
    for number in numbers:
        params[number].requires_grad_(False)
        params[number].grad = None


def unfreeze(params: list[nn.Parameter], *numbers: int) -> None:
    for number in numbers:
        params[number].requires_grad_(True)


@on_ranks(1, 2, 3, 4)
def test_parameters_may_be_frozen_and_unfrozen_between_steps() -> list[str]:
    def script(opt: Any, params: list[nn.Parameter]) -> None:
        freeze(params, 2)
        train(opt, params, range(3))
        unfreeze(params, 2)
        freeze(params, 0, 3, 6)
        train(opt, params, range(3, 6))
        freeze(params, 2, 7)
        unfreeze(params, 0)
        train(opt, params, range(6, 9))
        unfreeze(params, 2, 3, 6, 7)
        train(opt, params, range(9, 12))

    return follow(script)


@pytest.mark.slow
@on_ranks(2)
def test_the_state_of_every_class_follows_the_plan() -> list[str]:
    def script(opt: Any, params: list[nn.Parameter]) -> None:
        train(opt, params, range(3), missing=False)
        freeze(params, 0, 2)
        train(opt, params, range(3, 5), missing=False)
        unfreeze(params, 2)
        train(opt, params, range(5, 8), missing=False)

    firsts = {case.optimizer_class: case for case in reversed(ELEMENT_WISE)}
    return follow(script, list(firsts.values()))


@on_ranks(2)
def test_everything_may_be_frozen() -> list[str]:
    def script(opt: Any, params: list[nn.Parameter]) -> None:
        train(opt, params, range(2))
        freeze(params, *range(len(params)))
        train(opt, params, range(2, 4))
        unfreeze(params, 1, 2)
        train(opt, params, range(4, 6))

    return follow(script, CLASSES[:2])


@on_ranks(2, 3)
def test_a_frozen_parameter_with_a_gradient_is_updated_as_torch_does() -> list[str]:
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

    return follow(script)


def _each_combination(check: Callable[[str, bool], list[str]]) -> list[str]:
    return [f"{each}: {found}" for each in COMBINATIONS for found in check(*each)]


def _bytes_sent(layout: str, view: bool) -> list[str]:
    failures = []
    params = make_params(SHAPES, frozen=())
    with counted() as traffic:
        opt = ZeroRedundancyOptimizer(params, optim.SGD, None, view, layout=layout, lr=0.1)

    def expect(step: int, what: str) -> int:
        traffic.reset()
        set_gradients(params, step, missing=False)
        opt.step()
        nbytes = traffic.nbytes["all_gather"] - Lockstep.nbytes * (opt.world_size - 1)
        planned = share(opt.plan, opt.rank).gather_nbytes_sent
        if nbytes != planned:
            failures.append(f"{what}: sent {nbytes} of {planned} bytes")
        everyones = torch.tensor(nbytes)
        dist.all_reduce(everyones)
        trained = sum(p.numel() for p in params if p.requires_grad) * 4
        # Each parameter is padded to 64 elements at most, and each segment of a bucket once more.
        room = (len(params) + opt.world_size) * 64 * 4
        if everyones > (trained + room) * (opt.world_size - 1):
            failures.append(f"{what}: {everyones} bytes for {trained} that train")
        return int(everyones)

    all_of_them = expect(0, "all train")
    freeze(params, 0, 2)
    some = expect(1, "two frozen")
    if not some < all_of_them / 2:
        failures.append(f"freezing most of the elements saved little: {all_of_them} to {some}")
    freeze(params, *range(len(params)))
    if none := expect(2, "all frozen"):
        failures.append(f"nothing trains and {none} bytes are sent")
    unfreeze(params, *range(len(params)))
    if expect(3, "all again") != all_of_them:
        failures.append("unfrozen, they take other bytes than at first")
    return failures


def test_frozen_parameters_are_not_communicated() -> None:
    assert run_ranks(_each_combination, 3, _bytes_sent) == [[], [], []]


def _steady_state_talks_only_of_parameters() -> int:
    """Noticing changes costs no communication while there are none."""
    params = make_params(SHAPES, frozen=(1, 2))
    with counted() as traffic:
        opt = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1)
    train(opt, params, range(STEPS))  # compares some gradients
    traffic.reset()
    train(opt, params, range(5))
    return traffic.calls.total()


def test_a_step_without_changes_is_one_gather_per_bucket_a_note_and_a_verdict() -> None:
    assert run_ranks(_steady_state_talks_only_of_parameters, 2) == [15, 15]


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


def _checkpoints(layout: str, view: bool) -> list[str]:
    """Save and load at every change; the unsharded optimizer does the same."""
    failures = []

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
        return opt

    def in_place(opt: Any) -> Any:
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        return opt

    def through_rank_1(opt: Any) -> Any:
        opt.consolidate_state_dict(to=1)
        box = [opt.state_dict() if opt.rank == 1 else None]
        dist.broadcast_object_list(box, src=1)
        opt.load_state_dict(box[0])
        return opt

    def into_a_new_one(opt: Any) -> Any:
        opt.consolidate_state_dict(to=1)
        box = [opt.state_dict() if opt.rank == 1 else None]
        dist.broadcast_object_list(box, src=1)
        groups = [{"params": group["params"]} for group in opt.param_groups]
        other = LAYOUTS[opt.plan.layout == "sliced"]
        new = ZeroRedundancyOptimizer(groups, optim.Adam, None, view, layout=other)
        new.load_state_dict(box[0])
        return new

    params = make_params(SHAPES, frozen=())
    plain = script(optim.Adam(params[:5]), params, in_place)
    expected, state_dict = copies(params), plain.state_dict()
    state_dict["state"] = dict(sorted(state_dict["state"].items()))
    for reload in (through_rank_1, into_a_new_one):
        params = make_params(SHAPES, frozen=())
        opt = ZeroRedundancyOptimizer(params[:5], optim.Adam, None, view, layout=layout)
        opt = script(opt, params, reload)
        if wrong := differing(expected, copies(params)):
            failures.append(f"{reload.__name__}: parameters {wrong}")
        opt.consolidate_state_dict(to=0)
        if opt.rank == 0 and (found := difference(state_dict, opt.state_dict())):
            failures.append(f"{reload.__name__}: {found}")
    return failures


def test_checkpoints_are_right_after_every_change() -> None:
    assert run_ranks(_each_combination, 2, _checkpoints) == [[], []]


@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_a_parameter_may_be_transposed_where_it_lies(view: bool) -> list[int]:
    """A square matrix, so that nothing but the order of its elements is another one."""
    results = []
    for sharded in (False, True):
        [param] = params = make_params([(70, 70)], frozen=())
        options = {"lr": 0.1, "momentum": 0.9}
        opt: Any = (
            ZeroRedundancyOptimizer(
                params, optim.SGD, parameters_as_bucket_view=view, layout="sliced", **options
            )
            if sharded
            else optim.SGD(params, **options)
        )
        train(opt, params, range(2), missing=False)
        param.data = param.data.t()
        results.append(train(opt, params, range(2, 4), missing=False))
    return differing(*results)
