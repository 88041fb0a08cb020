"""ZeRO for any PyTorch optimizer: DDP's numbers and speed with 1/N of its optimizer state."""

from shardstep import checkpoint, elastic
from shardstep.comm import BatchSkippedError
from shardstep.modes.ddp_hooks import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    register,
)
from shardstep.optimizer import ZeroRedundancyOptimizer
from shardstep.precision import MixedPrecision

__all__ = [
    "BatchSkippedError",
    "MixedPrecision",
    "ZeroRedundancyOptimizer",
    "checkpoint",
    "elastic",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "register",
]
__version__ = "0.2.0"
