"""Communication over real Gloo groups: right bytes, right counts, loud failures."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from problems import same_bits
from ranks import RankFailure, run_ranks
from torch import Tensor, nn

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import Comm, GroupComm, SoloComm, all_gather_json, collectives, connect, group
from shardstep.comm.broadcast import PACK_NBYTES, broadcast

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]

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


def cuts_of(case: str, world_size: int) -> Sequence[int]:
    if case == "even":
        return range(0, 64 * world_size + 1, 64)  # as an even bucket has them
    return list(accumulate(CUTS[case][:world_size], initial=0))


def random_bits(dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    """Random bytes, so that every one counts (NaNs among them)."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    size = (numel * dtype.itemsize,)
    return torch.randint(high, size, dtype=torch.uint8, generator=generator).view(dtype)


def make_buffer(
    comm: Comm, dtype: torch.dtype, cuts: Sequence[int], seed: int
) -> tuple[Tensor, Tensor]:
    """A buffer with only this rank's segment filled in, and what it is to become."""
    expected = torch.cat(
        [
            random_bits(dtype, stop - start, 10 * seed + rank)
            for rank, (start, stop) in enumerate(pairwise(cuts))
        ]
    )
    buffer = torch.zeros_like(expected)
    own = slice(cuts[comm.group_rank], cuts[comm.group_rank + 1])
    buffer[own] = expected[own]
    return buffer, expected


# -------------------------------------------- what every transport does, on the same segments


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


def many_at_once(name: str) -> None:
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


@pytest.mark.parametrize("name", ["messages", "two connections"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_operations_in_flight_do_not_take_each_other_s_bytes(
    name: str, world_size: int
) -> None:
    run_ranks(many_at_once, world_size, name)


def train_by(name: str) -> None:
    for layout in ("sliced", "whole"):
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(96, 70), nn.ReLU(), nn.Linear(70, 30))
        plain = copy.deepcopy(model)
        for param in plain.parameters():
            dist.broadcast(param.data, src=0)
        reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
        with transport(name):
            opt = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, module=model, layout=layout, lr=0.01
            )
            for step in range(5):
                torch.manual_seed(10 * step + dist.get_rank())
                x = torch.randn(8, 96)
                model(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
                plain(x).square().mean().backward()
                for param in plain.parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
                reference.step()
                reference.zero_grad()
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in pairs), layout


@pytest.mark.parametrize("name", ["broadcasts", "lists"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_by_the_collectives_of_the_backend(name: str, world_size: int) -> None:
    run_ranks(train_by, world_size, name)


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


def launch_and_leave() -> bool:
    """Rank 1 does not wait for what it has launched until the other has it."""
    comm = connect(None).new_connection()
    cuts = cuts_of("long, uneven", comm.world_size)
    buffer, expected = make_buffer(comm, torch.float32, cuts, 0)
    work = comm.all_gather(buffer, cuts)
    if comm.group_rank == 0:
        work.wait()
    dist.barrier()
    work.wait()
    return same_bits(buffer, expected)


def test_a_rank_that_has_no_use_for_a_gather_keeps_no_other_waiting() -> None:
    assert run_ranks(launch_and_leave, 2) == [True, True]


def test_one_rank_without_a_group_has_everything_already() -> None:
    comm = connect(None)
    assert isinstance(comm, SoloComm)
    assert (comm.group_rank, comm.world_size) == (0, 1)
    buffer = torch.arange(64.0)
    comm.all_gather(buffer, [0, 64]).wait()
    assert torch.equal(buffer, torch.arange(64.0))
    out = torch.empty(64)
    comm.reduce_scatter(buffer.bfloat16(), [0, 64], out).wait()
    assert torch.equal(out, buffer.bfloat16().float())
    assert comm.all_gather_bytes(b"mine") == [b"mine"]
    assert all_gather_json(comm, {"a": [1, None]}) == [{"a": [1, None]}]
    assert sum(comm.ledger.nbytes_sent.values()) == 0


# ------------------------------------------------------------ bytes, broadcast, send and receive


def copy_to_cpu(data: Tensor) -> Tensor:
    """A copy, as from an accelerator, in memory that is overwritten once it is freed."""
    memory = bytearray(data.nbytes)
    copied = torch.frombuffer(memory, dtype=data.dtype).copy_(data)
    weakref.finalize(copied, lambda: memory.__setitem__(slice(None), b"\xee" * len(memory)))
    return copied


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
    with mock.patch.object(torch.Tensor, "cpu", copy_to_cpu):
        for calls, payloads in enumerate(rounds, start=1):
            assert comm.all_gather_bytes(payloads[rank]) == payloads
            assert comm.ledger.calls["all_gather_bytes"] == calls
    assert all_gather_json(comm, {"rank": rank}) == [{"rank": r} for r in ranks]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_gather_bytes_returns_every_payload_in_rank_order(world_size: int) -> None:
    run_ranks(gather_bytes, world_size)


def broadcast_many(source: int) -> None:
    def tensors(seed: int) -> list[Tensor]:
        random = torch.Generator().manual_seed(seed)
        shapes = [(3, 5), (), (0, 4), (PACK_NBYTES // 8 + 1,), (PACK_NBYTES // 4, 2), (7, 3, 2, 2)]
        made = [torch.randn(shape, generator=random) for shape in shapes]
        made[-1] = made[-1].contiguous(memory_format=torch.channels_last)
        return [*made, torch.randn(9, 4, generator=random).t(), torch.full((5,), seed)]

    comm = connect(None)
    found, expected = tensors(comm.group_rank), tensors(source)
    broadcast(comm, iter(found), source)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    # Large ones alone, those that fit into a message together, each dtype by itself.
    assert comm.ledger.calls["all_gather"] == 4


@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_packs_tensors_of_any_form(source: int) -> None:
    run_ranks(broadcast_many, 2, source)


def pass_round() -> None:
    """Each rank to each other, in an order in which no ranks wait in a circle."""
    comm = connect(None)
    sent = 0
    for source, target in itertools.product(range(comm.world_size), repeat=2):
        data = random_bits(torch.uint8, 1000 + source, seed=10 * source + target)
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


# ------------------------------------------------------------------------------------- groups


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
    assert all_gather_json(comm, dist.get_rank()) == ranks
    for case in CUTS:
        cuts = cuts_of(case, 2)
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


def test_ranks_are_those_of_the_group_and_outsiders_are_refused() -> None:
    for rank, message in enumerate(run_ranks(talk_within_subgroups, 4)):
        assert f"global rank {rank} is not a member of the given process_group" in message
        assert "only on the ranks of that group" in message


def bind_new_groups() -> list[Any]:
    """The devices to which new groups are bound, for a rank that works on an accelerator."""
    device, asked = torch.device("cuda:3"), []
    comm = GroupComm(dist.group.WORLD, device)

    def new_group(*args: Any, device_id: torch.device | None = None, **options: Any) -> Any:
        asked.append(str(device_id))
        return dist.group.WORLD

    with mock.patch.object(group.dist, "new_group", new_group):
        comm.new_connection()  # two groups of Gloo, which has no device
        comm.new_connection("gloo")
        with mock.patch.object(group, "EXCHANGING", frozenset()):
            comm.new_connection()
            comm.new_connection("gloo")
            with mock.patch.object(dist.ProcessGroup, "bound_device_id", device):
                comm.new_connection()
            connect(None, [torch.zeros(1)]).new_connection()
    return asked


def test_new_groups_are_bound_to_the_device_of_the_parameters() -> None:
    expected = ["None", "None", "None", "cuda:3", "None", "None", "None"]
    assert run_ranks(bind_new_groups, 2) == [expected] * 2


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
