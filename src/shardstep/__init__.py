"""ZeRO for any PyTorch optimizer: DDP's numbers and speed with 1/N of its optimizer state."""

from shardstep.optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
__version__ = "0.1.0"
