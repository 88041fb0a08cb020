"""When `module=` sends gradients, and what becomes of them when something goes wrong."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import BUFFERED
from models import (
    ADAMW,
    MLP,
    MLP_PROBLEM,
    SGD,
    ConvNet,
    Problem,
    Setup,
    furthest,
    noise,
    rank,
    train,
    with_ddp,
    with_zero,
    world_size,
)
from problems import differing
from ranks import raises_on_every_rank, run_ranks
from torch import Tensor, nn
from traffic import Traffic, counted


def _run_on_the_mean(loss: Callable[..., Tensor]) -> list[str]:
    """Against one process that computes all ranks' losses and takes their mean itself."""
    failures = []
    for overlap in (True, False):
        zero = with_zero(MLP_PROBLEM.fresh(), SGD, overlap=overlap)
        oracle = MLP()
        oracle.load_state_dict(zero.module.state_dict())
        opt = SGD[0](oracle.parameters(), **SGD[1])
        ranks = range(world_size())
        twice = loss is _walked_twice
        for step in range(4):
            mean = sum(loss(oracle, step, each) for each in ranks) / len(ranks)
            for value in (mean, loss(zero.module, step, None)):
                for walk in range(1 + twice):
                    value.backward(retain_graph=twice and walk == 0)
            opt.step()
            opt.zero_grad()
            zero.finish()
        if (far := furthest(list(oracle.parameters()), zero.params)) > 1e-5:
            failures.append(f"overlap {overlap}: {far}")
    return failures


def _siamese(model: nn.Module, step: int, of: int | None) -> Tensor:
    out: Tensor = (model(noise(step, 6, 16, of=of)) * model(noise(step + 50, 6, 16, of=of))).mean()
    return out


def _walked_twice(model: nn.Module, step: int, of: int | None) -> Tensor:
    out: Tensor = model(noise(step, 6, 16, of=of)).square().mean()
    return out


def _penalised(model: nn.Module, step: int, of: int | None) -> Tensor:
    x = noise(step, 6, 16, of=of).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss: Tensor = out.square().mean() + (slope.norm(dim=1) - 1).square().mean()
    return loss


@pytest.mark.parametrize("loss", [_siamese, _walked_twice, _penalised])
def test_the_gradient_is_the_mean_over_ranks_however_often_the_graph_is_walked(loss: Any) -> None:
    """Two forward passes before a backward pass, two backward passes through one graph, and a
    penalty on the gradient with respect to the input."""
    assert run_ranks(_run_on_the_mean, 2, loss) == [[], []]


# --------------------------------------------------------------------------------- what is sent


def _counted(problem: Problem = MLP_PROBLEM) -> tuple[Setup, Traffic]:
    with counted() as traffic:
        return with_zero(problem.fresh(), SGD), traffic


def _held_back_is_not_sent() -> dict[str, Any]:
    found: dict[str, Any] = {}
    zero, traffic = _counted()
    num_buckets = len(zero.opt.plan.training_buckets)
    assert num_buckets >= 3

    traffic.reset()
    with zero.no_sync():
        for step in range(3):
            zero.backward(step)
    found["nothing sent under no_sync"] = not traffic.calls
    zero.backward(3)
    zero.opt.step()
    found["one round"] = traffic.calls["reduce_scatter"] == num_buckets

    # One batch of four times the size has the same gradient, but for the order of its sums.
    whole = with_zero(MLP_PROBLEM.fresh(), SGD)
    batch = torch.cat([noise(step, 6, 16) for step in range(4)])
    (4 * whole.model(batch).square().mean()).backward()
    whole.opt.step()
    found["equals one large batch"] = furthest(whole.params, zero.params) < 1e-5

    # The step sends what no backward pass has sent, and to the same numbers.
    late, traffic = _counted()
    with late.no_sync():
        for step in range(4):
            late.backward(step)
    assert traffic.calls["reduce_scatter"] == 0
    late.opt.step()
    found["the step sends"] = traffic.calls["reduce_scatter"] == num_buckets
    found["same numbers"] = not differing(zero.params, late.params)

    # A closure's gradients are sent with those before it.
    closed, traffic = _counted()
    with closed.no_sync():
        for step in range(3):
            closed.backward(step)
    closed.opt.step(lambda: closed.backward(3))
    found["one round with a closure"] = traffic.calls["reduce_scatter"] == num_buckets
    found["same numbers with a closure"] = not differing(zero.params, closed.params)
    return found


def test_what_is_held_back_is_sent_once_by_the_next_backward_or_the_step() -> None:
    for found in run_ranks(_held_back_is_not_sent, 2):
        assert all(found.values()), found


def _freeze_and_hold_back() -> dict[str, Any]:
    """The first forward pass after a parameter was frozen, or unfrozen, is held back."""
    found: dict[str, Any] = {}
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
            found[f"nothing sent from step {step} on"] = not traffic.calls["reduce_scatter"]
            setup.backward(step + 2)
            setup.finish()
    found["same numbers"] = not differing(noticed.params, late.params)
    return found


def test_a_parameter_that_is_frozen_first_changes_nothing_about_what_is_held_back() -> None:
    for found in run_ranks(_freeze_and_hold_back, 2):
        assert all(found.values()), found


def _detach_while_held_back() -> list[bool]:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    with zero.no_sync():
        zero.backward(0)
        zero.opt.detach()
    return [param.grad is None for param in zero.module.parameters()]


def test_detaching_while_gradients_are_held_back_leaves_no_stand_ins() -> None:
    for cleared in run_ranks(_detach_while_held_back, 2):
        assert all(cleared)


def _unfreeze_with_gradients_on_one_rank() -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    zero.module.get_submodule("layers.2").requires_grad_(False)
    zero.opt.zero_grad()
    with zero.no_sync():
        if rank() == 0:
            zero.backward(0)
        zero.module.get_submodule("layers.2").requires_grad_(True)
        zero.backward(1)


def test_ranks_that_hold_nothing_back_do_not_wait_for_one_that_would_lose_it() -> None:
    raises_on_every_rank(
        _unfreeze_with_gradients_on_one_rank, 2, RuntimeError, match="lose the gradients"
    )


def _buffers_under_no_sync() -> bool:
    zero, traffic = _counted(BUFFERED)
    quiet = True
    for step in range(0, 9, 3):
        traffic.reset()
        with zero.no_sync():
            zero.backward(step, BUFFERED)
            zero.backward(step + 1, BUFFERED)
        quiet &= not traffic.calls
        zero.backward(step + 2, BUFFERED)
        zero.finish()
    return quiet


def test_under_no_sync_buffers_are_not_sent_either() -> None:
    assert run_ranks(_buffers_under_no_sync, 2) == [True, True]


# ------------------------------------------------------------------- when something goes wrong


class _Fuse(torch.autograd.Function):
    """Passes through, and fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("fused")


class _Fusible(nn.Module):
    """Fails behind layer `at`: in backward, or in forward if that is `"forward"`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        self.at: int | str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.at == "forward":
            raise ArithmeticError("fused")
        for number, layer in enumerate(self.body.layers):
            x = torch.tanh(layer(x))
            if number == self.at:
                x = _Fuse.apply(x)
        return x


FUSIBLE = Problem(_Fusible, lambda model, step: model(noise(step, 6, 16)).square().mean())


def _fail(setup: Setup, at: int | str | None) -> None:
    assert isinstance(setup.module, _Fusible)
    setup.module.at = at
    with contextlib.suppress(ArithmeticError):
        setup.backward(77, FUSIBLE)
        assert at is None
    setup.module.at = None


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


def _give_up(overlap: bool) -> list[str]:
    ddp = with_ddp(FUSIBLE.fresh(), SGD)
    expected = [*train(ddp, FUSIBLE, range(3)), *ddp.params]
    failures = []
    for places in PLACES:
        for set_to_none in (True, False):
            for already in (0, 1):  # passes that were good before the one that fails
                zero = with_zero(FUSIBLE.fresh(), SGD, overlap=overlap)
                losses = []
                for step in range(3):
                    if step == 1:
                        for _ in range(already):
                            zero.backward(55, FUSIBLE)
                        _fail(zero, places[rank()])
                        zero.opt.zero_grad(set_to_none)
                    losses.append(zero.backward(step, FUSIBLE))
                    zero.finish()
                if differing(expected, [*losses, *zero.params]):
                    failures.append(f"{places}, set_to_none={set_to_none}, {already} before")
    return failures


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_after_a_failure_anywhere_and_zero_grad_training_goes_on_with_the_right_numbers(
    overlap: bool,
) -> None:
    assert run_ranks(_give_up, 2, overlap) == [[], []]


def _go_on_regardless(at: int) -> None:
    zero = with_zero(FUSIBLE.fresh(), SGD)
    _fail(zero, at)
    zero.module.zero_grad()
    zero.backward(0, FUSIBLE)


@pytest.mark.parametrize("at", [4, 1])
def test_going_on_after_a_failed_backward_without_zero_grad_raises(at: int) -> None:
    raises_on_every_rank(_go_on_regardless, 2, RuntimeError, at, match=r"call zero_grad\(\)")


def _held_back_failure() -> list[int]:
    """Under no_sync nobody waits for anybody, so ranks may fail apart."""
    ddp, zero = (make(FUSIBLE.fresh(), SGD) for make in (with_ddp, with_zero))
    expected = [*train(ddp, FUSIBLE, range(2)), *ddp.params]
    losses = train(zero, FUSIBLE, range(1))
    with zero.no_sync():
        _fail(zero, ("forward", 4)[rank()])
        zero.opt.zero_grad()
        _fail(zero, (2, None)[rank()])
    zero.opt.zero_grad()
    losses += train(zero, FUSIBLE, range(1, 2))
    return differing(expected, [*losses, *zero.params])


def test_failures_under_no_sync_concern_one_rank_alone() -> None:
    assert run_ranks(_held_back_failure, 2) == [[], []]


def _nothing_here() -> list[str]:
    """A rank whose loss has nothing to do with the model counts with zeros."""
    failures = []
    for absent in (0, 1):
        for kind in (SGD, ADAMW):
            zero = with_zero(MLP_PROBLEM.fresh(), kind)
            oracle = MLP()
            oracle.load_state_dict(zero.module.state_dict())
            opt = kind[0](oracle.parameters(), **kind[1])
            for step in range(3):
                if rank() == absent:
                    torch.ones(2, requires_grad=True).sum().backward()
                else:
                    zero.backward(step)
                (oracle(noise(step, 6, 16, of=1 - absent)).square().mean() / 2).backward()
                # It does not know whether others have gradients, and waits with this as they do.
                next(zero.module.parameters()).requires_grad_(step != 1)
                zero.clip(1e9)
                next(zero.module.parameters()).requires_grad_(True)
                zero.finish()
                opt.step()
                opt.zero_grad()
            if furthest(list(oracle.parameters()), zero.params) > 1e-5:
                failures.append(f"rank {absent} without gradients, {kind[0].__name__}")
    return failures


def test_a_rank_without_any_gradient_takes_part_with_zeros() -> None:
    assert run_ranks(_nothing_here, 2) == [[], []]


def _freeze(module: nn.Module) -> None:
    module.get_submodule("one").requires_grad_(False)


def _turn(module: nn.Module) -> None:
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _cast(module: nn.Module) -> None:
    module.double()


def _changed_while_there_are_no_gradients() -> list[str]:
    def go_on(setup: Setup) -> None:
        dtype = next(setup.module.parameters()).dtype
        setup.model(noise(1, 4, 3, 6, 6).to(dtype)).square().mean().backward()
        setup.opt.step()

    acts: dict[str, Callable[[Setup], object]] = {
        "step": lambda setup: setup.opt.step(),
        "clip": lambda setup: setup.clip(1.0),
        "look": lambda setup: setup.opt.full_grad("head.weight"),
    }
    failures = []
    for change, (name, act), first in itertools.product(
        (_freeze, _turn, _cast), acts.items(), (True, False)
    ):
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
        found = [param.grad is not None for param in setup.module.parameters()]
        if any(found) or any((a != b).any() for a, b in zip(before, setup.params, strict=True)):
            failures.append(f"{change.__name__}, {name}, {first}")
        go_on(setup)
        setup.opt.detach()
    return failures


def test_what_changes_while_there_are_no_gradients_is_followed_by_whatever_comes_next() -> None:
    """No rank had a gradient, and no stand-in for one is left that somebody takes for one."""
    assert run_ranks(_changed_while_there_are_no_gradients, 2) == [[], []]
