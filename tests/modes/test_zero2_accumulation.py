"""When `module=` sends gradients, and what becomes of them when something goes wrong."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import BUFFERED
from models import (
    ADAMW,
    MLP_PROBLEM,
    SGD,
    ConvNet,
    Problem,
    Setup,
    noise,
    rank,
    train,
    with_ddp,
    with_plain,
    with_zero,
)
from on_ranks import on_ranks
from problems import assert_same, copies, differing
from scenarios import distance
from torch import Tensor, nn
from traffic import Traffic, counted

from shardstep.params.module import remove_hooks

# --------------------------------------------------------------------------------- what is sent


def _counted(problem: Problem = MLP_PROBLEM) -> tuple[Setup, Traffic]:
    with counted() as traffic:
        return with_zero(problem.fresh(), SGD), traffic


@on_ranks(2)
def test_what_is_held_back_is_sent_once_by_the_next_backward_or_the_step() -> None:
    zero, traffic = _counted()
    num_buckets = len(zero.opt.plan.training_buckets)
    assert num_buckets >= 3

    def hold_back(setup: Setup, steps: int) -> None:
        with setup.no_sync():
            for step in range(steps):
                setup.backward(step)

    traffic.reset()
    hold_back(zero, 3)
    assert not traffic.calls
    zero.backward(3)
    zero.opt.step()
    assert traffic.calls["reduce_scatter"] == num_buckets, "one round"

    # One batch of four times the size has the same gradient, but for the order of its sums.
    whole = with_zero(MLP_PROBLEM.fresh(), SGD)
    batch = torch.cat([noise(step, 6, 16) for step in range(4)])
    (4 * whole.model(batch).square().mean()).backward()
    whole.opt.step()
    assert distance(whole.params, zero.params) < 1e-5

    # The step sends what no backward pass has sent, and to the same numbers.
    late, traffic = _counted()
    hold_back(late, 4)
    assert traffic.calls["reduce_scatter"] == 0
    late.opt.step()
    assert traffic.calls["reduce_scatter"] == num_buckets
    assert_same(zero.params, late.params)

    # A closure's gradients are sent with those before it.
    closed, traffic = _counted()
    hold_back(closed, 3)
    closed.opt.step(lambda: closed.backward(3))
    assert traffic.calls["reduce_scatter"] == num_buckets
    assert_same(zero.params, closed.params)


@on_ranks(2)
def test_a_parameter_that_is_frozen_first_changes_nothing_about_what_is_held_back() -> None:
    """The first forward pass after a parameter was frozen, or unfrozen, is held back."""
    (noticed, first), (late, second) = _counted(), _counted()
    for step, trains in ((0, True), (3, False), (6, True)):
        for setup in (noticed, late):
            setup.module.get_submodule("layers.2").requires_grad_(trains)
        noticed.opt.zero_grad()  # which follows the change
        for setup, traffic in ((noticed, first), (late, second)):
            traffic.reset()
            with setup.no_sync():
                setup.backward(step)
                setup.backward(step + 1)
            assert not traffic.calls["reduce_scatter"], step
            setup.backward(step + 2)
            setup.finish()
    assert_same(noticed.params, late.params)


@on_ranks(2, raises=RuntimeError, match="lose gradients")
def test_ranks_that_hold_nothing_back_do_not_wait_for_one_that_would_lose_it() -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    zero.module.get_submodule("layers.2").requires_grad_(False)
    zero.opt.zero_grad()
    with zero.no_sync():
        if rank() == 0:
            zero.backward(0)
        zero.module.get_submodule("layers.2").requires_grad_(True)
        zero.backward(1)


@on_ranks(2)
def test_under_no_sync_buffers_are_not_sent_either() -> None:
    zero, traffic = _counted(BUFFERED)
    for step in range(0, 9, 3):
        traffic.reset()
        with zero.no_sync():
            zero.backward(step, BUFFERED)
            zero.backward(step + 1, BUFFERED)
        assert not traffic.calls
        zero.backward(step + 2, BUFFERED)
        zero.finish()


# ------------------------------------------------------------------- when something goes wrong


def _fuse(*args: object) -> None:
    raise ArithmeticError("fused")


def _fail(setup: Setup, at: int | str | None) -> None:
    """Fail in forward, or in backward before it comes to layer `at`."""
    layers, hooks = setup.module.get_submodule("layers"), []
    if at == "forward":
        hooks.append(layers[0].register_forward_pre_hook(_fuse))
    elif at is not None:

        def fuse(_: nn.Module, __: Any, out: Tensor) -> None:
            assert out.grad_fn is not None
            out.grad_fn.register_prehook(_fuse)  # behind all hooks of the tensor

        hooks.append(layers[at].register_forward_hook(fuse))
    with contextlib.suppress(ArithmeticError):
        setup.backward(77)
        assert at is None
    remove_hooks(hooks)


# Where each of two ranks fails. Layer 4 is the last: no gradient has come by then. None: the rank
# gets through and has sent everything.
PLACES: list[tuple[int | str | None, int | str | None]] = [
    ("forward", "forward"),
    (4, 4),
    (2, 2),
    (0, 3),
    (3, 0),
    (4, 0),
    (0, 4),
    (None, 1),
    (4, None),
]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_after_a_failure_anywhere_and_zero_grad_training_goes_on_with_the_right_numbers(
    overlap: bool,
) -> None:
    ddp = with_ddp(MLP_PROBLEM.fresh(), SGD)
    expected = [*train(ddp, MLP_PROBLEM, range(3)), *ddp.params]
    # Some passes were good before the one that fails.
    for case in itertools.product(PLACES, (True, False), (0, 1)):
        places, set_to_none, already = case
        zero = with_zero(MLP_PROBLEM.fresh(), SGD, overlap=overlap)
        losses = []
        for step in range(3):
            if step == 1:
                for _ in range(already):
                    zero.backward(55)
                _fail(zero, places[rank()])
                zero.opt.zero_grad(set_to_none)
            losses.append(zero.backward(step))
            zero.finish()
        assert_same(expected, [*losses, *zero.params], case)


@pytest.mark.parametrize("at", [4, 1])
@on_ranks(2, raises=RuntimeError, match=r"call zero_grad\(\)")
def test_going_on_after_a_failed_backward_without_zero_grad_raises(at: int) -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    _fail(zero, at)
    zero.module.zero_grad()
    zero.backward(0)


@on_ranks(2)
def test_failures_under_no_sync_concern_one_rank_alone() -> list[int]:
    """Under no_sync nobody waits for anybody, so ranks may fail apart."""
    ddp, zero = (make(MLP_PROBLEM.fresh(), SGD) for make in (with_ddp, with_zero))
    expected = [*train(ddp, MLP_PROBLEM, range(2)), *ddp.params]
    losses = train(zero, MLP_PROBLEM, range(1))
    with zero.no_sync():
        _fail(zero, ("forward", 4)[rank()])
        zero.opt.zero_grad()
        _fail(zero, (2, None)[rank()])
    zero.opt.zero_grad()
    losses += train(zero, MLP_PROBLEM, range(1, 2))
    return differing(expected, [*losses, *zero.params])


class Bypassed(nn.Module):
    """A model that a batch may leave out: its output then depends on its input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP_PROBLEM.make()

    def forward(self, x: Tensor, bypass: bool) -> Tensor:
        return x.clone() if bypass else self.net(x)


@on_ranks(2)
def test_a_rank_without_any_gradient_takes_part_with_zeros() -> None:
    """A rank whose backward pass reaches no parameter counts with zeros."""
    for absent, kind in itertools.product((0, 1), (SGD, ADAMW)):
        torch.manual_seed(7)
        zero = with_zero(Bypassed(), kind)
        oracle = with_plain(copy.deepcopy(zero.module), kind)
        for step in range(3):
            x = noise(step, 6, 16).requires_grad_()
            zero.model(x, rank() == absent).square().mean().backward()
            x = noise(step, 6, 16, of=1 - absent)
            (oracle.model(x, False).square().mean() / 2).backward()
            # It does not know whether others have gradients, and waits with this as they do.
            next(zero.module.parameters()).requires_grad_(step != 1)
            zero.clip(1e9)
            next(zero.module.parameters()).requires_grad_(True)
            zero.opt.step()
            (zero.module if step else zero.opt).zero_grad()
            oracle.finish()
        assert distance(oracle.params, zero.params) <= 1e-5


@on_ranks(2)
def test_differentiating_through_the_model_counts_as_a_backward_pass() -> None:
    """A rank that does only this takes part with zeros; the guide to faults says so."""
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    oracle = with_plain(copy.deepcopy(zero.module), SGD)
    x = noise(0, 6, 16).requires_grad_()
    loss = zero.model(x).square().mean()
    loss.backward() if rank() == 0 else torch.autograd.grad(loss, x)
    (oracle.model(noise(0, 6, 16, of=0)).square().mean() / 2).backward()
    for setup in (zero, oracle):
        setup.finish()
    assert_same(oracle.params, zero.params)


@on_ranks(2)
def test_a_step_without_any_gradient_may_follow_a_backward_pass_of_one_rank() -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    if rank() == 0:  # where the input matters, as the rank that logs may ask
        x = noise(0, 6, 16).requires_grad_()
        torch.autograd.grad(zero.model(x).sum(), x)
    before = copies(zero.params)
    zero.finish()
    assert_same(before, zero.params)


@on_ranks(2)
def test_a_rank_takes_part_with_zeros_in_parameters_that_were_unfrozen_unnoticed() -> None:
    """The model evaluates, so its forward passes notice nothing."""
    zero = with_zero(Bypassed(), SGD)
    zero.module.eval()
    first, *others = zero.module.parameters()
    first.requires_grad_(False)
    zero.opt.zero_grad()
    before = first.detach().clone()
    for param in (first, *others):
        param.requires_grad_(param is first)
    zero.model(noise(0, 6, 16).requires_grad_(), rank() == 1).square().mean().backward()
    zero.opt.step()
    assert not torch.equal(before, first)


CHANGES: dict[str, Callable[[Any], object]] = {
    "freeze": lambda module: module.one.requires_grad_(False),
    "turn": lambda module: module.to(memory_format=torch.channels_last),
    "cast": lambda module: module.double(),
}
ACTS: dict[str, Callable[[Setup], object]] = {
    "step": lambda setup: setup.opt.step(),
    "clip": lambda setup: setup.clip(1.0),
    "look": lambda setup: setup.opt.full_grad("head.weight"),
}


@on_ranks(2)
def test_what_changes_while_there_are_no_gradients_is_followed_by_whatever_comes_next() -> None:
    """No rank had a gradient, and no stand-in for one is left that somebody takes for one."""

    def go_on(setup: Setup) -> None:
        dtype = next(setup.module.parameters()).dtype
        setup.model(noise(1, 4, 3, 6, 6).to(dtype)).square().mean().backward()
        setup.opt.step()

    for case in itertools.product(CHANGES, ACTS, (True, False)):
        change, act, first = CHANGES[case[0]], ACTS[case[1]], case[2]
        setup = with_zero(ConvNet(), SGD, broadcast_buffers=False)
        go_on(setup)
        setup.opt.zero_grad()
        before = setup.params
        if first:
            change(setup.module)
            act(setup)
        else:
            act(setup)
            change(setup.module)
        assert all(param.grad is None for param in setup.module.parameters()), case
        assert all((a == b).all() for a, b in zip(before, setup.params, strict=True)), case
        go_on(setup)
        setup.opt.detach()


@on_ranks(2)
def test_a_model_that_evaluates_may_change_its_memory_format_between_steps() -> None:
    """Forward does not notice it. DDP is no oracle: it mixes up the elements of gradients then."""
    formats = {2: torch.channels_last, 4: torch.contiguous_format}

    def run(setup: Setup, synchronise: Callable[[Tensor], object]) -> list[Tensor]:
        setup.module.eval()
        for step in range(6):
            if step in formats:
                setup.module.to(memory_format=formats[step])  # type: ignore[call-overload]
            setup.model(noise(step, 4, 3, 6, 6)).square().mean().backward()
            for param in setup.module.parameters():
                synchronise(param)
            setup.opt.step()
            setup.module.zero_grad()
        return setup.params

    def average(param: Tensor) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad.div_(2))

    for kind, layout in itertools.product((SGD, ADAMW), ("sliced", "whole")):
        zero = with_zero(ConvNet(), kind, layout=layout)
        expected = run(with_plain(copy.deepcopy(zero.module), kind), average)
        got = run(zero, lambda param: None)
        assert_same(expected, got, (kind, layout))
