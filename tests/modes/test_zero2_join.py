"""Uneven inputs with `module=`: ranks that have run out of data count with zeros in a mean over all
ranks, go on owning their part of the state, and have the model of all others in the end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    ADAMW,
    MLP_PROBLEM,
    PROBLEMS,
    SGD,
    Branching,
    Kind,
    Problem,
    Setup,
    furthest,
    noise,
    rank,
    with_zero,
    world_size,
)
from problems import copies, differing
from ranks import raises_on_every_rank, run_ranks
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join

from shardstep import ZeroRedundancyOptimizer

Loss = Callable[[nn.Module, int, int], Tensor]


def _mlp_loss(model: nn.Module, step: int, of: int) -> Tensor:
    loss: Tensor = model(noise(step, 6, 16, of=of)).square().mean()
    return loss


def _conv_loss(model: nn.Module, step: int, of: int) -> Tensor:
    loss: Tensor = model(noise(step, 4, 3, 6, 6, of=of)).square().mean()
    return loss


def _branch_loss(model: nn.Module, step: int, of: int) -> Tensor:
    """The last rank, which goes on longest, takes a branch that nobody else does."""
    taken = [step % 2] + ([2] if of == world_size() - 1 else [])
    loss: Tensor = model(noise(step, 6, 16, of=of), taken).square().mean()
    return loss


TRAINED: dict[str, tuple[Problem, Loss]] = {
    "mlp": (MLP_PROBLEM, _mlp_loss),
    "conv": (PROBLEMS["conv"], _conv_loss),
    "branching": (Problem(Branching, MLP_PROBLEM.loss), _branch_loss),
}


def _num_inputs(of: int, reverse: bool) -> int:
    return 3 + 2 * (world_size() - 1 - of if reverse else of)


def _scaled_loss(loss: Tensor, step: int, of: int) -> Tensor:
    """At one step a rank that still has data has an infinity."""
    return loss * float("inf") if step == 4 and of in (1, world_size() - 1) else loss


def _with_join(setup: Setup, loss: Loss, way: str, reverse: bool) -> None:
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=way == "scaler")
    with Join([setup.opt]):
        for step in range(_num_inputs(rank(), reverse)):
            if way == "accumulate":
                with setup.opt.no_sync():
                    loss(setup.model, step + 100, rank()).backward()
                loss(setup.model, step + 200, rank()).backward()
            value = loss(setup.model, step, rank())
            if way == "scaler":
                value = _scaled_loss(value, step, rank())
            scaler.scale(value).backward()
            if way in ("clip", "scaler"):
                scaler.unscale_(setup.opt)
                setup.clip(0.05)
            scaler.step(setup.opt)
            scaler.update()
            if way == "through the module":
                setup.module.zero_grad()
            else:
                setup.opt.zero_grad(set_to_none=way != "zero in place")


def _simulated(module: nn.Module, kind: Kind, loss: Loss, way: str, reverse: bool) -> nn.Module:
    """One process that computes every rank's gradients."""
    opt = kind[0](module.parameters(), **kind[1])
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=way == "scaler")
    ranks = range(world_size())
    for step in range(max(_num_inputs(r, reverse) for r in ranks)):
        active = [r for r in ranks if _num_inputs(r, reverse) > step]
        source: nn.Module | None = None
        for of in active:
            replica = copy.deepcopy(module)
            for param in replica.parameters():
                param.grad = None
            at = [step + 100, step + 200, step] if way == "accumulate" else [step]
            for each in at:
                value = loss(replica, each, of)
                if way == "scaler":
                    value = _scaled_loss(value, each, of)
                scaler.scale(value).backward()
            for ours, theirs in zip(module.parameters(), replica.parameters(), strict=True):
                if theirs.grad is not None:
                    part = theirs.grad / len(ranks)
                    ours.grad = part if ours.grad is None else ours.grad + part
            source = source or replica
        if way in ("clip", "scaler"):
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        scaler.step(opt)
        scaler.update()
        assert source is not None
        for buffer, current in zip(module.buffers(), source.buffers(), strict=True):
            buffer.copy_(current)
        opt.zero_grad(set_to_none=way != "zero in place")
    return module


def _uneven(name: str, ways: list[str]) -> tuple[list[str], list[Tensor]]:
    problem, loss = TRAINED[name]
    failures = []
    seen: list[Tensor] = []
    for way in ways:
        for reverse in (False, True):
            for layout, kind in (("sliced", SGD), ("whole", ADAMW)):
                zero = with_zero(problem.fresh(), kind, layout=layout)
                oracle = copy.deepcopy(zero.module)
                _with_join(zero, loss, way, reverse)
                with torch.random.fork_rng():
                    expected = _simulated(oracle, kind, loss, way, reverse)
                what = f"{name}, {way}, reverse {reverse}, {layout}"
                # AdamW divides what rounding there is by the size of the gradient.
                far = furthest(copies(expected.parameters()), zero.params)
                if far > (1e-5 if kind is SGD else 2e-3):
                    failures.append(f"{what}: parameters differ by {far}")
                for a, b in zip(expected.buffers(), zero.module.buffers(), strict=True):
                    if not torch.allclose(a, b, rtol=1e-4, atol=1e-6):
                        failures.append(f"{what}: buffers")
                seen += zero.params + copies(zero.module.buffers())
    return failures, seen


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("mlp", ["plain", "zero in place", "through the module", "clip", "scaler", "accumulate"]),
        ("conv", ["plain", "clip"]),
        ("branching", ["plain", "scaler"]),
    ],
)
def test_uneven_inputs_equal_a_mean_with_zeros_and_leave_all_ranks_alike(
    world_size: int, name: str, ways: list[str]
) -> None:
    outcomes = run_ranks(_uneven, world_size, name, ways)
    for failures, seen in outcomes:
        assert failures == []
        assert differing(outcomes[0][1], seen) == []


def _even() -> list[str]:
    """With as many inputs everywhere, and with the context disabled, nothing changes."""
    failures = []
    for enable in (True, False):
        joined, free = (with_zero(MLP_PROBLEM.fresh(), SGD) for _ in range(2))
        with Join([joined.opt], enable=enable):
            for step in range(3):
                joined.backward(step)
                joined.clip(0.1)
                joined.finish()
        for step in range(3):
            free.backward(step)
            free.clip(0.1)
            free.finish()
        # The optimizer goes on without the context.
        for setup in (joined, free):
            setup.backward(4)
            setup.finish()
        if differing(free.params, joined.params):
            failures.append(f"enable {enable}")
    return failures


def test_even_inputs_and_a_disabled_context_change_nothing_to_the_bit() -> None:
    assert run_ranks(_even, 2) == [[], []]


def _nothing_at_all() -> list[Tensor]:
    """A rank without a single batch ends with the others' model."""
    zero = with_zero(MLP_PROBLEM.fresh(), ADAMW)
    with Join([zero.opt]):
        for step in range(4 * rank()):
            zero.backward(step)
            zero.finish()
    zero.opt.consolidate_state_dict(to=0)
    steps = []
    if rank() == 0:
        steps = [entry["step"] for entry in zero.opt.state_dict()["state"].values()]
        assert {int(step) for step in steps} == {4}
    return zero.params


def test_a_rank_without_any_input_takes_every_step() -> None:
    here, there = run_ranks(_nothing_at_all, 2)
    assert differing(here, there) == []


def _throwing() -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    with Join([zero.opt], throw_on_early_termination=True):
        for step in range(_num_inputs(rank(), False)):
            zero.backward(step)
            zero.finish()


def test_early_termination_can_be_an_error_on_every_rank() -> None:
    raises_on_every_rank(_throwing, 2, RuntimeError, match="exhausted")


def _not_first() -> None:
    one, two = with_zero(MLP_PROBLEM.fresh(), SGD), with_zero(MLP_PROBLEM.fresh(), SGD)
    with Join([one.opt, two.opt]):
        two.backward(0)
        two.finish()


def test_an_optimizer_that_is_not_the_first_joinable_says_so() -> None:
    raises_on_every_rank(_not_first, 2, RuntimeError, match=r"the first in Join\(\[\.\.\.\]\)")


def _different_acts() -> None:
    """One rank clips and the other does not: an error for both, and no hang."""
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    with Join([zero.opt]):
        zero.backward(0)
        if rank() == 0:
            zero.clip(1.0)
        zero.opt.step()


def test_ranks_that_do_different_things_raise() -> None:
    raises_on_every_rank(_different_acts, 2, RuntimeError, match="different things")


def test_without_a_process_group_join_is_not_needed() -> None:
    model: Any = MLP_PROBLEM.fresh()
    opt = ZeroRedundancyOptimizer(model.parameters(), SGD[0], module=model, **SGD[1])
    _mlp_loss(model, 0, 0).backward()
    opt.step()


def _partly_cleared(when: str) -> float:
    """Some gradients are cleared by hand, and not by `zero_grad`; the first rank has less data."""
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    module = copy.deepcopy(zero.module)
    plain = SGD[0](module.parameters(), **SGD[1])
    ranks = range(world_size())

    def turn(model: nn.Module, step: int, of: Sequence[int], opt: Any) -> None:
        loss = sum(_mlp_loss(model, step, each) for each in of)
        assert isinstance(loss, Tensor)
        loss.backward()
        if when != "before the step":
            model.get_submodule("layers.0").zero_grad()
            model.get_parameter("layers.3.weight").grad = None
            if when == "before clipping":
                clip(opt, 0.01)
            loss = sum(_mlp_loss(model, step + 100, each) for each in of)
            assert isinstance(loss, Tensor)
            loss.backward()
        model.get_submodule("layers.1").zero_grad()
        opt.step()
        opt.zero_grad()

    def clip(opt: Any, max_norm: float) -> None:
        if opt is plain:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm * world_size())
        else:
            opt.clip_grad_norm_(max_norm)

    with Join([zero.opt]):
        for step in range(_num_inputs(rank(), reverse=False)):
            turn(zero.module, step, [rank()], zero.opt)
    # Gradients are summed over ranks here, and divided when they are stepped on.
    plain.register_step_pre_hook(lambda *_: _divide(module.parameters()))
    for step in range(max(_num_inputs(of, reverse=False) for of in ranks)):
        active = [of for of in ranks if _num_inputs(of, reverse=False) > step]
        turn(module, step, active, plain)
    return furthest(copies(module.parameters()), zero.params)


def _divide(params: Iterable[Tensor]) -> None:
    for param in params:
        if param.grad is not None:
            param.grad /= world_size()


@pytest.mark.parametrize("when", ["before another backward", "before clipping", "before the step"])
def test_ranks_without_data_forget_the_gradients_that_others_clear_by_hand(when: str) -> None:
    assert max(run_ranks(_partly_cleared, 3, when)) < 1e-5


def _buffers_in_forward() -> list[torch.Tensor]:
    """Two passes per step outside of `no_sync`: the second evens buffers out, everywhere."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, module=model, lr=0.1)
    with Join([opt]):
        for step in range(2 + 2 * dist.get_rank()):
            for part in range(2):
                torch.manual_seed(100 * step + 10 * part + dist.get_rank())
                model(torch.randn(4, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    return [value.clone() for value in model.state_dict().values()]


def test_buffers_that_a_forward_pass_evens_out_reach_ranks_without_data() -> None:
    one, other = run_ranks(_buffers_in_forward, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_norm_of_double_precision_gradients_is_in_double_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30, dtype=dtype)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, module=model, lr=0.1)
    model(torch.randn(4, 40).to(dtype)).abs().square().mean().backward()
    grads = [opt.full_grad(param) for param in model.parameters()]
    expected = torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None])
    norm = opt.clip_grad_norm_(1e9)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
