"""The model and the data that the frameworks train on."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardstep import ZeroRedundancyOptimizer

BATCH, STEPS = 4, 4


class Net(nn.Module):
    """A small classifier, with buffers and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 24, bias=False)  # the norm would make its gradient pure noise
        self.norm = nn.BatchNorm1d(24)
        self.last = nn.Sequential(nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def data(steps: int, world_size: int = 1, accumulate: int = 1) -> TensorDataset:
    """Return enough samples for this many steps of all ranks."""
    generator = torch.Generator().manual_seed(3)
    count = BATCH * steps * world_size * accumulate
    inputs = torch.randn(count, 8, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


def optimizer_for(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    if kind == "plain":
        return torch.optim.AdamW(module.parameters(), lr=0.02)
    given = module if kind == "module" else None
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, module=given, lr=0.02)
