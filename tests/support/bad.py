"""Parameters and optimizers for tests of errors."""

from __future__ import annotations

from typing import Any

import torch

from shardstep import ZeroRedundancyOptimizer

#: Enough for ranks to start on a busy machine; a hang is reported long before pytest's timeout.
SECONDS = 20.0

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def p(*shape: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=trainable)


def build(params: Any, optimizer_class: Any = SGD, **options: Any) -> ZeroRedundancyOptimizer:
    if optimizer_class is SGD:
        options.setdefault("lr", 0.1)
    return ZeroRedundancyOptimizer(params, optimizer_class, **options)


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse().requires_grad_()
