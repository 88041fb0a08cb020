"""The only door to collectives: how bytes travel on each backend, and how many did.

Everything above talks to a `Comm`. It moves raw bytes, so that every dtype travels alike, and it
counts what it sends. There are two: `SoloComm` for one rank, and `GroupComm` over a process group.

A `GroupComm` has one of two ways for each kind of device:

- the collective way (NCCL and its like): the backend's own all-gather and reduce-scatter;
- the exchange way (Gloo): every rank sends segments straight to the ranks that want them, all in
  flight. Gloo's own reduce-scatter sends as much as an all-reduce; here each rank adds up the
  contributions to its segment itself, in rank order, so that the sum is the same from run to run.

A buffer whose device the backend cannot reach is staged through one that it can.

Note [A connection for each direction]

Two ranks that exchange segments in one Gloo group share one socket for both directions. That costs
twice. Gloo sends a message only when the receiver has said that it is ready, and says so on the
same socket: behind the data that is already queued there, so that the other direction stands still
until those have left. And the thread that calls `isend` writes under the connection's lock, while
Gloo's own thread, which has data to read from the same connection, tries the lock again and again
until it is free: where ranks have a core each, that core's time is lost to computing. So a
communication made by `again` has two groups: messages to higher ranks travel in one, messages to
lower ranks in the other, and each socket carries data one way and only such notices the other way.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

# torch 2.13 renames these and warns about the old names; 2.11 knows only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until its result may be used (on an accelerator: by the current stream).

        May be called again, and returns at once then.
        """


@dataclass(slots=True)
class Ledger:
    """What went through the door: calls and bytes sent by this rank, by operation."""

    calls: Counter[str] = field(default_factory=Counter)
    nbytes_sent: Counter[str] = field(default_factory=Counter)

    def note(self, operation: str, nbytes: int) -> None:
        """Add one call of `operation` that sends `nbytes`."""
        self.calls[operation] += 1
        self.nbytes_sent[operation] += nbytes


class Comm(Protocol):
    """What the rest of the library asks of communication.

    Every method is called on every rank of the group, in the same order, except `send` and
    `receive`, which are called on the two ranks concerned.

    Attributes:
        group_rank: this rank within the group.
        world_size: number of ranks in the group.
        ledger: what this rank has sent so far.
    """

    group_rank: int
    world_size: int
    ledger: Ledger

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, if there is one."""

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Pending:
        """Fill flat `buffer` with every rank's segment; this rank's is there already.

        Called on every rank. `cuts` are the `world_size + 1` bounds of the segments.
        """

    def reduce_scatter(
        self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor
    ) -> Pending:
        """Put the sum over all ranks of this rank's segment of flat `buffer` into `out`.

        Called on every rank. `buffer` is left in an unspecified state. What travels has its dtype;
        if `out` has a wider one, the exchange way adds up in that, and the collective way in the
        dtype that travels.
        """

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's `payload`, in rank order. Called on every rank; payloads may differ."""

    def send(self, data: torch.Tensor, target: int) -> None:
        """Send flat bytes to group rank `target`, which calls `receive`."""

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Receive flat bytes from group rank `source`, which calls `send`."""

    def again(self, backend: str | None = None) -> Comm:
        """The same ranks on other connections, whose traffic does not queue behind this one's.

        Called on every rank. `backend` is another than this one's, if given.
        """


class _Done:
    """A collective that had nothing to do."""

    def wait(self) -> None:
        """Return at once."""


class SoloComm:
    """One rank, which has everything already.

    Args:
        group: the process group of one that it stands for, if there is one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.group_rank = 0
        self.world_size = 1
        self.ledger = Ledger()

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Pending:
        """Nothing to fetch."""
        self.ledger.note("all_gather", 0)
        return _Done()

    def reduce_scatter(
        self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor
    ) -> Pending:
        """The sum over one rank is what it has."""
        self.ledger.note("reduce_scatter", 0)
        if out is not buffer:
            out.copy_(buffer)
        return _Done()

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Its own payload."""
        self.ledger.note("all_gather_bytes", 0)
        return [payload]

    def send(self, data: torch.Tensor, target: int) -> None:
        """There is nobody to send to."""
        raise AssertionError("a single rank sends nothing")

    def receive(self, data: torch.Tensor, source: int) -> None:
        """There is nobody to receive from."""
        raise AssertionError("a single rank receives nothing")

    def again(self, backend: str | None = None) -> SoloComm:
        """Another single rank."""
        return SoloComm(self.group)


@contextmanager
def _naming(operation: str) -> Iterator[None]:
    """Have what the backend raises say what it was that failed."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"shardstep: {operation} failed: {error}") from error


class _Works:
    """Several backend works that make up one operation."""

    def __init__(self, operation: str, works: Sequence[Any]) -> None:
        self._operation = operation
        self._works = works
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Wait for each, naming the operation when the backend gives up."""
        if self._error is not None:
            # What failed, or was interrupted, has not arrived the second time it is asked for.
            raise RuntimeError(f"shardstep: {self._operation} failed before") from self._error
        # Gloo waits in vain for a message that was waited for before.
        works, self._works = self._works, ()
        try:
            with _naming(self._operation):
                for work in works:
                    work.wait()
        except BaseException as error:
            self._error = error
            raise


class _Then:
    """An operation with something left to do once it has arrived."""

    def __init__(self, pending: Pending, finish: Callable[[], object]) -> None:
        self._pending = pending
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        """Wait, then do the rest, once."""
        self._pending.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None


class GroupComm:
    """Communication within a process group.

    Args:
        group: the process group; this rank has to be a member of it.
        device: the accelerator to stage through, where that is needed; the current one if None.
        downwards: a group of the same ranks for messages to lower ranks; `group` itself if None.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | None = None,
        downwards: dist.ProcessGroup | None = None,
    ) -> None:
        self._device = device
        self.group: dist.ProcessGroup = group
        self._downwards = group if downwards is None else downwards
        self.group_rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ledger = Ledger()
        self._tag = 0

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Pending:
        """Fill `buffer` with every rank's segment. Called on every rank."""
        wire_device = self._wire_device(buffer.device)
        wire = buffer
        if wire_device != buffer.device:
            wire = torch.empty_like(buffer, device=wire_device)
            own = slice(cuts[self.group_rank], cuts[self.group_rank + 1])
            wire[own].copy_(buffer[own])
        with _naming(f"rank {self.group_rank}: gathering parameters"):
            pending = self._gather_on_wire(_as_bytes(wire), [c * buffer.itemsize for c in cuts])
        return pending if wire is buffer else _Then(pending, lambda: buffer.copy_(wire))

    def _gather_on_wire(self, wire: torch.Tensor, cuts: Sequence[int]) -> Pending:
        segments = [wire[start:stop] for start, stop in pairwise(cuts)]
        own = segments[self.group_rank]
        self.ledger.note("all_gather", own.numel() * (self.world_size - 1))
        name = f"rank {self.group_rank}: gathering parameters"
        if self._exchanges(wire.device):
            return _Works(name, self._exchange([own] * self.world_size, segments))
        if len({segment.numel() for segment in segments}) == 1:
            return _Works(name, [_all_gather_single(wire, own, group=self.group, async_op=True)])
        # Segments of different lengths: the owner of each broadcasts it, in rank order everywhere.
        return _Works(
            name,
            [
                dist.broadcast(segment, group=self.group, group_src=source, async_op=True)
                for source, segment in enumerate(segments)
                if segment.numel()
            ],
        )

    def reduce_scatter(
        self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor
    ) -> Pending:
        """Sum this rank's segment of `buffer` over all ranks. Called on every rank."""
        device = self._wire_device(buffer.device)
        if device != buffer.device:
            arrived = torch.empty_like(out, device=device)
            with _naming(f"rank {self.group_rank}: reducing gradients"):
                pending = self._reduce_on_wire(buffer.to(device), cuts, arrived)
            return _Then(pending, lambda: out.copy_(arrived))
        with _naming(f"rank {self.group_rank}: reducing gradients"):
            return self._reduce_on_wire(buffer, cuts, out)

    def _reduce_on_wire(
        self, wire: torch.Tensor, cuts: Sequence[int], out: torch.Tensor
    ) -> Pending:
        segments = [wire[start:stop] for start, stop in pairwise(cuts)]
        own = segments[self.group_rank]
        self.ledger.note("reduce_scatter", (wire.numel() - own.numel()) * wire.itemsize)
        name = f"rank {self.group_rank}: reducing gradients"
        if self._exchanges(wire.device):
            parts = [
                own if source == self.group_rank else torch.empty_like(own)
                for source in range(self.world_size)
            ]
            works = self._exchange(
                [_as_bytes(segment) for segment in segments], [_as_bytes(part) for part in parts]
            )
            return _Then(_Works(name, works), lambda: _add_up(parts, out))
        if len({segment.numel() for segment in segments}) == 1:
            summed = out if out.dtype == wire.dtype else torch.empty_like(own)
            work = _reduce_scatter_single(summed, wire, group=self.group, async_op=True)
            pending = _Works(name, [work])
            return pending if summed is out else _Then(pending, lambda: out.copy_(summed))
        # Segments of different lengths: each is reduced to its owner, in rank order everywhere.
        works = [
            dist.reduce(segment, group=self.group, group_dst=target, async_op=True)
            for target, segment in enumerate(segments)
            if segment.numel()
        ]
        return _Then(_Works(name, works), lambda: out.copy_(own))

    def _exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
    ) -> list[Any]:
        """Send `outgoing[r]` to rank r and receive `incoming[r]` from it, all in flight at once."""
        rank, size = self.group_rank, self.world_size
        # Each rank starts with another peer, so that nobody is everybody's first.
        sources = [(rank - distance) % size for distance in range(1, size)]
        targets = [(rank + distance) % size for distance in range(1, size)]
        works: list[Any] = [
            dist.irecv(incoming[peer], group=self._way(peer, rank), group_src=peer, tag=self._tag)
            for peer in sources
            if incoming[peer].numel()
        ]
        works += [
            dist.isend(outgoing[peer], group=self._way(rank, peer), group_dst=peer, tag=self._tag)
            for peer in targets
            if outgoing[peer].numel()
        ]
        self._tag = (self._tag + 1) % (1 << 30)
        return works

    def _way(self, source: int, target: int) -> dist.ProcessGroup:
        """See Note [A connection for each direction]."""
        return self.group if source < target else self._downwards

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's `payload`. Called on every rank."""
        with _naming(f"rank {self.group_rank}: comparing notes with the other ranks"):
            return self._gather_bytes(payload)

    def _gather_bytes(self, payload: bytes) -> list[bytes]:
        device = self._meeting_device()
        length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        lengths = [torch.empty_like(length) for _ in range(self.world_size)]
        dist.all_gather(lengths, length, group=self.group)
        counts = [int(count.item()) for count in lengths]
        own = torch.zeros(max(1, *counts), dtype=torch.uint8, device=device)
        if payload:
            own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
        everyone = [torch.empty_like(own) for _ in counts]
        dist.all_gather(everyone, own, group=self.group)
        self.ledger.note("all_gather_bytes", (own.numel() + 8) * (self.world_size - 1))
        return [
            ctypes.string_at(data.cpu().data_ptr(), count)
            for data, count in zip(everyone, counts, strict=True)
        ]

    def send(self, data: torch.Tensor, target: int) -> None:
        """Send flat bytes to group rank `target`."""
        wire = data.to(self._meeting_device())
        self.ledger.note("send", wire.numel())
        with _naming(f"rank {self.group_rank}: sending to rank {target}"):
            dist.send(wire, group=self.group, group_dst=target)

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Receive flat bytes from group rank `source`."""
        device = self._meeting_device()
        wire = data if data.device == device else torch.empty_like(data, device=device)
        with _naming(f"rank {self.group_rank}: receiving from rank {source}"):
            dist.recv(wire, group=self.group, group_src=source)
        if wire is not data:
            data.copy_(wire)

    def _meeting_device(self) -> torch.device:
        """Where two ranks meet whatever device each has its data on.

        A group may have one backend for the CPU and another for the accelerator: if each side chose
        by its own tensor, one could send on the first and the other wait on the second.
        """
        return self._wire_device(torch.device("cpu"))

    def _exchanges(self, device: torch.device) -> bool:
        return self._backend(device) == "gloo"

    def _backend(self, device: torch.device) -> str | None:
        """The name of the backend that serves `device` in this group, if there is one."""
        try:
            return str(self.group._get_backend(device).name()).lower()
        except RuntimeError:
            return None

    def _wire_device(self, device: torch.device) -> torch.device:
        """Where a tensor of `device` has to be for this group to move it."""
        backend = self._backend(device)
        if backend == "gloo":
            return torch.device("cpu")
        if backend is not None:
            return device
        if self._device is not None:
            return self._device
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise RuntimeError(f"the process group has no backend for tensors on {device}")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    def again(self, backend: str | None = None) -> GroupComm:
        """The same ranks, on connections of their own, so that the two do not queue for each other.

        Called on every rank of the group, and on no other.
        """
        options: dict[str, Any] = {"timeout": self._timeout()}
        ranks = None
        if self.group is not dist.group.WORLD:
            self._check_names()
            ranks = dist.get_process_group_ranks(self.group)
            # Ranks outside of the group are not here to make another with.
            options["use_local_synchronization"] = True
            if ranks != sorted(ranks):
                options["sort_ranks"] = False  # the order is the group's own; torch 2.12 and later
        own = dist.get_backend_config(self.group)
        group = dist.new_group(ranks, backend=backend or own, **options)
        downwards = None
        exchanges = self._exchanges(self._wire_device(self._device or torch.device("cpu")))
        if exchanges and backend is None:
            downwards = dist.new_group(ranks, backend="gloo", **options)
        comm = GroupComm(group, self._device, downwards)
        assert comm.group_rank == self.group_rank
        return comm

    def _check_names(self) -> None:
        """Make sure that a new group of these ranks gets the same name on all of them.

        torch numbers such a group by how many groups the rank belongs to; ranks that count
        differently would wait for each other under different names.

        Raises:
            RuntimeError: on every rank, if they count differently.
        """
        own = len(dist.distributed_c10d._world.pg_names)
        counts = [int(text) for text in self.all_gather_bytes(str(own).encode())]
        if len(set(counts)) > 1:
            raise RuntimeError(
                "the ranks of the given process_group belong to different numbers of process "
                f"groups ({counts}), and torch cannot make another group of them; construct the "
                "optimizer before the groups that only some of these ranks are in"
            )

    def _timeout(self) -> timedelta | None:
        backend = self.group._get_backend(self._meeting_device())
        options = getattr(backend, "options", None)
        return getattr(options, "_timeout", None)


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def _add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The sum of `parts`, added in their order and in the wider of the two dtypes."""
    if out.dtype == parts[0].dtype:
        torch.add(parts[0], parts[1], out=out)
        rest, total = parts[2:], out
    else:
        total = out.copy_(parts[0]) if out.itemsize > parts[0].itemsize else parts[0]
        rest = parts[1:]
    for part in rest:
        total.add_(part)
    if total is not out:
        out.copy_(total)


def connect(process_group: dist.ProcessGroup | None, near: Sequence[torch.Tensor] = ()) -> Comm:
    """The communication for `process_group`, the default group, or no group at all.

    Args:
        process_group: the process group; None for the default group, if there is one.
        near: tensors on whose device this rank works. A rank that was never told its current
            device has the same one as all others.
    """
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return SoloComm()
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        # What `new_group` returns on ranks that it leaves out.
        raise ValueError(
            f"global rank {dist.get_rank()} is not a member of the given process_group; "
            "construct the optimizer only on the ranks of that group"
        )
    if dist.get_world_size(process_group) == 1:
        return SoloComm(process_group)
    devices = (tensor.device for tensor in near if tensor.device.type != "cpu")
    return GroupComm(process_group, next(devices, None))
