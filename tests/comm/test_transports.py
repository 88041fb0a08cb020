"""The ways that segments travel, each over real Gloo groups: right bits, right counts."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from problems import same_bits
from ranks import run_ranks
from segments import CUTS, DTYPES, cuts_of, make_buffer
from torch import Tensor, nn

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import Comm, collectives, connect, group

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


class Coalesced:
    """Works launched as one."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], object] = lambda: None) -> None:
        self._works, self._finish = works, finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._finish()


def nccl_all_gather(tensors: list[Tensor], tensor: Tensor, *, group: Any, async_op: bool) -> Any:
    """NCCL's all-gather of lists of unequal tensors, which Gloo does not take."""
    assert tensor.numel() == tensors[dist.get_rank(group)].numel()
    ranks = enumerate(tensors)
    return Coalesced(
        [dist.broadcast(each, group=group, group_src=rank, async_op=True) for rank, each in ranks]
    )


def nccl_reduce_scatter(out: Tensor, tensors: list[Tensor], *, group: Any, async_op: bool) -> Any:
    """NCCL's reduce-scatter of lists of unequal tensors."""
    own = tensors[dist.get_rank(group)]
    assert (out.shape, out.dtype) == (own.shape, own.dtype)
    assert not out.is_complex(), "NCCL raises"
    ranks = enumerate(tensors)
    works = [dist.reduce(each, group=group, group_dst=rank, async_op=True) for rank, each in ranks]
    return Coalesced(works, lambda: out.copy_(own))


class CollectivesOfNccl:
    """`torch.distributed`, with lists as NCCL takes them."""

    all_gather = staticmethod(nccl_all_gather)
    reduce_scatter = staticmethod(nccl_reduce_scatter)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


@contextmanager
def transport(name: str) -> Iterator[Comm]:
    """Communication in one of the ways that segments travel, over Gloo."""
    if name in ("messages", "two connections"):
        comm = connect(None)
        yield comm if name == "messages" else comm.new_connection()
        return
    with (
        mock.patch.object(group, "EXCHANGING", frozenset()),
        mock.patch.object(collectives, "UNEVEN_LISTS", {"gloo"} if name == "lists" else ()),
        mock.patch.object(collectives, "dist", CollectivesOfNccl() if name == "lists" else dist),
    ):
        yield connect(None)


each_transport = pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *itertools.product(["messages", "two connections"], [1, 2, 3, 4]),
        *itertools.product(["broadcasts", "lists"], [2, 3]),
    ],
)


def gather_each(name: str) -> None:
    with transport(name) as comm:
        for (seed, case), dtype in itertools.product(enumerate(CUTS), DTYPES):
            cuts = cuts_of(case, comm.world_size)
            buffer, expected = make_buffer(comm, dtype, cuts, seed)
            comm.ledger.calls.clear()
            comm.ledger.nbytes_sent.clear()
            comm.all_gather(buffer, cuts).wait()
            assert same_bits(buffer, expected), (case, dtype)
            sent = CUTS[case][comm.group_rank] * dtype.itemsize * (comm.world_size - 1)
            assert comm.ledger.calls == {"all_gather": 1}
            assert comm.ledger.nbytes_sent == {"all_gather": sent}, (case, dtype)


@each_transport
def test_all_gather_fills_in_every_segment_and_counts_what_it_sent(
    name: str, world_size: int
) -> None:
    run_ranks(gather_each, world_size, name)


def reduce_each(name: str) -> None:
    with transport(name) as comm:
        size, exact = comm.world_size, name in ("messages", "two connections")
        for case, wire, kept in itertools.product(CUTS, FLOATS, FLOATS):
            cuts = cuts_of(case, size)
            own = slice(cuts[comm.group_rank], cuts[comm.group_rank + 1])
            random = torch.Generator().manual_seed(cuts[-1])
            parts = [torch.randn(cuts[-1], generator=random).to(wire) for _ in range(size)]
            out = torch.full((own.stop - own.start,), torch.nan, dtype=kept)
            before = comm.ledger.nbytes_sent["reduce_scatter"]
            comm.reduce_scatter(parts[comm.group_rank].clone(), cuts, out).wait()
            sent = comm.ledger.nbytes_sent["reduce_scatter"] - before
            assert sent == (cuts[-1] - out.numel()) * wire.itemsize, (case, wire, kept)
            # Messages are added up in the wider dtype, collectives add in what travels.
            summed = kept if exact and kept.itemsize > wire.itemsize else wire
            total = parts[0][own].to(summed)
            for part in parts[1:]:
                total = total + part[own].to(summed)
            if exact:
                assert same_bits(out, total.to(kept)), (case, wire, kept)
            else:  # in the backend's order
                torch.testing.assert_close(out, total.to(kept), rtol=0.02, atol=0.02)


@each_transport
def test_reduce_scatter_sums_in_rank_order_and_converts(name: str, world_size: int) -> None:
    run_ranks(reduce_each, world_size, name)


@pytest.mark.parametrize("name", ["messages", "broadcasts", "lists"])
@on_ranks(2, 3)
def test_reduce_scatter_sums_complex_numbers(name: str) -> None:
    with transport(name) as comm:
        for case, kept in itertools.product(CUTS, (torch.complex64, torch.complex128)):
            cuts = cuts_of(case, comm.world_size)
            own = slice(cuts[comm.group_rank], cuts[comm.group_rank + 1])
            numbers = torch.arange(cuts[-1]) * (1 - 2j)
            out = torch.full((own.stop - own.start,), torch.nan, dtype=kept)
            comm.reduce_scatter(numbers.clone(), cuts, out).wait()
            assert same_bits(out, (numbers[own] * comm.world_size).to(kept)), (case, kept)


@on_ranks(2)
def test_odd_messages_of_a_pair_travel_in_the_other_group_except_over_gloo() -> None:
    one, other = connect(None).new_pair()
    assert [one.queue(0), one.queue(1), other.queue(1)] == [one, one, other]
    with mock.patch.object(group, "EXCHANGING", frozenset()):
        one, other = connect(None).new_pair()
        assert [each.queue(n) for each in (one, other) for n in range(3)] == [
            *(one, other, one),
            *(other, one, other),
        ]


@on_ranks(2, fresh=True)
def test_groups_of_a_pair_stay_open_while_one_connection_is_used() -> None:
    with mock.patch.object(group, "EXCHANGING", frozenset()):
        reducing, gathering = connect(None).new_pair()
        del gathering
        gc.collect()
        connect(None).new_connection()  # closes what no rank uses
        for number in range(2):
            total = torch.zeros(4)
            reducing.queue(number).reduce_scatter(torch.ones(8), [0, 4, 8], total).wait()
            assert total.tolist() == [2] * 4


@pytest.mark.parametrize("name", ["messages", "two connections"])
@on_ranks(2, 3)
def test_many_operations_in_flight_do_not_take_each_other_s_bytes(name: str) -> None:
    with transport(name) as comm:
        flying = []
        for seed, case in itertools.product(range(20), CUTS):
            if case.startswith("long") and seed > 2:
                continue
            cuts = cuts_of(case, comm.world_size)
            buffer, expected = make_buffer(comm, DTYPES[seed % len(DTYPES)], cuts, seed)
            flying.append((case, comm.all_gather(buffer, cuts), buffer, expected))
            numbers = torch.arange(cuts[-1], dtype=torch.float64)
            own = slice(cuts[comm.group_rank], cuts[comm.group_rank + 1])
            out = torch.full((own.stop - own.start,), torch.nan, dtype=torch.float64)
            work = comm.reduce_scatter(numbers.clone(), cuts, out)
            flying.append((case, work, out, numbers[own] * comm.world_size))
        # Waited for in another order than they were launched, and in another on every rank.
        for case, work, found, expected in flying[:: -1 if comm.group_rank % 2 else 1]:
            work.wait()
            work.wait()
            assert same_bits(found, expected), case


@pytest.mark.parametrize("name", ["broadcasts", "lists"])
@on_ranks(2, 3)
def test_training_by_the_collectives_of_the_backend(name: str) -> None:
    for layout in ("sliced", "whole"):
        models = []
        for way in ("messages", name):
            torch.manual_seed(dist.get_rank())
            model = nn.Sequential(nn.Linear(96, 70), nn.ReLU(), nn.Linear(70, 30))
            with transport(way):
                opt = ZeroRedundancyOptimizer(
                    model.parameters(), torch.optim.AdamW, module=model, layout=layout, lr=0.01
                )
                for _ in range(5):
                    model(torch.randn(8, 96)).square().mean().backward()
                    opt.step()
                    opt.zero_grad()
                models.append([param.detach().clone() for param in model.parameters()])
        pairs = zip(*models, strict=True)
        assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in pairs), layout


def watch_messages() -> tuple[int, int, list[set[bool]]]:
    """Bytes really sent, bytes counted, and the directions of the messages in each group."""
    comm = connect(None).new_connection()
    upwards: dict[dist.ProcessGroup, set[bool]] = {}
    isend, sent = dist.isend, 0

    def watched(data: Tensor, *, group: dist.ProcessGroup, group_dst: int, tag: int) -> Any:
        nonlocal sent
        sent += data.nbytes
        upwards.setdefault(group, set()).add(group_dst > comm.group_rank)
        return isend(data, group=group, group_dst=group_dst, tag=tag)

    cuts = cuts_of("uneven", comm.world_size)
    out = torch.zeros(CUTS["uneven"][comm.group_rank])
    with mock.patch.object(dist, "isend", watched):
        comm.all_gather(torch.zeros(cuts[-1]), cuts).wait()
        comm.reduce_scatter(torch.zeros(cuts[-1]), cuts, out).wait()
    return sent, comm.ledger.nbytes_sent.total(), list(upwards.values())


def test_a_connection_carries_data_in_one_direction_and_as_much_as_is_counted() -> None:
    sent, counted, directions = zip(*run_ranks(watch_messages, 3), strict=True)
    assert sent == counted
    assert directions == ([{True}], [{True}, {False}], [{False}])
