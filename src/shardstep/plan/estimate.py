"""What a plan costs: bytes held and bytes sent per rank, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardstep.plan.plan import ShardPlan
from shardstep.plan.relay import gather_numel_sent, reduce_numel_sent


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a plan.

    Attributes:
        group_rank: whose share it is.
        numel: trainable elements it owns and updates.
        nbytes: bytes of those elements.
        gather_nbytes_sent: bytes it sends to have its segments gathered everywhere, once.
        reduce_nbytes_sent: bytes it sends to have all gradients reduced to their owners, once.
    """

    group_rank: int
    numel: int
    nbytes: int
    gather_nbytes_sent: int
    reduce_nbytes_sent: int


def share(
    plan: ShardPlan,
    group_rank: int,
    wire_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
    sum_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
    relaying: bool = True,
) -> Share:
    """What `group_rank` holds and sends under `plan`.

    Args:
        plan: the placement.
        group_rank: which rank.
        wire_dtype: in which dtype gradients of parameters of a dtype travel; if not given, in that.
        sum_dtype: in which dtype they are added up; if not given, in that of the parameters.
        relaying: whether segments of different lengths are relayed, as over Gloo.
    """
    numel = nbytes = gathered = reduced = 0
    for bucket in plan.training_buckets:
        own = sum(piece.param_interval.numel for piece in bucket.pieces(group_rank))
        numel += own
        nbytes += own * bucket.dtype.itemsize
        gathered += gather_numel_sent(bucket.cuts, group_rank, relaying) * bucket.dtype.itemsize
        gradients, sums = reduce_numel_sent(bucket.cuts, group_rank, relaying)
        reduced += gradients * wire_dtype(bucket.dtype).itemsize
        reduced += sums * sum_dtype(bucket.dtype).itemsize
    return Share(group_rank, numel, nbytes, gathered, reduced)
