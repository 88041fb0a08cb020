"""A small model in 16 bits, and Muon and AdamW in one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from shardstep import MixedPrecision, ZeroRedundancyOptimizer

MASTERS = MixedPrecision()
MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 0.003, "betas": (0.8, 0.95)}


def net(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 70), nn.Linear(70, 8), nn.LayerNorm(8)).to(dtype)


def mixed(model: nn.Module, optimizer_class: Any = optim.Muon, **options: Any) -> list[Any]:
    """Matrices to the class, the rest to the default one."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    rest = [param for param in model.parameters() if param.dim() != 2]
    return [{"params": matrices, "optimizer_class": optimizer_class, **options}, {"params": rest}]


def mixture(
    dtype: torch.dtype = torch.bfloat16, precision: MixedPrecision | None = MASTERS
) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = net(dtype)
    opt = ZeroRedundancyOptimizer(
        mixed(model, lr=0.02), optim.AdamW, lr=1e-3, precision=precision, bucket_bytes=1
    )
    return model, opt


def steps(model: nn.Module, opt: Any, numbers: range) -> None:
    for step in numbers:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = grad if param.requires_grad else None
        opt.step()
        opt.zero_grad()
