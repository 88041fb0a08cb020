"""The peak of one iteration over NCCL is the one that `shardstep plan` plans."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from on_nccl import run_on_nccl
from torch import nn, optim

from demo.gpt import GPT, GPTConfig
from shardstep import MixedPrecision, ZeroRedundancyOptimizer
from shardstep.layouts.cost import slice_state
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.plan import ParamSpec, shares
from shardstep.plan.methods import Job
from shardstep.plan.plan import MIN_BUCKET_BYTES, default_bucket_bytes

pytestmark = [
    pytest.mark.nccl,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with NCCL"),
]

CASES = list(product(("gpt", "cnn"), ("sliced", "whole"), ("fp32", "masters")))


def _make(name: str) -> tuple[nn.Module, Any]:
    """Return a model of about 100 million parameters and its loss, with few activations."""
    if name == "gpt":
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        model: nn.Module = GPT(GPTConfig(16_384, 16, 6, 8, 1024, tied=False))
        return model, lambda: model(tokens)[0].float().square().mean()
    widths = [3, 256, 1024, *[1024] * 10]
    layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths)]
    model = nn.Sequential(*(part for conv in layers for part in (conv, nn.ReLU())))
    image = torch.ones(1, 3, 8, 8)
    return model, lambda: F.mse_loss(
        (out := model(image.to(next(model.parameters()).dtype)).float()), torch.zeros_like(out)
    )


def _planned_and_measured(name: str, layout: str, precision: str) -> tuple[int, int]:
    for dtype in (torch.float32, torch.bfloat16):  # forward and backward in their own threads
        (nn.Linear(64, 64, dtype=dtype)(torch.ones(64, 64, dtype=dtype))).sum().backward()
    gc.collect()
    before = torch.cuda.memory_allocated()  # with the work space of cuBLAS
    model, loss = _make(name)
    policy = MixedPrecision()
    if precision == "masters":
        model.to(torch.bfloat16)
    opt = ZeroRedundancyOptimizer(
        model.parameters(),
        optim.AdamW,
        module=model,
        layout=layout,
        precision=policy,
        fused=True,
    )
    for number in range(3):
        if number == 2:
            torch.cuda.reset_peak_memory_stats()
        loss().backward()
        opt.step()
        opt.zero_grad()
    torch.cuda.synchronize()
    specs = [
        replace(ParamSpec.of(name, tuple(p.shape), p.dtype), stride=p.stride(), layout=layout)
        for name, p in model.named_parameters()
    ]
    recipe = OptimizerRecipe(optim.AdamW, {"fused": True})
    state = slice_state(recipe, torch.float32)
    bucket_bytes = default_bucket_bytes(specs, MIN_BUCKET_BYTES["nccl"])
    job = Job(specs, policy, [state] * len(specs), bucket_bytes)
    share = shares(job.plan(2), policy, job.state_sizes)[opt.rank]
    whole = job.module_mode(2)
    planned = whole.parameters + whole.buffers
    planned += share.gradient_nbytes + share.master_nbytes + share.state_nbytes
    return planned, torch.cuda.max_memory_allocated() - before


def _without_cudnn(*case: str) -> tuple[int, int]:
    """Measure with convolutions that take no work space of their own."""
    with torch.backends.cudnn.flags(enabled=False):
        return _planned_and_measured(*case)


@pytest.mark.parametrize(("name", "layout", "precision"), CASES)
def test_the_peak_is_as_planned(name: str, layout: str, precision: str) -> None:
    for planned, measured in run_on_nccl(_without_cudnn, 2, name, layout, precision):
        assert planned == pytest.approx(measured, rel=0.05)
