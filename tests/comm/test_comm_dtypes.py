"""Gradients that travel in one dtype and are kept in another: who rounds what, and when."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from problems import same_bits
from ranks import run_ranks
from torch import Tensor

from shardstep.comm import GroupComm, SoloComm, connect

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CUTS = {"even": [0, 64, 128, 192], "uneven": [0, 128, 192, 448], "one empty": [0, 64, 64, 128]}


def _parts(dtype: torch.dtype, numel: int, world_size: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=random).to(dtype) for _ in range(world_size)]


def _sum(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Added in rank order, in `dtype`."""
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total


def _reduce(collective: bool) -> list[str]:
    failures = []
    comm = connect(None)
    for (name, cuts), wire, kept in itertools.product(
        CUTS.items(), (BF16, FP16, FP32), (BF16, FP16, FP32)
    ):
        cuts = cuts[: comm.world_size + 1]
        own = slice(cuts[comm.group_rank], cuts[comm.group_rank + 1])
        parts = _parts(wire, cuts[-1], comm.world_size)
        out = torch.full((own.stop - own.start,), torch.nan, dtype=kept)
        before = comm.ledger.nbytes_sent["reduce_scatter"]
        with mock.patch.object(GroupComm, "_exchanges", return_value=not collective):
            comm.reduce_scatter(parts[comm.group_rank].clone(), cuts, out).wait()
        sent = comm.ledger.nbytes_sent["reduce_scatter"] - before
        if sent != (cuts[-1] - out.numel()) * wire.itemsize:
            failures.append(f"{name}, {wire}, {kept}: sent {sent} bytes")
        # The collective way adds up in what travels, as NCCL would.
        wider = wire if collective or kept.itemsize <= wire.itemsize else kept
        expected = _sum([part[own] for part in parts], wider).to(kept)
        if collective:
            fits = torch.allclose(out.float(), expected.float(), rtol=0.02, atol=0.02)
        else:
            fits = same_bits(expected, out)
        if not fits:
            failures.append(f"{name}, {wire}, {kept}")
    return failures


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_exchange_way_adds_up_in_the_wider_dtype(world_size: int) -> None:
    assert run_ranks(_reduce, world_size, False) == [[]] * world_size


def test_the_collective_way_adds_up_in_what_travels_and_converts() -> None:
    assert run_ranks(_reduce, 3, True) == [[]] * 3


def test_one_rank_converts() -> None:
    out = torch.empty(64)
    SoloComm().reduce_scatter(torch.full((64,), 0.1, dtype=BF16), [0, 64], out).wait()
    assert torch.equal(out, torch.full((64,), 0.1, dtype=BF16).float())
