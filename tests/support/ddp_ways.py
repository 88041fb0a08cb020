"""The ways in which DDP and the sharded optimizer work together, and what they are compared with.

A way takes the step inside of backward. `with_ddp` is DDP with the same communication hook and the
unsharded optimizer: the arithmetic is the same, so the numbers must be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from models import ADAMW, MLP_PROBLEM, Groups, Kind, Setup, groups_of, in_ddp, train, with_ddp
from problems import assert_same
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardstep import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    register,
)

HOOKS: dict[str, Callable[..., Any]] = {
    "hook": hook_with_zero_step,
    "interleaved": hook_with_zero_step_interleaved,
}
WAYS = (*HOOKS, "register")


def set_up(model: DistributedDataParallel, opt: Any) -> Setup:
    return Setup(model, model.module, opt, model.no_sync, opt.clip_grad_norm_)


def overlapping(
    way: str,
    module: nn.Module,
    kind: Kind = ADAMW,
    groups: Groups = groups_of,
    *,
    comm_hook: Any = allreduce_hook,
    state: Callable[[], Any] = lambda: None,
    shard_buckets: bool = False,
    zero: dict[str, Any] | None = None,
    **ddp: Any,
) -> Setup:
    """DDP and the sharded optimizer, which steps within backward."""
    model = in_ddp(module, **ddp)
    options = {"bucket_bytes": 1, "overlap_with_ddp": True, **(zero or {}), **kind[1]}
    opt: Any = ZeroRedundancyOptimizer(groups(module), kind[0], **options)
    if way == "register":
        register(model, opt)
    else:
        model.register_comm_hook(state(), HOOKS[way](comm_hook, model, opt, shard_buckets))
    return set_up(model, opt)


def seen_in(setup: Setup, steps: int = 5) -> list[Tensor]:
    """Train; return the losses, and the parameters afterwards."""
    return [*train(setup, MLP_PROBLEM, range(steps)), *setup.params]


def compare(kind: Kind = ADAMW, ways: Sequence[str] = WAYS, steps: int = 5, **ddp: Any) -> None:
    """Check that no bit differs in any of the ways. Options are for DDP."""
    reference = seen_in(with_ddp(MLP_PROBLEM.fresh(), kind, **ddp), steps)
    assert all(tensor.isfinite().all() for tensor in reference)
    for way in ways:
        got = seen_in(overlapping(way, MLP_PROBLEM.fresh(), kind, **ddp), steps)
        assert_same(reference, got, (way, kind, ddp))
