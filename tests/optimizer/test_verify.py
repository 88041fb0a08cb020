"""`verify()` finds the first parameter that differs between ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from models import MLP_PROBLEM
from ranks import each_raises_on_every_rank, run_ranks
from scenarios import ALL, sharded
from torch import nn, optim

from shardstep import ZeroRedundancyOptimizer

INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
}


def _verify(damage: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 40), nn.Linear(40, 3))
    model = model.to(memory_format=torch.channels_last)
    model = model.to(dtype)
    opt = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, module=model, lr=0.1)
    model(torch.ones(2, 3, 3, 3, dtype=dtype)).sum().backward()
    opt.step()
    opt.verify()
    weight = model[2].weight.data
    if dist.get_rank() == 1:
        model[3].bias.data += 1  # a later one
        if damage == "bit":
            weight.view(INTEGERS[dtype])[3, 5] ^= 1
        elif damage == "sign":
            weight[3, 5] *= -1
        elif damage == "swap":
            weight[0, 0], weight[39, 7] = weight[39, 7].clone(), weight[0, 0].clone()
        else:
            weight[2, 2] = torch.nan
    opt.verify()


def test_the_first_parameter_that_differs_is_named() -> None:
    match = "'2.weight' differs between ranks 0 and 1"
    damages = itertools.product(["bit", "sign", "swap", "nan"], INTEGERS)
    each_raises_on_every_rank(2, [(_verify, RuntimeError, match, *each) for each in damages])


def _verify_in(mode: str) -> None:
    setup = sharded(mode, MLP_PROBLEM.fresh())
    for step in range(2):
        setup.backward(step)
        setup.finish()
        setup.opt.verify()
    if dist.get_rank() == dist.get_world_size() - 1:
        setup.module.get_parameter("layers.1.weight").data[3, 5] += 1
    setup.opt.verify()


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_is_named_in_every_mode(world_size: int) -> None:
    # Without module=, parameters in a list have no names.
    match = rf"'(layers.1.weight|param 2)' differs between ranks 0 and {world_size - 1}"
    each_raises_on_every_rank(world_size, [(_verify_in, RuntimeError, match, mode) for mode in ALL])


def test_one_rank_agrees_with_itself() -> None:
    run_ranks(_verify, 1, "bit", torch.float32)
