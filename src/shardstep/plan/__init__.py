"""The placement of parameters on ranks: integers and dtypes, no tensors, no process group."""

from shardstep.plan.box import Box, boxes, overlap
from shardstep.plan.estimate import POOL, Share, StateSize, pool_sizes, share, shares
from shardstep.plan.interval import Interval
from shardstep.plan.placement import ALIGNMENT, Bucket, Piece, Slot
from shardstep.plan.plan import ShardPlan
from shardstep.plan.spec import Layout, ParamSpec, contiguous
from shardstep.plan.transfer import Copy, Holding, transfers

__all__ = [
    "ALIGNMENT",
    "POOL",
    "Box",
    "Bucket",
    "Copy",
    "Holding",
    "Interval",
    "Layout",
    "ParamSpec",
    "Piece",
    "ShardPlan",
    "Share",
    "Slot",
    "StateSize",
    "boxes",
    "contiguous",
    "overlap",
    "pool_sizes",
    "share",
    "shares",
    "transfers",
]
