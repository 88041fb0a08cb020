"""The cost of a plan: bytes held and sent per rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardstep.plan.plan import ShardPlan


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's trainable elements, and the bytes it sends to gather and reduce all buckets."""

    group_rank: int
    numel: int
    nbytes: int
    gather_nbytes_sent: int
    reduce_nbytes_sent: int


def share(
    plan: ShardPlan,
    group_rank: int,
    wire_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> Share:
    """Return the share of `group_rank`; `wire_dtype` maps a parameter's dtype to its gradients'."""
    numel = nbytes = gathered = reduced = 0
    for bucket in plan.training_buckets:
        own = sum(piece.param_interval.numel for piece in bucket.pieces(group_rank))
        segment = bucket.segment(group_rank).numel
        numel += own
        nbytes += own * bucket.dtype.itemsize
        gathered += segment * (plan.world_size - 1) * bucket.dtype.itemsize
        reduced += (bucket.numel - segment) * wire_dtype(bucket.dtype).itemsize
    return Share(group_rank, numel, nbytes, gathered, reduced)
