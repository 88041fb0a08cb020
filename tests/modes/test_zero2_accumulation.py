"""Gradients add up, are cleared, are held back and are given up as they are under DDP."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    ADAMW,
    MLP,
    MLP_PROBLEM,
    PROBLEMS,
    SGD,
    ConvNet,
    Problem,
    Setup,
    both,
    failing,
    furthest,
    noise,
    rank,
    train,
    unlike_ddp,
    with_ddp,
    with_plain,
    with_zero,
    world_size,
)
from problems import copies, differing
from ranks import raises_on_every_rank, run_ranks
from torch import Tensor, nn

Loop = Callable[[Setup], Any]
FOREACH = (SGD[0], {**SGD[1], "foreach": True})

# ----------------------------------------------------------------- loops that equal DDP to the bit


def _hold_back(setup: Setup) -> list[Tensor]:
    losses = []
    for step in range(0, 9, 3):
        with setup.no_sync():
            losses += [setup.backward(step), setup.backward(step + 1)]
        losses.append(setup.backward(step + 2))
        setup.finish()
    return losses


def _hold_back_and_clear_through_the_module(setup: Setup) -> None:
    for step in range(0, 9, 3):
        with setup.no_sync():
            setup.backward(step)
        setup.backward(step + 1)
        setup.opt.step()
        setup.module.zero_grad()


def _give_up_what_was_held_back(setup: Setup) -> None:
    for step in range(0, 12, 4):
        with setup.no_sync():
            setup.backward(step)
        setup.opt.zero_grad()
        setup.backward(step + 1)
        with setup.no_sync():
            setup.backward(step + 2)
        setup.module.zero_grad()
        setup.backward(step + 3)
        setup.finish()


def _no_step_after_backward(setup: Setup) -> None:
    for step in range(6):
        setup.backward(step)
        if step % 2:
            setup.opt.step()
        setup.opt.zero_grad()


def _zero_in_place(setup: Setup) -> None:
    for step in range(5):
        setup.backward(step)
        setup.opt.step()
        setup.opt.zero_grad(set_to_none=False)
    # No gradients have come since: momentum and weight decay go on.
    setup.opt.step()


def _hold_back_and_zero_in_place(setup: Setup) -> None:
    """Some gradients have been sent and some not when all are cleared."""
    for step in range(0, 9, 3):
        setup.backward(step)
        setup.module.get_submodule("layers.1").zero_grad()
        with setup.no_sync():
            setup.backward(step + 1)
        setup.opt.zero_grad(set_to_none=False)
        setup.backward(step + 2)
        setup.finish()


def _zero_what_was_held_back_and_step(setup: Setup) -> None:
    """A gradient of zero, in which nothing was ever sent, is one: weight decay goes on."""
    for step in range(0, 6, 2):
        with setup.no_sync():
            setup.backward(step)
        clear = setup.module if step else setup.opt
        clear.zero_grad(set_to_none=False)
        setup.finish()
        setup.backward(step + 1)
        setup.finish()


def _zero_in_place_through_the_module(setup: Setup) -> None:
    for step in range(5):
        setup.backward(step)
        setup.opt.step()
        setup.module.zero_grad(set_to_none=False)


def _zero_through_the_module(setup: Setup) -> None:
    for step in range(5):
        setup.module.zero_grad()
        setup.backward(step)
        setup.opt.step()


def _step_twice_on_the_same_gradients(setup: Setup) -> None:
    for step in range(4):
        setup.backward(step)
        setup.opt.step()
        setup.finish()


def _step_without_gradients(setup: Setup) -> None:
    for step in range(4):
        setup.finish()
        setup.backward(step)
        setup.finish()


def _forward_without_backward(setup: Setup) -> list[Tensor]:
    seen = []
    for step in range(5):
        with torch.no_grad():
            seen.append(MLP_PROBLEM.loss(setup.module, 30 + step))
        setup.module.eval()
        seen.append(MLP_PROBLEM.loss(setup.module, 31 + step))
        setup.module.train()
        setup.backward(step)
        setup.finish()
        with torch.no_grad():
            seen.append(MLP_PROBLEM.loss(setup.module, 30 + step))
    return seen


def _retained_graph(setup: Setup) -> None:
    """The second pass adds to what the first has left: the mean of it is not taken twice."""
    for step in range(4):
        loss = MLP_PROBLEM.loss(setup.model, step)
        with setup.no_sync():
            loss.backward(retain_graph=True)
        setup.opt.zero_grad()
        setup.backward(step)
        setup.finish()


def _closure(setup: Setup) -> list[Tensor]:
    losses = []
    for step in range(4):

        def evaluate(step: int = step) -> Tensor:
            setup.opt.zero_grad()
            loss = MLP_PROBLEM.loss(setup.model, step)
            loss.backward()
            return loss

        losses.append(setup.opt.step(evaluate).detach())
    return losses


def _clear_some_by_hand(setup: Setup) -> None:
    """What is cleared between backward and step, with clipping or without, is left alone."""
    layers = setup.module.get_submodule("layers")
    for step in range(6):
        setup.backward(step)
        if step % 3 == 1:
            setup.clip(1e9)
        if step % 2:
            for param in (*layers[1].parameters(), *layers[4].parameters()):
                param.grad = None
        setup.finish()


def _replace_by_hand(setup: Setup) -> None:
    """What the user puts into `grad` counts, the same on all ranks here."""
    weight = setup.module.get_parameter("layers.1.weight")
    for step in range(4):
        setup.backward(step)
        if step == 2:
            setup.clip(1e9)
        weight.grad = noise(step, *weight.shape, of=0)
        setup.finish()


def _step_on_what_was_held_back_alone(setup: Setup) -> None:
    """Under DDP these are each rank's own: all ranks have the same batches here."""
    for step in range(6):
        with setup.no_sync():
            setup.model(noise(step, 6, 16, of=0)).square().mean().backward()
        if step == 2:
            setup.clip(1e9)
            with setup.no_sync():
                setup.model(noise(9, 6, 16, of=0)).square().mean().backward()
        setup.opt.step()
        if step < 4:
            setup.opt.zero_grad(set_to_none=False)


def _look_and_step_while_holding_back(setup: Setup) -> None:
    """As above, all ranks have the same batches."""

    def backward(step: int) -> None:
        setup.model(noise(step, 6, 16, of=0)).square().mean().backward()

    for step in range(0, 9, 3):
        with setup.no_sync():
            backward(step)
            setup.clip(1e9)
            backward(step + 1)
            setup.opt.step()
            backward(step + 2)
        setup.finish()


def _partial_backward(setup: Setup) -> None:
    """Only some parameters are asked for."""
    last = setup.module.get_submodule("layers.4")
    for step in range(4):
        with setup.no_sync():
            loss = MLP_PROBLEM.loss(setup.model, step)
            loss.backward(inputs=list(last.parameters()))
        setup.opt.zero_grad()
        setup.backward(step)
        setup.finish()


TO_THE_BIT: list[Loop] = [
    _hold_back,
    _hold_back_and_clear_through_the_module,
    _give_up_what_was_held_back,
    _no_step_after_backward,
    _zero_in_place,
    _hold_back_and_zero_in_place,
    _zero_what_was_held_back_and_step,
    _zero_in_place_through_the_module,
    _zero_through_the_module,
    _step_twice_on_the_same_gradients,
    _step_without_gradients,
    _forward_without_backward,
    _retained_graph,
    _closure,
    _clear_some_by_hand,
    _replace_by_hand,
    _partial_backward,
    _step_on_what_was_held_back_alone,
    _look_and_step_while_holding_back,
]


def _zero_what_was_held_back_for_the_first_time(setup: Setup) -> None:
    """Branch 0 had no gradient in the pass that was sent, and one of zeros then."""
    for step in range(0, 6, 2):
        setup.model(noise(step, 6, 16), [1]).square().mean().backward()
        with setup.no_sync():
            setup.model(noise(step + 1, 6, 16), [0]).square().mean().backward()
        setup.opt.zero_grad(set_to_none=False)
        setup.finish()
        setup.model(noise(step, 6, 16), [0]).square().mean().backward()
        setup.finish()


def _run_to_the_bit(overlap: bool) -> list[str]:
    return (
        failing(
            (f"{loop.__name__}, {kind[0].__name__}", unlike_ddp(loop, kind=kind, overlap=overlap))
            for loop in TO_THE_BIT
            for kind in (SGD, ADAMW)
        )
        + failing(
            (f"{loop.__name__}, foreach", unlike_ddp(loop, kind=FOREACH, overlap=overlap))
            for loop in (
                _zero_in_place,
                _hold_back_and_zero_in_place,
                _zero_what_was_held_back_and_step,
            )
        )
        + failing(
            (loop.__name__, unlike_ddp(loop, PROBLEMS["branching"], SGD, overlap=overlap))
            for loop in (_zero_what_was_held_back_for_the_first_time,)
        )
    )


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_holding_back_clearing_and_giving_up_gradients_equals_ddp_to_the_bit(overlap: bool) -> None:
    assert run_ranks(_run_to_the_bit, 2, overlap) == [[], []]


# ---------------------------------------------------------- loops that equal DDP but for rounding
# DDP adds the next gradient to the mean of the last before it takes the mean of both; here the mean
# of each is taken before they are added.


def _several_backward_passes(setup: Setup) -> None:
    for step in range(0, 9, 3):
        for each in range(3):
            setup.backward(step + each)
        setup.finish()


def _never_cleared(setup: Setup) -> None:
    for step in range(5):
        setup.backward(step)
        setup.clip(0.5)
        setup.opt.step()


def _held_back_after_a_sent_one(setup: Setup) -> None:
    for step in range(0, 9, 3):
        setup.backward(step)
        with setup.no_sync():
            setup.backward(step + 1)
        setup.backward(step + 2)
        setup.finish()


def _added_up_after_giving_up(setup: Setup) -> None:
    """What was held back and given up must not come back with a later pass."""
    for step in range(0, 12, 4):
        setup.backward(step)
        with setup.no_sync():
            setup.backward(step + 1)
        setup.module.zero_grad()
        setup.backward(step + 2)
        setup.backward(step + 3)
        setup.finish()


def _partly_cleared(setup: Setup) -> None:
    """A branch is cleared by hand and not taken again: it has no gradient, whoever took it before.

    With weight decay and momentum, a gradient of zeros would be seen.
    """
    branches = setup.module.get_submodule("branches")
    for step in range(0, 8, 2):
        setup.model(noise(step, 6, 16), [0, 1, 2]).square().mean().backward()
        setup.opt.step()
        branches[1].zero_grad()
        branches[2].zero_grad()
        taken = [0, 2] if rank() == 1 else [0]
        setup.model(noise(step + 1, 6, 16), taken).square().mean().backward()
        setup.finish()


def _run_close() -> list[str]:
    def far(loop: Loop, **options: Any) -> float:
        found = furthest(*both(loop, kind=SGD, **options))
        return found if found > 1e-5 else 0.0

    loops: list[Loop] = [
        _several_backward_passes,
        _never_cleared,
        _held_back_after_a_sent_one,
        _added_up_after_giving_up,
    ]
    partly = PROBLEMS["branching"]
    return failing(
        [(loop.__name__, far(loop)) for loop in loops]
        + [("partly cleared", far(_partly_cleared, problem=partly))]
    )


def test_gradients_that_are_not_cleared_add_up() -> None:
    assert run_ranks(_run_close, 2) == [[], []]


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


def _sent(setup: Setup) -> int:
    return int(setup.opt.shards.comm.ledger.calls["reduce_scatter"])


def _held_back_is_not_sent() -> dict[str, Any]:
    found: dict[str, Any] = {}
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    num_buckets = len(zero.opt.plan.training_buckets)
    assert num_buckets >= 3

    before = dict(zero.opt.shards.comm.ledger.calls)
    with zero.no_sync():
        for step in range(3):
            zero.backward(step)
    found["sent under no_sync"] = dict(zero.opt.shards.comm.ledger.calls) == before
    before_sync = _sent(zero)
    zero.backward(3)
    zero.opt.step()
    found["one round"] = _sent(zero) - before_sync == num_buckets

    # One batch of four times the size has the same gradient, but for the order of its sums.
    whole = with_zero(MLP_PROBLEM.fresh(), SGD)
    batch = torch.cat([noise(step, 6, 16) for step in range(4)])
    (4 * whole.model(batch).square().mean()).backward()
    whole.opt.step()
    found["equals one large batch"] = furthest(whole.params, zero.params) < 1e-5

    # The step sends what no backward pass has sent, and to the same numbers.
    late = with_zero(MLP_PROBLEM.fresh(), SGD)
    with late.no_sync():
        for step in range(4):
            late.backward(step)
    assert _sent(late) == 0
    late.opt.step()
    found["the step sends"] = _sent(late) == num_buckets
    found["same numbers"] = not differing(zero.params, late.params)
    return found


def test_what_is_held_back_is_sent_once_by_the_next_backward_or_the_step() -> None:
    for found in run_ranks(_held_back_is_not_sent, 2):
        assert all(found.values()), found


def _freeze_and_hold_back() -> dict[str, Any]:
    """The first forward pass after a parameter was frozen, or unfrozen, is held back."""
    found: dict[str, Any] = {}
    noticed, late = (with_zero(MLP_PROBLEM.fresh(), SGD) for _ in range(2))
    for step, trains in ((0, True), (3, False), (6, True)):
        for setup in (noticed, late):
            setup.module.get_submodule("layers.2").requires_grad_(trains)
        noticed.opt.zero_grad()  # which follows the change
        for setup in (noticed, late):
            before = _sent(setup)
            with setup.no_sync():
                setup.backward(step)
                setup.backward(step + 1)
            found[f"nothing sent from step {step} on"] = _sent(setup) == before
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


class _Counted(nn.Module):
    """Has a buffer that every forward pass on every rank changes in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.body(x))
        return out


def _buffers_under_no_sync() -> dict[str, Any]:
    problem = Problem(_Counted, lambda model, step: model(noise(step, 6, 16)).square().mean())
    ddp, zero = with_ddp(problem.fresh(), SGD), with_zero(problem.fresh(), SGD)
    quiet = True
    for step in range(0, 9, 3):
        for setup in (ddp, zero):
            with setup.no_sync():
                before = dict(zero.opt.shards.comm.ledger.calls)
                setup.backward(step, problem)
                setup.backward(step + 1, problem)
                quiet &= dict(zero.opt.shards.comm.ledger.calls) == before
            setup.backward(step + 2, problem)
            setup.finish()
    for setup in (ddp, zero):
        problem.loss(setup.model, 99)
    buffers = differing(list(ddp.module.buffers()), list(zero.module.buffers()))
    return {
        "quiet": quiet,
        "same parameters": not differing(ddp.params, zero.params),
        "same buffers": not buffers,
    }


def test_under_no_sync_buffers_are_not_sent_either() -> None:
    for found in run_ranks(_buffers_under_no_sync, 2):
        assert all(found.values()), found


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


def test_one_rank_adds_up_and_clears_as_the_plain_optimizer_does() -> None:
    loops = [
        _no_step_after_backward,
        _zero_in_place,
        _zero_in_place_through_the_module,
        _zero_through_the_module,
        _step_twice_on_the_same_gradients,
        _closure,
        _clear_some_by_hand,
        _replace_by_hand,
        _several_backward_passes,
        _never_cleared,
    ]
    for loop in loops:
        for kind in (SGD, ADAMW, FOREACH):
            plain, zero = (make(MLP_PROBLEM.fresh(), kind) for make in (with_plain, with_zero))
            seen = [[*copies(loop(setup) or []), *setup.params] for setup in (plain, zero)]
            assert differing(*seen) == [], f"{loop.__name__}, {kind}"


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


def _hold_back_after_freezing(setup: Setup) -> list[Tensor]:
    """Whether before `no_sync` or within it, what is frozen is noticed in the next forward."""
    branching, part = PROBLEMS["branching"], setup.module.get_submodule("stem")
    losses = train(setup, branching, range(1))
    for step in range(4, 16, 4):
        if step != 8:
            part.requires_grad_(step == 12)
        with setup.no_sync():
            if step == 8:
                part = setup.module.get_submodule("branches.0").requires_grad_(False)
            losses += [setup.backward(step, branching), setup.backward(step + 1, branching)]
        losses.append(setup.backward(step + 2, branching))
        setup.finish()
    return losses


def _unlike_ddp_after_freezing() -> list[int]:
    return unlike_ddp(_hold_back_after_freezing, PROBLEMS["branching"], SGD)


def test_gradients_are_held_back_after_freezing_as_well() -> None:
    assert run_ranks(_unlike_ddp_after_freezing, 2) == [[], []]
