"""Collectives over NCCL, with several ranks on one device: even, uneven and empty segments."""

from __future__ import annotations

import itertools
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from on_nccl import run_on_nccl
from torch import nn

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import Operation, all_gather_json, connect
from shardstep.comm.api import broadcast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [[64, 64, 64, 64], [128, 64, 192, 320], [0, 64, 128, 0], [0, 4096, 0, 0], [0, 0, 0, 0]]


def move_segments() -> None:
    given = connect(None, [torch.zeros(1, device="cuda")])
    for comm, lengths in itertools.product((given, given.new_connection()), LENGTHS):
        rank, size = comm.group_rank, comm.world_size
        cuts = list(accumulate(lengths[:size], initial=0))
        own = slice(cuts[rank], cuts[rank + 1])
        for device in ("cuda", "cpu"):  # the latter is staged
            numbers = torch.arange(cuts[-1], dtype=torch.float32, device=device)
            buffer = torch.full_like(numbers, -1)
            buffer[own] = numbers[own]
            comm.all_gather(buffer, cuts).wait()
            assert torch.equal(buffer, numbers), lengths
            for dtype in (torch.float32, torch.float64):
                out = torch.full((lengths[rank],), torch.nan, dtype=dtype, device=device)
                comm.reduce_scatter(numbers * (rank + 1), cuts, out).wait()
                assert torch.equal(out, numbers[own].to(dtype) * (size * (size + 1) // 2)), lengths
        tensors = [torch.full((3,), float(rank), device="cuda"), torch.ones(2, device="cpu") * rank]
        broadcast(comm, tensors, 1, Operation.START)
        assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [1.0]]
        assert all_gather_json(comm, "x" * 1000 * rank) == ["x" * 1000 * r for r in range(size)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_segments_of_any_length_travel_over_nccl(world_size: int) -> None:
    run_on_nccl(move_segments, world_size)


def train_whole() -> bool:
    """Adafactor on whole tensors, against the same with the mean of all gradients."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(96, 70), nn.ReLU(), nn.Linear(70, 30)).cuda())
    ours, plain = models
    opt = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adafactor, module=ours, lr=0.01)
    reference = torch.optim.Adafactor(plain.parameters(), lr=0.01)
    for step in range(5):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(8, 96).cuda()
        for model, optimizer in ((ours, opt), (plain, reference)):
            model(x).square().mean().backward()
            if model is plain:
                for param in plain.parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    return all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in pairs)


@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_segments_train_over_nccl(world_size: int) -> None:
    assert run_on_nccl(train_whole, world_size) == [True] * world_size
