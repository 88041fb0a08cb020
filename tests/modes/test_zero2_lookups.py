"""Whole gradients and states can be asked for, and what `module=` sets up can be undone."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from graphs import PROMPT
from models import (
    ADAMW,
    MLP,
    MLP_PROBLEM,
    PROBLEMS,
    SGD,
    Problem,
    Setup,
    failing,
    rank,
    train,
    with_ddp,
    with_plain,
    with_zero,
)
from on_ranks import on_ranks
from problems import OneByOne, copies, difference, differing, same_bits
from ranks import each_raises_on_every_rank, run_ranks
from surroundings import consolidated
from torch import Tensor, nn, optim

from shardstep import ZeroRedundancyOptimizer

# ------------------------------------------------------------------------------------ gradients


WAYS = ("once", "held back", "after steps", "cleared in place", "cleared")


def _pass(setup: Setup, problem: Problem, way: str) -> None:
    """Leave gradients, or none."""
    setup.opt.zero_grad()
    if way == "after steps":
        train(setup, problem, range(2))
    with setup.no_sync() if way == "held back" else contextlib.nullcontext():
        setup.backward(0, problem)
    if way == "held back":
        setup.backward(2, problem)
    if way.startswith("cleared"):
        setup.opt.zero_grad(set_to_none=way != "cleared in place")


@on_ranks(2)
def test_a_whole_gradient_is_ddps_to_the_bit_or_none_where_that_is() -> list[str]:
    """Each problem begins with another way."""
    failures = []
    for start, name in enumerate(("mlp", "branching", "conv", "mixed dtypes")):
        problem = PROBLEMS[name]
        ddp = with_ddp(problem.fresh(), SGD, find_unused_parameters=problem.find_unused)
        zeros = {each: with_zero(problem.fresh(), SGD, layout=each) for each in ("sliced", "whole")}
        for way in (*WAYS[start:], *WAYS[:start]):
            _pass(ddp, problem, way)
            for layout, zero in zeros.items():
                _pass(zero, problem, way)
                for (n, theirs), ours in zip(
                    ddp.module.named_parameters(), zero.module.parameters(), strict=True
                ):
                    got = [zero.opt.full_grad(asked) for asked in (n, ours)]
                    found = difference([theirs.grad] * 2, got)
                    failures += [f"{name}, {way}, {layout}: {n} {found}"] if found else []
    return failures


@on_ranks(2)
def test_a_whole_gradient_after_several_passes_and_looks() -> list[str]:
    """Added up over passes that were all sent; within rounding, since DDP adds before its mean."""
    ddp, zero = (make(MLP_PROBLEM.fresh(), SGD) for make in (with_ddp, with_zero))
    for step in range(3):
        for setup in (ddp, zero):
            setup.backward(step)
    failures = []
    for name, param in ddp.module.named_parameters():
        got = zero.opt.full_grad(name)
        if not torch.allclose(param.grad, got, rtol=1e-5, atol=1e-7):
            failures.append(name)
    before = copies(zero.opt.full_grad(name) for name, _ in zero.module.named_parameters())
    zero.clip(1e9)
    again = copies(zero.opt.full_grad(name) for name, _ in zero.module.named_parameters())
    # To look changes nothing, and what is returned is the caller's own.
    zero.opt.full_grad("layers.0.weight").zero_()
    third = copies(zero.opt.full_grad(name) for name, _ in zero.module.named_parameters())
    return failures + failing([("looked", differing(before, again) + differing(before, third))])


# ---------------------------------------------------------------------------------------- states


@on_ranks(2)
def test_a_whole_state_is_the_unsharded_one_to_the_bit() -> None:
    for name in ("mlp", "branching", "mixed dtypes"):
        problem = PROBLEMS[name]
        for kind in (SGD, ADAMW):
            ddp = with_ddp(problem.fresh(), kind, find_unused_parameters=problem.find_unused)
            train(ddp, problem, range(3))
            for layout in ("sliced", "whole"):
                zero = with_zero(problem.fresh(), kind, layout=layout)
                train(zero, problem, range(3))
                for (n, theirs), ours in zip(
                    ddp.module.named_parameters(), zero.module.parameters(), strict=True
                ):
                    expected = dict(ddp.opt.state.get(theirs, {}))
                    for asked in (n, ours):
                        found = difference(expected, zero.opt.full_state(asked))
                        assert not found, f"{name}, {kind[0].__name__}, {layout}, {n}: {found}"


def _unknown(asked: str) -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    zero.backward(0)
    if asked == "name":
        zero.opt.full_grad("layers.9.weight")
    elif asked == "tensor":
        zero.opt.full_grad(torch.ones(3))
    else:
        zero.opt.full_state("layers.9.weight")


def test_an_unknown_parameter_raises_on_every_rank() -> None:
    asked = {
        "name": r"layers\.9\.weight.*not a parameter",
        "tensor": "the given tensor is not a parameter",
        "state": r"layers\.9\.weight",
    }
    each_raises_on_every_rank(2, [(_unknown, ValueError, asked[each], each) for each in asked])


# ----------------------------------------------------------------------------------------- undoing


@on_ranks(2)
def test_detaching_leaves_a_plain_model_that_trains_on() -> list[str]:
    """Afterwards the model is as it was before it met the optimizer, but trained."""
    failures = []
    for overlap in (True, False):
        for when in ("after a step", "after backward", "at once"):
            ddp = with_ddp(MLP_PROBLEM.fresh(), SGD)
            zero = with_zero(MLP_PROBLEM.fresh(), SGD, overlap=overlap)
            if when != "at once":
                for setup in (ddp, zero):
                    train(setup, MLP_PROBLEM, range(3))
                if when == "after backward":
                    zero.backward(3)
            zero.opt.detach()
            what = f"overlap {overlap}, {when}"
            failures += failing([(f"{what}: values", differing(ddp.params, zero.params))])
            for module in zero.module.modules():
                hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
                if any(hooks):
                    failures.append(f"{what}: hooks {hooks}")
            for param in zero.module.parameters():
                if type(param) is not nn.Parameter or param._post_accumulate_grad_hooks:
                    failures.append(f"{what}: {type(param)}, {param._post_accumulate_grad_hooks}")
                if param.grad is not None or vars(param):
                    failures.append(f"{what}: grad {param.grad}, {vars(param)}")
                if not param.untyped_storage().resizable():
                    failures.append(f"{what}: still in the memory of a bucket")
            # It trains on with anything else; here each rank for itself.
            alone, other = MLP(), with_plain(zero.module, SGD)
            alone.load_state_dict(zero.module.state_dict())
            reference = with_plain(alone, SGD)
            for setup in (reference, other):
                train(setup, MLP_PROBLEM, range(5, 8))
            failures += failing(
                [(f"{what}: trained on", differing(reference.params, other.params))]
            )
    return failures


def _hooks_on_an_output() -> list[int]:
    zero = with_zero(PROMPT.fresh(), SGD)
    train(zero, PROMPT, range(4))
    return [len(param._backward_hooks or ()) for param in zero.module.parameters()]


def test_a_parameter_that_is_the_output_collects_no_hooks() -> None:
    assert run_ranks(_hooks_on_an_output, 2) == [[0]] * 2


@on_ranks(2)
def test_an_optimizer_can_take_over_from_one_that_was_detached() -> list[str]:
    """A second optimizer takes over where the first was detached, and takes its state along."""
    ddp = with_ddp(MLP_PROBLEM.fresh(), ADAMW)
    expected = [*train(ddp, MLP_PROBLEM, range(6)), *ddp.params]
    zero = with_zero(MLP_PROBLEM.fresh(), ADAMW)
    losses = train(zero, MLP_PROBLEM, range(3))
    state = consolidated(zero.opt)
    zero.opt.detach()
    heir = with_zero(zero.module, ADAMW, layout="whole")
    heir.opt.load_state_dict(state)
    losses += train(heir, MLP_PROBLEM, range(3, 6))
    return failing([("successor", differing(expected, [*losses, *heir.params]))])


def _second_optimizer() -> None:
    first = with_zero(MLP_PROBLEM.fresh(), SGD)
    train(first, MLP_PROBLEM, range(2))
    with_zero(first.module.get_submodule("layers"), ADAMW)


def _added_to_a_second() -> None:
    first, second = (with_zero(MLP_PROBLEM.fresh(), SGD) for _ in range(2))
    second.opt.add_param_group({"params": list(first.module.parameters())})


def test_parameters_of_an_optimizer_that_was_not_detached_are_refused_by_another() -> None:
    """Both would take the gradients away, and each would find a part of them."""
    match = r"another optimizer.*detach\(\)"
    second = (_second_optimizer, ValueError, rf"'0\.weight' .*{match}")
    each_raises_on_every_rank(2, [second, (_added_to_a_second, ValueError, match)])


def _refused_and_trained_on() -> tuple[list[int], list[int]]:
    zero, ddp = with_zero(MLP_PROBLEM.fresh(), SGD), with_ddp(MLP_PROBLEM.fresh(), SGD)
    with pytest.raises(ValueError, match="another optimizer"):
        with_zero(zero.module, ADAMW)
    for setup in (zero, ddp):
        train(setup, MLP_PROBLEM, range(3))
    shared = _SharedFrozen(zero.module), _SharedFrozen(zero.module)
    zero.module.requires_grad_(False)
    zero.opt.zero_grad()
    for module in shared:
        train(with_zero(module, SGD), MLP_PROBLEM, range(2))
    return differing(ddp.params, zero.params), [len(zero.module._forward_hooks)]


class _SharedFrozen(nn.Module):
    """A head of its own on a body that others have too."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def test_what_was_refused_leaves_no_trace_and_frozen_parameters_may_be_shared() -> None:
    assert run_ranks(_refused_and_trained_on, 2) == [([], [1])] * 2


# --------------------------------------------------------------------------------------- mistakes


def _other_parameters() -> None:
    ZeroRedundancyOptimizer(MLP().parameters(), optim.SGD, module=MLP(), lr=0.1)


def _too_few() -> None:
    model = MLP()
    ZeroRedundancyOptimizer(list(model.parameters())[1:], optim.SGD, module=model, lr=0.1)


def _too_few_on_one_rank() -> None:
    model = MLP()
    params = list(model.parameters())[rank() :]
    ZeroRedundancyOptimizer(params, optim.SGD, module=model, lr=0.1)


def _other_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_buffer("seen", torch.zeros(1 + rank()))
    ZeroRedundancyOptimizer(model.parameters(), optim.SGD, module=model, lr=0.1)


def test_a_module_that_does_not_fit_is_an_error_on_every_rank() -> None:
    cases = [
        (_other_parameters, ValueError, "not a parameter of the given"),
        (_too_few, ValueError, r"'layers\.0\.weight'.*not given"),
        (_too_few_on_one_rank, (ValueError, RuntimeError), r"layers\.0\.weight"),
        (_other_buffers, ValueError, "buffer 'seen'"),
    ]
    each_raises_on_every_rank(2, cases)


# --------------------------------------------------------------------------------------- the start


def _start() -> list[list[torch.Tensor]]:
    """Parameters and buffers of this rank before and after construction."""
    torch.manual_seed(5 + torch.distributed.get_rank())
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].running_mean.normal_()
    model[2].weight.requires_grad_(False)  # frozen, but of the model all the same
    before = [t.detach().clone() for t in model.state_dict().values()]
    ZeroRedundancyOptimizer(
        [p for p in model.parameters() if p.requires_grad], optim.SGD, module=model, lr=0.1
    )
    return [before, [t.detach().clone() for t in model.state_dict().values()]]


def test_all_ranks_start_with_rank_0s_parameters_and_buffers() -> None:
    (before, after), (before_there, after_there) = run_ranks(_start, 2)
    assert differing(before, after) == []
    assert differing(before, after_there) == []
    assert not same_bits(before[0], before_there[0])


class Anchored(OneByOne):
    """Pulls parameters back to where they were when it was made."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["anchor"] = param.detach().clone()

    def update(self, p: Any, state: Any, lr: float) -> None:
        p.sub_(p.grad, alpha=lr).lerp_(state["anchor"], 0.5)


def _anchors(dtype: torch.dtype) -> list[torch.Tensor]:
    """What the class has noted down of rank 0's parameters, and where a step leads from there."""
    torch.manual_seed(5 + torch.distributed.get_rank())
    model = nn.Linear(30, 40).to(dtype)
    opt = ZeroRedundancyOptimizer(model.parameters(), Anchored, module=model)
    start = [param.detach().float() for param in model.parameters()]
    noted = [opt.full_state(name)["anchor"] for name in ("weight", "bias")]
    assert differing(start, noted) == []
    model(torch.ones(2, 30, dtype=dtype)).sum().backward()
    opt.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_that_looks_at_parameters_when_it_is_made_sees_rank_0s(dtype: torch.dtype) -> None:
    (expected,) = run_ranks(_anchors, 1, dtype)
    for got in run_ranks(_anchors, 2, dtype):
        assert differing(expected, got) == []
