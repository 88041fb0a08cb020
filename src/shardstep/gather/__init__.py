"""All-gather of updated parameters, at once or overlapped with the next forward."""

from shardstep.gather.base import ImmediateGather, ParamGather
from shardstep.gather.overlapped import OverlappedGather

__all__ = ["ImmediateGather", "OverlappedGather", "ParamGather"]
