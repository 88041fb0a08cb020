"""`register`: DDP reduces to owners. What is sent, and what is left in `grad`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_ways import HOOKS, overlapping, set_up
from models import ADAMW, MLP, MLP_PROBLEM, in_ddp, rank, train, with_ddp
from on_ranks import on_ranks
from problems import assert_same, differing
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from traffic import counted

from shardstep import ZeroRedundancyOptimizer, register

STEPS = 3


def sent(**ddp: Any) -> tuple[float, int]:
    """Bytes sent per step by this rank, and those of all parameters."""
    model = MLP(256, 6)
    with counted() as traffic:
        setup = overlapping("register", model, zero={"bucket_bytes": None}, **ddp)
    traffic.reset()
    train(setup, MLP_PROBLEM, range(STEPS))
    return traffic.nbytes.total() / STEPS, sum(param.nbytes for param in model.parameters())


@on_ranks(2, 4)
def test_a_step_sends_two_thirds_of_what_an_all_reduce_and_a_gather_would() -> None:
    options = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")
    world_size = torch.distributed.get_world_size()
    measured = [
        sent(bucket_cap_mb=25),
        *(sent(bucket_cap_mb=25, **{name: True}) for name in options),
    ]
    for nbytes_sent, nbytes in measured:
        planned = 2 * (world_size - 1) / world_size * nbytes
        assert planned * 0.99 <= nbytes_sent <= planned * 1.02


@on_ranks(2)
def test_ddp_itself_sends_nothing() -> None:
    """How often DDP's group is used in a step: with a hook that reduces, and with ours."""
    counts = []
    for way in ("hook", "register"):
        setup = overlapping(way, MLP())
        train(setup, MLP_PROBLEM, range(2))
        group: Any = dist.group.WORLD
        before = group._get_sequence_number_for_group()
        train(setup, MLP_PROBLEM, range(2, 3))
        counts.append(group._get_sequence_number_for_group() - before)
    assert counts[0] > 0
    assert counts[1] == 0


@on_ranks(2)
def test_gradients_are_with_their_owners() -> None:
    plain, setup = with_ddp(MLP_PROBLEM.fresh()), overlapping("register", MLP_PROBLEM.fresh())
    for step in range(3):
        plain.backward(step)
        setup.backward(step)
        pairs = list(zip(plain.module.parameters(), setup.module.parameters(), strict=True))
        assert all(type(mine.grad).__name__ == "ShardedGrad" for _, mine in pairs)
        grads = [theirs.grad for theirs, _ in pairs if theirs.grad is not None]
        assert differing(grads, [setup.opt.full_grad(mine) for _, mine in pairs]) == []
        with pytest.raises(RuntimeError, match="the step was taken inside backward"):
            nn.utils.clip_grad_norm_(setup.module.parameters(), 1.0)
        plain.finish()
        setup.finish()
        # Once cleared they are gone, and asking for them does not bring them back.
        assert all(setup.opt.full_grad(mine) is None for _, mine in pairs)
        assert all(mine.grad is None for _, mine in pairs)
    assert differing(plain.params, setup.params) == []


def _tied_in_vain() -> tuple[Any, Any]:
    """A DDP module that refuses the hook, because it has one, and the optimizer."""
    model = in_ddp(MLP_PROBLEM.fresh(), allreduce_hook)
    opt = ZeroRedundancyOptimizer(
        model.parameters(), ADAMW[0], overlap_with_ddp=True, bucket_bytes=1, **ADAMW[1]
    )
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        register(model, opt)
    return model, opt


@on_ranks(2)
def test_an_optimizer_may_be_tied_to_one_ddp_module_after_the_other() -> None:
    """In vain, to reduce gradients itself, to let DDP reduce them, and back."""
    reference = with_ddp(MLP_PROBLEM.fresh())
    model, opt = _tied_in_vain()
    for number, way in enumerate(("register", "hook", "interleaved", "register")):
        model = in_ddp(model.module)
        if way == "register":
            register(model, opt)
        else:
            model.register_comm_hook(None, HOOKS[way](allreduce_hook, model, opt))
        steps = range(3 * number, 3 * number + 3)
        assert_same(
            train(reference, MLP_PROBLEM, steps), train(set_up(model, opt), MLP_PROBLEM, steps), way
        )
        assert_same(reference.params, list(model.parameters()), way)


@on_ranks(2)
def test_a_second_hook_its_own_no_sync_and_fewer_ranks_are_refused() -> None:
    setup = overlapping("register", MLP())
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        register(setup.model, setup.opt)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"use ddp\.no_sync\(\)"), setup.opt.no_sync():
        pass
    model, opt = _tied_in_vain()
    with pytest.raises(RuntimeError, match="no DDP module was tied to this optimizer"):
        opt.step()
    assert not model._forward_pre_hooks
    alone = [dist.new_group([each]) for each in range(2)][rank()]
    model = in_ddp(MLP())
    opt = ZeroRedundancyOptimizer(
        model.parameters(), optim.SGD, alone, overlap_with_ddp=True, lr=0.1
    )
    with pytest.raises(ValueError, match=r"must have the ranks .* \[0, 1\], not \["):
        register(model, opt)
