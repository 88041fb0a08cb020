"""Optimizer state on its way between ranks, and in and out of state dicts."""

from shardstep.checkpoint.outside import by_name
from shardstep.checkpoint.stateful import Sharded

__all__ = ["Sharded", "by_name"]
