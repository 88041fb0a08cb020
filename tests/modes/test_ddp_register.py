"""`register`: DDP reduces to owners. What it sends, and what is left where gradients were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_ways import expected, in_ddp, overlapping
from models import MLP, MLP_PROBLEM, noise, rank, train
from problems import differing
from ranks import raises_on_every_rank, run_ranks
from torch import nn, optim
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer, register
from shardstep.gradients.sharded_grad import ShardedGrad

STEPS = 3


def sent(model: nn.Module, **ddp: Any) -> tuple[float, int]:
    """Bytes sent per step by this rank, and those of all parameters."""
    wrapped = DistributedDataParallel(model, **ddp)
    opt: Any = ZeroRedundancyOptimizer(
        wrapped.parameters(), optim.AdamW, overlap_with_ddp=True, lr=0.01
    )
    register(wrapped, opt)

    def total() -> int:
        comms = {id(comm): comm for comm in (opt.shards.comm, opt.mode.gather_comm)}
        return sum(sum(comm.ledger.nbytes_sent.values()) for comm in comms.values())

    before = total()
    for step in range(STEPS):
        wrapped(noise(step, 6, 16)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    nbytes = sum(param.nbytes for param in model.parameters())
    return (total() - before) / STEPS, nbytes


def traffic() -> list[tuple[float, int]]:
    return [
        sent(MLP(256, 6)),
        sent(MLP(256, 6), gradient_as_bucket_view=True),
        sent(MLP(256, 6), find_unused_parameters=True),
        sent(MLP(256, 6), static_graph=True),
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_sends_two_thirds_of_what_an_all_reduce_and_a_gather_would(world_size: int) -> None:
    for measured in run_ranks(traffic, world_size):
        for nbytes_sent, nbytes in measured:
            planned = 2 * (world_size - 1) / world_size * nbytes
            assert planned * 0.99 <= nbytes_sent <= planned * 1.02


def collectives() -> tuple[int, int]:
    """How often DDP's group is used in a step: with a hook that reduces, and with ours."""
    counts = []
    for way in ("hook", "register"):
        setup = overlapping(way, MLP())
        train(setup, MLP_PROBLEM, range(2))
        group: Any = dist.group.WORLD
        before = group._get_sequence_number_for_group()
        train(setup, MLP_PROBLEM, range(2, 3))
        counts.append(group._get_sequence_number_for_group() - before)
    return counts[0], counts[1]


def test_ddp_itself_sends_nothing() -> None:
    for reducing, offering in run_ranks(collectives, 2):
        assert reducing > 0
        assert offering == 0


def looking_at_gradients() -> bool:
    plain, setup = expected(MLP_PROBLEM.fresh()), overlapping("register", MLP_PROBLEM.fresh())
    for step in range(3):
        plain.backward(step)
        setup.backward(step)
        pairs = list(zip(plain.module.parameters(), setup.module.parameters(), strict=True))
        assert all(isinstance(mine.grad, ShardedGrad) for _, mine in pairs)
        grads = [theirs.grad for theirs, _ in pairs if theirs.grad is not None]
        assert differing(grads, [setup.opt.full_grad(mine) for _, mine in pairs]) == []
        with pytest.raises(RuntimeError, match="is sharded across ranks"):
            nn.utils.clip_grad_norm_(setup.module.parameters(), 1.0)
        plain.finish()
        setup.finish()
        # Once cleared they are gone, and whoever asks does not bring them back.
        assert all(setup.opt.full_grad(mine) is None for _, mine in pairs)
        assert all(mine.grad is None for _, mine in pairs)
    return differing(plain.params, setup.params) == []


def test_gradients_are_with_their_owners() -> None:
    assert run_ranks(looking_at_gradients, 2) == [True, True]


def never_clearing(view: bool) -> None:
    setup = overlapping("register", MLP_PROBLEM.fresh(), gradient_as_bucket_view=view)
    for step in range(2):
        setup.backward(step)


def filling_with_zeros(by_module: bool) -> None:
    setup = overlapping("register", MLP_PROBLEM.fresh())
    setup.backward(0)
    (setup.module if by_module else setup.opt).zero_grad(set_to_none=False)


@pytest.mark.parametrize("variant", [False, True])
def test_gradients_have_to_be_cleared(variant: bool) -> None:
    """What would be added to is not there; dropping it would be a wrong number."""
    raises_on_every_rank(never_clearing, 2, RuntimeError, variant, match=r"call zero_grad\(\)")
    raises_on_every_rank(
        filling_with_zeros, 2, ValueError, variant, match="without set_to_none=False"
    )


def refusals() -> None:
    setup = overlapping("register", MLP())
    with pytest.raises(RuntimeError, match=r"use ddp\.no_sync\(\)"), setup.opt.no_sync():
        pass
    alone = [dist.new_group([each]) for each in range(2)][rank()]
    model = in_ddp(MLP())
    opt = ZeroRedundancyOptimizer(
        model.parameters(), optim.SGD, alone, overlap_with_ddp=True, lr=0.1
    )
    with pytest.raises(ValueError, match=r"must have the ranks .* \[0, 1\], not \["):
        register(model, opt)


def test_what_it_cannot_do_is_refused() -> None:
    run_ranks(refusals, 2)


def another_divisor() -> None:
    setup = overlapping("register", MLP())
    joinables: list[Any] = [setup.model, setup.opt]
    with Join(joinables, divide_by_initial_world_size=False):
        for step in range(2 + rank()):
            setup.backward(step)
            setup.finish()


def test_joining_divides_by_all_ranks() -> None:
    raises_on_every_rank(
        another_divisor, 2, RuntimeError, match="leave out Join's divide_by_initial_world_size"
    )


def a_second_hook() -> str:
    setup = overlapping("register", MLP())
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        register(setup.model, setup.opt)  # type: ignore[arg-type]
    return torch.__version__


def test_a_module_takes_one_hook() -> None:
    run_ranks(a_second_hook, 2)
