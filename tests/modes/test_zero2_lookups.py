"""Whole gradients and states can be asked for, what is set up can be undone, and state moves freely
between ZeRO-1, ZeRO-2 and the plain optimizer."""

from __future__ import annotations

import copy
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
    Branching,
    Problem,
    Setup,
    failing,
    noise,
    rank,
    train,
    with_ddp,
    with_plain,
    with_zero,
)
from problems import copies, difference, differing
from ranks import raises_on_every_rank, run_ranks
from torch import Tensor, nn, optim

from shardstep import ZeroRedundancyOptimizer

# ------------------------------------------------------------------------------------ gradients


def _gradients() -> list[str]:
    def once(setup: Setup, problem: Problem) -> None:
        setup.backward(0, problem)

    def held_back(setup: Setup, problem: Problem) -> None:
        with setup.no_sync():
            setup.backward(0, problem)
        setup.backward(2, problem)

    def after_a_step(setup: Setup, problem: Problem) -> None:
        train(setup, problem, range(2))
        setup.backward(2, problem)

    def cleared_in_place(setup: Setup, problem: Problem) -> None:
        setup.backward(0, problem)
        setup.opt.zero_grad(set_to_none=False)

    def cleared(setup: Setup, problem: Problem) -> None:
        setup.backward(0, problem)
        setup.opt.zero_grad()

    failures = []
    for name in ("mlp", "branching", "conv", "mixed dtypes"):
        problem = PROBLEMS[name]
        for act in (once, held_back, after_a_step, cleared_in_place, cleared):
            ddp = with_ddp(problem.fresh(), SGD, find_unused_parameters=problem.find_unused)
            act(ddp, problem)
            for layout in ("sliced", "whole"):
                zero = with_zero(problem.fresh(), SGD, layout=layout)
                act(zero, problem)
                for (n, theirs), ours in zip(
                    ddp.module.named_parameters(), zero.module.parameters(), strict=True
                ):
                    by_name, by_param = zero.opt.full_grad(n), zero.opt.full_grad(ours)
                    what = f"{name}, {act.__name__}, {layout}: {n}"
                    for got in (by_name, by_param):
                        if (got is None) != (theirs.grad is None):
                            failures.append(f"{what} {theirs.grad is None} {got is None}")
                        elif got is not None and differing([theirs.grad], [got]):
                            failures.append(what)
    return failures


def test_a_whole_gradient_is_ddps_to_the_bit_or_none_where_that_is() -> None:
    assert run_ranks(_gradients, 2) == [[], []]


def _several_rounds() -> list[str]:
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


def test_a_whole_gradient_after_several_passes_and_looks() -> None:
    assert run_ranks(_several_rounds, 2) == [[], []]


# ---------------------------------------------------------------------------------------- states


def _states() -> list[str]:
    failures = []
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
                        if found:
                            failures.append(f"{name}, {kind[0].__name__}, {layout}, {n}: {found}")
    return failures


def test_a_whole_state_is_the_unsharded_one_to_the_bit() -> None:
    assert run_ranks(_states, 2) == [[], []]


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
    for asked, match in (
        ("name", r"layers\.9\.weight.*not a parameter"),
        ("tensor", "the given tensor is not a parameter"),
        ("state", r"layers\.9\.weight"),
    ):
        raises_on_every_rank(_unknown, 2, ValueError, asked, match=match)


# ----------------------------------------------------------------------------------------- undoing


def _undo() -> list[str]:
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
                if param.untyped_storage().nbytes() != param.nbytes:
                    failures.append(f"{what}: not in storage of its own")
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


def test_detaching_leaves_a_plain_model_that_trains_on() -> None:
    assert run_ranks(_undo, 2) == [[], []]


class _Prompt(nn.Module):
    """Hands its parameter out as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 4))

    def forward(self) -> Tensor:
        return self.weight


def _prompted(setup: Setup) -> None:
    for step in range(4):
        (noise(step, 6, 16) @ setup.model()).square().mean().backward()
        setup.finish()


def _hooks_on_an_output() -> tuple[list[int], list[int]]:
    zero, ddp = with_zero(_Prompt(), SGD), with_ddp(_Prompt(), SGD)
    for setup in (zero, ddp):
        _prompted(setup)
    hooks = [len(param._backward_hooks or ()) for param in zero.module.parameters()]
    return differing(ddp.params, zero.params), hooks


def test_a_parameter_that_is_the_output_collects_no_hooks() -> None:
    assert run_ranks(_hooks_on_an_output, 2) == [([], [0])] * 2


def _successor() -> list[str]:
    """A second optimizer takes over where the first was detached, and takes its state along."""
    ddp = with_ddp(MLP_PROBLEM.fresh(), ADAMW)
    expected = [*train(ddp, MLP_PROBLEM, range(6)), *ddp.params]
    zero = with_zero(MLP_PROBLEM.fresh(), ADAMW)
    losses = train(zero, MLP_PROBLEM, range(3))
    state = _consolidated(zero.opt)
    zero.opt.detach()
    heir = with_zero(zero.module, ADAMW, layout="whole")
    heir.opt.load_state_dict(state)
    losses += train(heir, MLP_PROBLEM, range(3, 6))
    return failing([("successor", differing(expected, [*losses, *heir.params]))])


def _consolidated(opt: Any) -> Any:
    """The whole state, on every rank."""
    for to in range(opt.world_size):
        opt.consolidate_state_dict(to)
        if opt.rank == to:
            state = copy.deepcopy(opt.state_dict())
    return state


def test_an_optimizer_can_take_over_from_one_that_was_detached() -> None:
    assert run_ranks(_successor, 2) == [[], []]


def _second_optimizer() -> None:
    first = with_zero(MLP_PROBLEM.fresh(), SGD)
    train(first, MLP_PROBLEM, range(2))
    with_zero(first.module.get_submodule("layers"), ADAMW)


def test_an_optimizer_beside_one_that_was_not_detached_is_refused() -> None:
    """Both would take the gradients away, and each would find a part of them."""
    match = r"'0\.weight' .*another optimizer.*detach\(\)"
    raises_on_every_rank(_second_optimizer, 2, ValueError, match=match)


def _added_to_a_second() -> None:
    first, second = (with_zero(MLP_PROBLEM.fresh(), SGD) for _ in range(2))
    second.opt.add_param_group({"params": list(first.module.parameters())})


def test_parameters_of_one_that_was_not_detached_cannot_be_added_to_another() -> None:
    raises_on_every_rank(_added_to_a_second, 2, ValueError, match=r"another optimizer.*detach\(\)")


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


# ------------------------------------------------------------------------------- moving the state


def _zero_1(module: nn.Module, layout: str) -> Setup:
    ddp = with_ddp(module, ADAMW, find_unused_parameters=True)
    opt: Any = ZeroRedundancyOptimizer(
        module.parameters(), ADAMW[0], layout=layout, bucket_bytes=1, **ADAMW[1]
    )
    return Setup(ddp.model, module, opt, ddp.no_sync, opt.clip_grad_norm_)


def _migrate() -> list[str]:
    """Three steps with one, three with another: as if all six had been taken with DDP."""
    makes: dict[str, Callable[[nn.Module], Setup]] = {
        "ZeRO-1 sliced": lambda module: _zero_1(module, "sliced"),
        "ZeRO-1 whole": lambda module: _zero_1(module, "whole"),
        "ZeRO-2 sliced": lambda module: with_zero(module, ADAMW, layout="sliced"),
        "ZeRO-2 whole": lambda module: with_zero(
            module, ADAMW, layout="whole", bucket_bytes=1 << 30
        ),
        "plain": lambda module: with_ddp(module, ADAMW, find_unused_parameters=True),
    }
    failures = []
    for name in ("mlp", "branching"):
        problem = PROBLEMS[name]
        ddp = with_ddp(problem.fresh(), ADAMW, find_unused_parameters=problem.find_unused)
        expected = [*train(ddp, problem, range(6)), *ddp.params]
        for source, make_source in makes.items():
            for target, make_target in makes.items():
                if source == target == "plain":
                    continue
                first = make_source(problem.fresh())
                losses = train(first, problem, range(3))
                state = (
                    copy.deepcopy(first.opt.state_dict())
                    if source == "plain"
                    else _consolidated(first.opt)
                )
                values = {k: v.clone() for k, v in first.module.state_dict().items()}
                second = make_target(problem.fresh())
                second.module.load_state_dict(values)
                second.opt.load_state_dict(state)
                losses += train(second, problem, range(3, 6))
                if differing(expected, [*losses, *second.params]):
                    failures.append(f"{name}: {source} -> {target}")
    return failures


@pytest.mark.slow
def test_state_moves_between_zero_1_zero_2_and_the_plain_optimizer_to_the_bit() -> None:
    assert run_ranks(_migrate, 2, timeout=110) == [[], []]


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
    raises_on_every_rank(_other_parameters, 2, ValueError, match="not a parameter of the given")
    raises_on_every_rank(_too_few, 2, ValueError, match=r"'layers\.0\.weight'.*not given")
    raises_on_every_rank(
        _too_few_on_one_rank, 2, (ValueError, RuntimeError), match=r"layers\.0\.weight"
    )
    raises_on_every_rank(_other_buffers, 2, ValueError, match="buffer 'seen'")


def _frozen_may_be_left_out() -> list[int]:
    problem = Problem(Branching, PROBLEMS["branching"].loss)
    model = problem.fresh()
    model.get_submodule("stem").requires_grad_(False)
    model.get_submodule("never").requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]
    opt = ZeroRedundancyOptimizer(params, SGD[0], module=model, bucket_bytes=1, **SGD[1])
    zero = Setup(model, model, opt, opt.no_sync, opt.clip_grad_norm_)
    train(zero, problem, range(3))

    other = problem.fresh()
    other.get_submodule("stem").requires_grad_(False)
    other.get_submodule("never").requires_grad_(False)
    ddp = with_ddp(other, SGD, find_unused_parameters=True)
    train(ddp, problem, range(3))
    return differing(ddp.params, zero.params)


def test_frozen_parameters_of_the_module_may_be_left_out() -> None:
    assert run_ranks(_frozen_may_be_left_out, 2) == [[], []]


# ---------------------------------------------------------------------------------------- buffers


class _Buffered(nn.Module):
    """A buffer of its own on every rank, of a shape that lies in memory with gaps, and an int."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        self.register_buffer("mean", torch.zeros(8, 6)[:, ::2])
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.add_(x.mean())
            self.count.add_(1 + rank())
        out: Tensor = self.body(x) + self.mean.mean().detach()
        return out


BUFFERED = Problem(_Buffered, lambda model, step: model(noise(step, 6, 16)).square().mean())


def _buffers(broadcast: bool) -> tuple[list[int], list[Tensor]]:
    ddp = with_ddp(BUFFERED.fresh(), SGD, broadcast_buffers=broadcast)
    zero = with_zero(BUFFERED.fresh(), SGD, broadcast_buffers=broadcast)
    expected, got = ([*train(setup, BUFFERED, range(5)), *setup.params] for setup in (ddp, zero))
    after = copies(zero.module.buffers())
    for setup in (ddp, zero):
        BUFFERED.loss(setup.model, 9)
    expected += copies(ddp.module.buffers())
    got += copies(zero.module.buffers())
    return differing(expected, got), after


def test_buffers_follow_rank_0_or_stay_each_ranks_own_as_under_ddp() -> None:
    (failures, here), (others, there) = run_ranks(_buffers, 2, True)
    assert failures == others == []
    assert differing(here, there) == []
    (failures, here), (others, there) = run_ranks(_buffers, 2, False)
    assert failures == others == []
    assert int(here[1]) == 5
    assert int(there[1]) == 10


class _Remembering(nn.Module):
    """Buffers that backward needs: one that is replaced, and those of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        self.scale = 0.5 * self.scale + 0.5 * hidden.detach().abs().mean(dim=0)
        out: Tensor = self.last(hidden * self.scale)
        return out


def _two_losses(model: Any, step: int) -> Tensor:
    loss: Tensor = model(noise(step, 6, 16)).square().mean()
    loss = loss + model(noise(100 + step, 6, 16)).square().mean()
    return loss


def _several_forwards() -> list[int]:
    problem = Problem(_Remembering, _two_losses)
    zero, ddp = with_zero(problem.fresh(), SGD), with_ddp(problem.fresh(), SGD)
    got, expected = ([*train(setup, problem, range(4)), *setup.params] for setup in (zero, ddp))
    return differing(expected, got)


def test_buffers_evened_out_between_two_forwards_and_one_backward_equal_ddp_to_the_bit() -> None:
    assert run_ranks(_several_forwards, 2) == [[], []]
