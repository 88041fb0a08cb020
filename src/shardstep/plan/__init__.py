"""The placement of parameters on ranks: integers and dtypes, no tensors, no process group."""

from shardstep.plan.box import Box, Interval, boxes, overlap
from shardstep.plan.estimate import Share, StateSize, pool_sizes, shares
from shardstep.plan.messages import POOL, Message, messages_of
from shardstep.plan.placement import ALIGNMENT, Bucket, Piece, Slot
from shardstep.plan.plan import Copy, Holding, ShardPlan, default_bucket_bytes, transfers
from shardstep.plan.spec import Layout, ParamSpec, contiguous

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
    "shares",
    "transfers",
]
