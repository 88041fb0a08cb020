"""The placement of parameters on ranks: integers and dtypes, no tensors, no process group."""

from shardstep.plan.box import Box, boxes, overlap
from shardstep.plan.estimate import Share, StateSize, pool_sizes, share, shares
from shardstep.plan.interval import Interval
from shardstep.plan.messages import POOL, Message, messages_of
from shardstep.plan.placement import ALIGNMENT, Bucket, Piece, Slot
from shardstep.plan.plan import ShardPlan, default_bucket_bytes
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
    "Message",
    "ParamSpec",
    "Piece",
    "ShardPlan",
    "Share",
    "Slot",
    "StateSize",
    "boxes",
    "contiguous",
    "default_bucket_bytes",
    "messages_of",
    "overlap",
    "pool_sizes",
    "share",
    "shares",
    "transfers",
]
