"""A small model in 16 bits, and an optimizer for it."""

from __future__ import annotations

from typing import Any

import torch
from models import MLP, noise
from torch import Tensor, nn, optim

from shardstep import MixedPrecision, ZeroRedundancyOptimizer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MASTERS = MixedPrecision()
WITHOUT = MixedPrecision(master_dtype=None)
AT_RANDOM = MixedPrecision(master_dtype=None, stochastic_rounding=True)


def loss_of(module: nn.Module, step: int) -> Tensor:
    dtype = next(module.parameters()).dtype
    return module(noise(step, 6, 16).to(dtype)).float().square().mean()


def train_on(module: nn.Module, opt: Any, steps: range) -> None:
    for step in steps:
        loss_of(module, step).backward()
        opt.step()
        opt.zero_grad()


def zero_of(module: nn.Module, with_module: bool = True, **options: Any) -> ZeroRedundancyOptimizer:
    options = {"lr": 0.003, "bucket_bytes": 1, "module": module if with_module else None, **options}
    return ZeroRedundancyOptimizer(module.parameters(), optim.AdamW, **options)


def give_gradients(module: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for param in module.parameters():
        param.grad = torch.randn(param.shape).to(param.dtype)


def bf16_mlp(dtype: torch.dtype = BF16) -> MLP:
    torch.manual_seed(3)
    return MLP().to(dtype)
