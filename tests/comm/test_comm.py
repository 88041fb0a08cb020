"""The door to collectives over real Gloo groups: right bytes, right counts, loud failures."""

from __future__ import annotations

import copy
import inspect
import json
import os
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks
from torch import nn

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import Comm, GroupComm, SoloComm, connect

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool]

MIB = 2**20

#: Lengths of the segments of ranks 0, 1, 2, ...; the first `world_size` of each are used.
CUTS = {
    "even": [64, 64, 64, 64],
    "one element each": [1, 1, 1, 1],
    "uneven": [128, 64, 192, 320],
    "first empty": [0, 64, 128, 64],
    "last empty": [64, 64, 64, 0],
    "more ranks than data": [0, 64, 0, 0],
    "nothing at all": [0, 0, 0, 0],
    "long, uneven": [3 * MIB // 2, 64, MIB, MIB + 1],
}


def cuts_of(lengths: Sequence[int], world_size: int) -> list[int]:
    return list(accumulate(lengths[:world_size], initial=0))


def segment(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Random bits, so that every byte counts (NaNs among them)."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    size = (numel * dtype.itemsize,)
    return torch.randint(high, size, dtype=torch.uint8, generator=generator).view(dtype)


def make_buffer(
    comm: Comm, dtype: torch.dtype, cuts: Sequence[int], seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer with only this rank's segment filled in, and what it is to become."""
    expected = torch.cat(
        [
            segment(dtype, stop - start, 10 * seed + rank)
            for rank, (start, stop) in enumerate(pairwise(cuts))
        ]
    )
    buffer = torch.zeros_like(expected)
    own = slice(cuts[comm.group_rank], cuts[comm.group_rank + 1])
    buffer[own] = expected[own]
    return buffer, expected


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# ----------------------------------------------------------------------------- all_gather


def gather_one_by_one(again: bool) -> None:
    comm = connect(None).new_connection() if again else connect(None)
    for seed, (case, lengths) in enumerate(CUTS.items()):
        for dtype in DTYPES:
            cuts = cuts_of(lengths, comm.world_size)
            buffer, expected = make_buffer(comm, dtype, cuts, seed)
            before = comm.ledger.calls["all_gather"], comm.ledger.nbytes_sent["all_gather"]
            comm.all_gather(buffer, cuts).wait()
            assert same_bits(buffer, expected), (case, dtype)
            own = lengths[comm.group_rank] * dtype.itemsize
            calls, nbytes = before[0] + 1, before[1] + own * (comm.world_size - 1)
            assert comm.ledger.calls == {"all_gather": calls}, (case, dtype)
            assert comm.ledger.nbytes_sent == {"all_gather": nbytes}, (case, dtype)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_gather_fills_in_every_segment_and_counts_what_it_sent(
    world_size: int, again: bool
) -> None:
    run_ranks(gather_one_by_one, world_size, again)


def gather_many_at_once(again: bool) -> None:
    comm = connect(None).new_connection() if again else connect(None)
    flying = []
    for seed in range(20):
        for case, lengths in CUTS.items():
            dtype = DTYPES[seed % len(DTYPES)]
            if lengths[0] > MIB and seed > 2:
                continue
            cuts = cuts_of(lengths, comm.world_size)
            buffer, expected = make_buffer(comm, dtype, cuts, seed)
            flying.append((case, buffer, expected, comm.all_gather(buffer, cuts)))
    # Waited for in another order than they were launched, and in another on every rank.
    for case, buffer, expected, pending in flying[:: -1 if comm.group_rank % 2 else 1]:
        pending.wait()
        assert same_bits(buffer, expected), case


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_gathers_in_flight_do_not_take_each_other_s_bytes(
    world_size: int, again: bool
) -> None:
    run_ranks(gather_many_at_once, world_size, again)


def directions_of_each_group() -> list[set[bool]]:
    """For each group that exchanges were sent in, whether they went to higher ranks."""
    comm = connect(None).new_connection()
    upwards: dict[dist.ProcessGroup, set[bool]] = {}
    isend = dist.isend

    def watched(data: torch.Tensor, *, group: dist.ProcessGroup, group_dst: int, tag: int) -> Any:
        upwards.setdefault(group, set()).add(group_dst > comm.group_rank)
        return isend(data, group=group, group_dst=group_dst, tag=tag)

    cuts = range(0, 64 * comm.world_size + 1, 64)
    with mock.patch.object(dist, "isend", watched):
        comm.all_gather(torch.zeros(cuts[-1]), cuts).wait()
        comm.reduce_scatter(torch.zeros(cuts[-1]), cuts, torch.zeros(64)).wait()
    return list(upwards.values())


def test_a_connection_carries_data_in_one_direction() -> None:
    assert run_ranks(directions_of_each_group, 3) == [
        [{True}],
        [{True}, {False}],
        [{False}],
    ]


def gather_with_range_cuts() -> None:
    comm = connect(None)
    cuts = range(0, 64 * comm.world_size + 1, 64)  # as an even bucket has them
    buffer, expected = make_buffer(comm, torch.float32, cuts, 0)
    comm.all_gather(buffer, cuts).wait()
    assert same_bits(buffer, expected)


def test_the_cuts_may_be_a_range() -> None:
    run_ranks(gather_with_range_cuts, 2)


def test_one_rank_without_a_group_has_everything_already() -> None:
    comm = connect(None)
    assert isinstance(comm, SoloComm)
    assert (comm.group_rank, comm.world_size) == (0, 1)
    buffer = torch.arange(64.0)
    comm.all_gather(buffer, [0, 64]).wait()
    assert torch.equal(buffer, torch.arange(64.0))
    assert comm.all_gather_bytes(b"mine") == [b"mine"]
    assert sum(comm.ledger.nbytes_sent.values()) == 0


# ---------------------------------------------------------------- bytes, send and receive


def gather_bytes() -> None:
    comm = connect(None)
    rank, ranks = comm.group_rank, range(comm.world_size)
    rounds = [
        [bytes([r]) * (r + 1) for r in ranks],
        [b"" for _ in ranks],
        [b"" if r == 0 else b"\x00\xff" for r in ranks],
        [b"x" * 100_000 if r == 0 else b"" for r in ranks],
        [bytes(range(256)) for _ in ranks],
    ]
    for calls, payloads in enumerate(rounds, start=1):
        assert comm.all_gather_bytes(payloads[rank]) == payloads
        assert comm.ledger.calls["all_gather_bytes"] == calls


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_gather_bytes_returns_every_payload_in_rank_order(world_size: int) -> None:
    run_ranks(gather_bytes, world_size)


def pass_round() -> None:
    """Each rank to each other, in an order in which nobody waits in a circle."""
    comm = connect(None)
    sent = 0
    for source in range(comm.world_size):
        for target in range(comm.world_size):
            data = segment(torch.uint8, 1000 + source, seed=10 * source + target)
            if comm.group_rank == source != target:
                comm.send(data, target)
                sent += 1000 + source
            elif comm.group_rank == target != source:
                room = torch.zeros(1000 + source, dtype=torch.uint8)
                comm.receive(room, source)
                assert torch.equal(room, data)
    assert comm.ledger.calls["send"] == comm.world_size - 1
    assert comm.ledger.nbytes_sent["send"] == sent


def test_what_one_rank_sends_the_other_receives() -> None:
    run_ranks(pass_round, 3)


# ------------------------------------------------------------------------------- subgroups


def talk_within_subgroups() -> str:
    """Ranks 3 and 1 form a group, in that order if torch can: rank 3 is its rank 0."""
    members = [3, 1]
    rest = [0, 2]
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        members = [1, 3]  # before torch 2.12 a group's ranks are in ascending order
    pair = dist.new_group(members, **({"sort_ranks": False} if members[0] == 3 else {}))
    others = dist.new_group(rest)
    mine, ranks = (pair, members) if dist.get_rank() in members else (others, rest)
    comm = connect(mine)
    assert isinstance(comm, GroupComm)
    assert comm.world_size == 2
    assert ranks[comm.group_rank] == dist.get_rank()
    assert comm.all_gather_bytes(str(dist.get_rank()).encode()) == [
        str(rank).encode() for rank in ranks
    ]
    for lengths in CUTS.values():
        cuts = cuts_of(lengths, 2)
        buffer, expected = make_buffer(comm, torch.float32, cuts, seed=ranks[0])
        comm.all_gather(buffer, cuts).wait()
        assert same_bits(buffer, expected)
    data = torch.full((10,), dist.get_rank(), dtype=torch.uint8)
    if comm.group_rank == 0:
        comm.send(data, 1)
    else:
        comm.receive(data, 0)
        assert data.tolist() == [ranks[0]] * 10
    # A rank that was left out of a group holds no group to talk in.
    try:
        connect(others if mine is pair else pair)
    except ValueError as error:
        return str(error)
    return "no error"


def steps_between_own_messages() -> tuple[list[float], list[float]]:
    """Rank 1 is ready for a message that rank 0 sends only after a step and a consolidation."""
    params = [nn.Parameter(torch.zeros(1000)) for _ in range(3)]
    opt = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0, momentum=0.9)
    received = []
    for tag in range(4):
        # As long as what is gathered: a message of another length makes Gloo end the process.
        message = torch.full((1536,), float(tag))
        work = None
        if dist.get_rank() == 1:
            message.fill_(-1)
            work = dist.irecv(message, src=0, tag=tag)
        for param in params:
            param.grad = torch.ones_like(param)
        opt.step()
        opt.consolidate_state_dict(to=1)
        if work is None:
            dist.send(message, dst=1, tag=tag)
        else:
            work.wait()
        received += message.unique().tolist()
    return received, torch.cat([param.detach() for param in params]).unique().tolist()


def test_messages_of_the_user_s_own_are_not_taken_for_ours() -> None:
    first, second = run_ranks(steps_between_own_messages, 2)
    assert first[0] == second[0] == [0.0, 1.0, 2.0, 3.0]
    assert first[1] == second[1]
    assert len(first[1]) == 1


def test_ranks_are_those_of_the_group_and_outsiders_are_refused() -> None:
    for rank, message in enumerate(run_ranks(talk_within_subgroups, 4)):
        assert f"global rank {rank} is not a member of the given process_group" in message
        assert "only on the ranks of that group" in message


# --------------------------------------------------------------------------------- failures

#: Seconds for all ranks; a collective gives up after half of it, within the grace of `run_ranks`.
TIMEOUT = 8.0


def outlive(operation: str, how: str, folder: str) -> None:
    """Rank 1 dies, before or within the operation; the others write down what they saw."""
    comm = connect(None)
    # So much that it hardly can have left by the time the rank is gone.
    cuts = [0, 1 << 25, 1 << 26, 3 << 25]
    buffer = torch.zeros(3 << 25, dtype=torch.uint8)
    buffer[cuts[comm.group_rank] : cuts[comm.group_rank + 1]] = comm.group_rank + 1
    comm.all_gather_bytes(b"everybody is here")
    comm.all_gather(buffer[:192], [0, 64, 128, 192]).wait()
    if comm.group_rank == 1:
        if how == "in flight" and operation == "all_gather":
            comm.all_gather(buffer, cuts)
        os._exit(3)
    if how == "gone already":
        time.sleep(0.3)
    start = time.monotonic()
    try:
        if operation == "all_gather":
            comm.all_gather(buffer, cuts).wait()
        elif operation == "all_gather_bytes":
            comm.all_gather_bytes(b"is anybody there?")
        elif operation == "send":
            for _ in range(1000):  # what fits in the socket's buffer is not known to be lost
                comm.send(buffer[: 1 << 22], 1)
        else:
            comm.receive(buffer[: 1 << 22], 1)
    except Exception as error:
        path = Path(folder) / str(comm.group_rank)
        seen = type(error).__name__, str(error), time.monotonic() - start
        path.with_suffix(".part").write_text(json.dumps(seen))
        path.with_suffix(".part").rename(path)
        raise  # a rank that catches this and stays would keep the third waiting for its part
    assert buffer.view(3, -1).eq(torch.tensor([[1], [2], [3]])).all()
    (Path(folder) / str(comm.group_rank)).write_text(json.dumps(None))


@pytest.mark.parametrize("how", ["gone already", "in flight"])
@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("all_gather", "gathering parameters"),
        ("all_gather_bytes", "shardstep"),
        ("send", "shardstep"),
        ("receive", "shardstep"),
    ],
)
def test_a_rank_that_dies_makes_the_others_raise_and_name_the_operation(
    operation: str, name: str, how: str, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure, match="rank 1 died with exit code 3"):
        run_ranks(outlive, 3, operation, how, str(tmp_path), timeout=TIMEOUT)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "2"}, "a rank hung or was misled"
    for rank in (0, 2):
        seen = json.loads((tmp_path / str(rank)).read_text())
        if seen is None and (operation, how) == ("all_gather", "in flight"):
            continue  # all had arrived before the rank was gone, as was checked there
        kind, message, seconds = seen
        assert kind == "RuntimeError", message
        assert name in message
        assert seconds < TIMEOUT / 2 + 1


def _by_collectives() -> list[str]:
    """The way that NCCL takes, over Gloo: the backend's own collectives, even and uneven."""
    failures = []
    comm = connect(None)
    assert isinstance(comm, GroupComm)
    rank, size = comm.group_rank, comm.world_size
    with mock.patch.object(GroupComm, "_exchanges", return_value=False):
        for lengths in ([128] * size, [64 * number for number in range(size)]):
            cuts = [0, *accumulate(lengths)]
            own = slice(cuts[rank], cuts[rank + 1])
            expected = torch.arange(cuts[-1], dtype=torch.float32)
            buffer = torch.zeros(cuts[-1])
            buffer[own] = expected[own]
            comm.all_gather(buffer, cuts).wait()
            if not torch.equal(buffer, expected):
                failures.append(f"all_gather of {lengths}")
            out = torch.full((lengths[rank],), float("nan"))
            comm.reduce_scatter(expected * (rank + 1), cuts, out).wait()
            if not torch.equal(out, expected[own] * (size * (size + 1) // 2)):
                failures.append(f"reduce_scatter of {lengths}")
        for layout in ("sliced", "whole"):
            torch.manual_seed(rank)
            model = nn.Sequential(nn.Linear(96, 70), nn.ReLU(), nn.Linear(70, 30))
            plain = copy.deepcopy(model)
            for param in plain.parameters():
                dist.broadcast(param.data, src=0)
            opt = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, module=model, layout=layout, lr=0.01
            )
            reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
            for step in range(5):
                torch.manual_seed(10 * step + rank)
                x = torch.randn(8, 96)
                for each, optimizer in ((model, opt), (plain, reference)):
                    each(x).square().mean().backward()
                    if each is plain:
                        for param in plain.parameters():
                            dist.all_reduce(param.grad)
                            param.grad /= size
                    optimizer.step()
                    optimizer.zero_grad()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                if not torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
                    failures.append(f"training with layout {layout}")
    return failures


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_backends_own_collectives_give_the_same_results(world_size: int) -> None:
    assert run_ranks(_by_collectives, world_size) == [[]] * world_size
