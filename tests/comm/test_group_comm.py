"""Communication within a group: bytes, messages, broadcasts, subgroups, and loud failures."""

from __future__ import annotations

import ctypes
import gc
import inspect
import itertools
import json
import os
import signal
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import from_rank
from on_ranks import on_ranks
from problems import same_bits
from ranks import RankFailure, run_ranks
from segments import CUTS, cuts_of, make_buffer, random_bits
from torch import Tensor, nn

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import GroupComm, Operation, SoloComm, all_gather_json, connect, group
from shardstep.comm.api import PACK_NBYTES, Launched, _packs, broadcast, naming


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


@on_ranks(1, 2, 3)
def test_all_gather_bytes_returns_every_payload_in_rank_order() -> None:
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


@pytest.mark.parametrize("source", [0, 1])
@on_ranks(2)
def test_broadcast_packs_tensors_of_any_form(source: int) -> None:
    def tensors(seed: int) -> list[Tensor]:
        random = torch.Generator().manual_seed(seed)
        shapes = [(3, 5), (), (0, 4), (PACK_NBYTES // 8 + 1,), (PACK_NBYTES // 4, 2), (7, 3, 2, 2)]
        made = [torch.randn(shape, generator=random) for shape in shapes]
        made[-1] = made[-1].contiguous(memory_format=torch.channels_last)
        return [*made, torch.randn(9, 4, generator=random).t(), torch.full((5,), seed)]

    comm = connect(None)
    found, expected = tensors(comm.group_rank), tensors(source)
    broadcast(comm, iter(found), source, Operation.START)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    # Large ones alone, those that fit into a message together, each dtype by itself.
    assert comm.ledger.calls["all_gather"] == 4


def test_packing_measures_each_tensor_once() -> None:
    """A model may have hundreds of buffers, which travel after every step."""
    measured = 0

    class Measured(Tensor):
        @property
        def nbytes(self) -> int:  # type: ignore[override]
            nonlocal measured
            measured += 1
            return PACK_NBYTES // 10

    tensors = [torch.zeros(1).as_subclass(Measured) for _ in range(25)]
    assert [len(pack) for pack in _packs(tensors)] == [10, 10, 5]
    assert measured == 25


@on_ranks(3)
def test_what_one_rank_sends_the_other_receives() -> None:
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


# ------------------------------------------------------------------------------------- groups


@on_ranks(4)
def test_ranks_are_those_of_the_group_and_outsiders_are_refused() -> None:
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
    match = f"global rank {dist.get_rank()} is not a member of the given .* ranks of that group"
    with pytest.raises(ValueError, match=match):
        connect(others if mine is pair else pair)


@on_ranks(2)
def test_a_bucket_is_smaller_where_messages_are_cheap() -> None:
    assert connect(None).min_bucket_bytes == 2**20
    with mock.patch.object(group, "EXCHANGING", frozenset()):
        assert connect(None).min_bucket_bytes == 8 * 2**20


@on_ranks(2)
def test_new_groups_are_bound_to_the_device_of_the_parameters() -> None:
    """The devices to which new groups are bound, for a rank that works on an accelerator."""
    device, asked = torch.device("cuda:3"), []
    comm = GroupComm(dist.group.WORLD, [device])

    def new_group(*args: Any, device_id: torch.device | None = None, **options: Any) -> Any:
        asked.append(str(device_id))
        return dist.group.WORLD

    with mock.patch.object(group.dist, "new_group", new_group):
        made = [comm.new_connection(), comm.new_connection("gloo")]  # two groups of Gloo, and one
        with mock.patch.object(group, "EXCHANGING", frozenset()):
            made += [comm.new_connection(), comm.new_connection("gloo")]
            with mock.patch.object(dist.ProcessGroup, "bound_device_id", device):
                made += [comm.new_connection()]
            made += [connect(None, [torch.zeros(1)]).new_connection()]
            two = [device, torch.device("cuda:4")]
            made += [GroupComm(dist.group.WORLD, two).new_connection()]
    assert all(each.group is dist.group.WORLD for each in made)  # kept, so that it stays open
    assert asked == ["None", "None", "None", "cuda:3", "None", "None", "None", "None"]


@on_ranks(2)
def test_messages_of_the_user_s_own_are_not_taken_for_ours() -> None:
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
    assert received == [0.0, 1.0, 2.0, 3.0]
    values = torch.cat([param.detach() for param in params]).unique().tolist()
    assert len(values) == 1
    assert values == from_rank(0, values)


# --------------------------------------------------------------------------------- failures

#: Seconds for all ranks; a collective gives up earlier, within the grace of `run_ranks`.
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


def test_a_lack_of_memory_keeps_its_class_and_names_the_operation() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, naming("gathering parameters"):
        raise torch.OutOfMemoryError("out of memory")
    assert caught.value.__notes__ == ["shardstep: gathering parameters failed"]


@on_ranks(2)
def test_connections_of_optimizers_that_are_gone_are_closed() -> None:
    seen = []
    for _ in range(6):
        model = nn.Linear(4, 4)
        opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, module=model, lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
        del model, opt
        gc.collect()
        seen.append(len(os.listdir("/proc/self/fd")))
    assert max(seen[3:]) <= seen[2], seen


@on_ranks(2)
def test_a_subgroup_is_not_split_off_a_bound_default_group() -> None:
    """The ranks outside of the subgroup would have to take part."""
    world: Any = dist.group.WORLD
    comm = connect(dist.new_group([0, 1]))
    world.bound_device_id = torch.device("cuda", 0)
    new_group, seen = dist.new_group, []

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(world.bound_device_id)
        return new_group(*args, **options)

    with mock.patch.object(dist, "new_group", noted):
        comm.new_connection()
    assert [*seen, str(world.bound_device_id)] == [None, None, "cuda:0"]


def test_a_signal_handler_that_waits_for_a_message_finds_all_of_its_operation() -> None:
    """Python calls the handler after the first of two messages, which are waited for in C."""
    arrived: list[int] = []
    found: list[int] = []
    # Python's own functions would call the handler themselves, before they return.
    kill = ctypes.CDLL(None).kill
    interrupt = SimpleNamespace(wait=partial(kill, os.getpid(), int(signal.SIGUSR1)))
    launched = Launched(
        "an operation", [interrupt, SimpleNamespace(wait=partial(arrived.append, 1))]
    )

    def read(*args: Any) -> None:
        launched.wait()
        found.extend(arrived)

    before = signal.signal(signal.SIGUSR1, read)
    try:
        launched.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == arrived == [1]


@on_ranks(2, fresh=True)
def test_a_group_that_the_user_has_destroyed_is_not_kept() -> None:
    comm = connect(None)
    made = comm.new_connection()
    kept = weakref.ref(made.group)
    del made
    gc.collect()
    dist.destroy_process_group()
    gc.collect()
    assert kept() is None
