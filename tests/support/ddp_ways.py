"""The ways in which DDP and the sharded optimizer work together, and what they are compared with.

A way takes the step inside of backward. `expected` is DDP with the same communication hook and the
unsharded optimizer: the arithmetic is the same, so the numbers must be the same to the bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import ADAMW, MLP_PROBLEM, Kind, Setup, train
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

SEVERAL_BUCKETS = {"bucket_cap_mb": 0.05}
"""So that DDP has several, and divides the parameters anew after the first iteration."""


def in_ddp(
    module: nn.Module,
    comm_hook: Any = None,
    state: Callable[[], Any] = lambda: None,
    **options: Any,
) -> DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unused parameters that are not there
        model = DistributedDataParallel(module, **{**SEVERAL_BUCKETS, **options})
    if comm_hook is not None:
        model.register_comm_hook(state(), comm_hook)
    return model


def set_up(model: DistributedDataParallel, opt: Any) -> Setup:
    return Setup(model, model.module, opt, model.no_sync, lambda *a, **k: torch.zeros(()))


def groups_of(module: nn.Module) -> list[Any]:
    return list(module.parameters())


def expected(
    module: nn.Module,
    kind: Kind = ADAMW,
    groups: Callable[[nn.Module], list[Any]] = groups_of,
    **ddp: Any,
) -> Setup:
    """DDP and the optimizer."""
    model = in_ddp(module, **ddp)
    return set_up(model, kind[0](groups(module), **kind[1]))


def overlapping(
    way: str,
    module: nn.Module,
    kind: Kind = ADAMW,
    groups: Callable[[nn.Module], list[Any]] = groups_of,
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
    reference = seen_in(expected(MLP_PROBLEM.fresh(), kind, **ddp), steps)
    assert all(tensor.isfinite().all() for tensor in reference)
    for way in ways:
        got = seen_in(overlapping(way, MLP_PROBLEM.fresh(), kind, **ddp), steps)
        assert_same(reference, got, (way, kind, ddp))
