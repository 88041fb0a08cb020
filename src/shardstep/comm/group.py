"""Communication within a process group.

Segments travel as messages over Gloo (`gloo.py`), by collectives over other backends
(`collectives.py`). A buffer on a device that the backend cannot reach is staged through another.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from shardstep.comm.api import (
    NOTHING_TO_DO,
    Comm,
    Launched,
    Ledger,
    Operation,
    SoloComm,
    Work,
    all_gather_json,
    naming,
)
from shardstep.comm.at_exit import noting_connections, sleep_at_exit
from shardstep.comm.collectives import Collectives, backend_name, backend_of
from shardstep.comm.gloo import TAGS, Exchange
from shardstep.comm.headers import Header, Headers
from shardstep.plan.plan import MIN_BUCKET_BYTES

DIRECT = TAGS.start - 1
"""The tag of `send` and `receive`: neither a user's tag nor an exchange's."""

EXCHANGING = frozenset({"gloo"})
"""Backends over which segments travel as messages between ranks."""

CPU = torch.device("cpu")

_unused: dict[str, list[weakref.ref[dist.ProcessGroup]]] = {}
"""Connections by name whose `GroupComm` is gone on this rank. Torch keeps them until destroyed."""


class GroupComm(Comm):
    """Communication within a process group, for a rank that works on these accelerators.

    `downwards` is a group of the same ranks for messages to lower ranks. `origin` is the user's
    group that this one was made from.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        devices: Sequence[torch.device] = (),
        downwards: dist.ProcessGroup | None = None,
        origin: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = self._group = group
        self.group_rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ledger = Ledger()
        self._devices = devices
        self._origin = origin or group
        self._exchange = Exchange(group, downwards or group)
        self._collectives = Collectives(group)
        self._other: GroupComm | None = None
        self.headers: Headers = Headers(self._exchange, self.ledger.note)
        if self._exchanges(self._meeting_device()):
            sleep_at_exit()

    @property
    def min_bucket_bytes(self) -> int:  # type: ignore[override]
        """The smallest bucket that is worth a separate launch."""
        return MIN_BUCKET_BYTES["gloo" if self._exchanges_data else "nccl"]

    @override
    def all_gather(
        self, buffer: torch.Tensor, cuts: Sequence[int], operation: Operation = Operation.GATHER
    ) -> Work:
        own = buffer[cuts[self.group_rank] : cuts[self.group_rank + 1]]
        self.ledger.note("all_gather", own.nbytes * (self.world_size - 1))
        return self._gather(buffer, cuts, operation, self.headers.begin(operation))

    @override
    def reduce_scatter(self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        self.ledger.note("reduce_scatter", (cuts[-1] - out.numel()) * buffer.itemsize)
        device = self._wire_device(buffer.device)
        staged = device != buffer.device
        total = torch.empty_like(out, device=device) if staged else out
        name = f"rank {self.group_rank}: {Operation.REDUCE.value}"
        header = self.headers.begin(Operation.REDUCE)
        with naming(name):
            works, finish = self._transport(device).reduce_scatter(buffer.to(device), cuts, total)
        rest = [finish] if finish else []
        return Launched(name, works, [*rest, lambda: out.copy_(total)] if staged else rest, header)

    @override
    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        # Not `dist.all_gather`, whose tensors Gloo's threads may hold at exit: `at_exit.py`.
        rank, size = self.group_rank, self.world_size
        header = self.headers.begin(Operation.NOTES)
        lengths = torch.zeros(size, dtype=torch.int64, device=CPU)
        lengths[rank] = len(payload)
        self._gather(lengths, range(size + 1), Operation.NOTES, header).wait()
        longest = max(1, int(lengths.max()))
        cuts = range(0, size * longest + 1, longest)
        payloads = bytearray(cuts[-1])
        payloads[cuts[rank] : cuts[rank] + len(payload)] = payload
        everyone = torch.frombuffer(payloads, dtype=torch.uint8)
        self._gather(everyone, cuts, Operation.NOTES, header).wait()
        self.ledger.note("all_gather_bytes", (longest + lengths.itemsize) * (size - 1))
        starts = zip(cuts, lengths.tolist(), strict=False)
        return [bytes(payloads[start : start + length]) for start, length in starts]

    @override
    def share_error(self, error: Exception | None) -> Work:
        if not self._exchanges(self._meeting_device()):
            return NOTHING_TO_DO
        header = self.headers.send(Operation.ERRORS, error)
        return Launched(Operation.ERRORS.value, (), [header.raise_error], header)

    @override
    def compare_calls(self, other: Comm) -> None:
        if self._exchanges_data and other.headers is not None:
            self.headers = other.headers
            self.headers.of_every_call = True

    @override
    @contextmanager
    def recovering(self) -> Iterator[None]:
        headers = self.headers
        if not headers.of_every_call:
            yield
            return
        headers.send(Operation.RECOVER)
        headers.of_every_call = False
        try:
            yield
            headers.even_out(max(all_gather_json(self, headers.num_sent)))
        finally:
            headers.of_every_call = True

    @override
    def send(self, data: torch.Tensor, target: int) -> None:
        wire = data.to(self._meeting_device())
        self.ledger.note("send", wire.numel())
        with naming(f"rank {self.group_rank}: sending to rank {target}"):
            dist.send(wire, group=self._group, group_dst=target, tag=DIRECT)

    @override
    def receive(self, data: torch.Tensor, source: int) -> None:
        device = self._meeting_device()
        wire = data if data.device == device else torch.empty_like(data, device=device)
        with naming(f"rank {self.group_rank}: receiving from rank {source}"):
            dist.recv(wire, group=self._group, group_src=source, tag=DIRECT)
        if wire is not data:
            data.copy_(wire)

    @override
    def new_connection(self, backend: str | None = None) -> GroupComm:
        options: dict[str, Any] = {"timeout": self._timeout()}
        ranks = None
        if self._origin is dist.group.WORLD:
            self._close_unused()
        else:
            self._check_group_counts()
            ranks = dist.get_process_group_ranks(self._group)
            # Ranks outside of the group do not take part in making another.
            options["use_local_synchronization"] = True
            if ranks != sorted(ranks):
                options["sort_ranks"] = False  # torch 2.12 and later
        exchanges = backend is None and self._exchanges_data
        # Without a tensor at hand, an unbound group uses the current device, which may be the same
        # on all ranks. A bound group takes no tensors of other devices. If the default group is
        # bound, torch binds this one too.
        binds = backend is None and not exchanges and len(self._devices) == 1
        num_gloo_groups = 2 if exchanges else int(backend == "gloo")
        noting = noting_connections(num_gloo_groups * (self.world_size - 1))
        with noting, _unbound_world(ranks is not None) as unbound:
            group = dist.new_group(
                ranks,
                backend=backend or _backends(self._group),
                device_id=self._devices[0] if binds and unbound else None,
                **options,
            )
            downwards = dist.new_group(ranks, backend="gloo", **options) if exchanges else None
        comm = GroupComm(group, self._devices, downwards, self._origin)
        made = [weakref.ref(each) for each in (group, downwards) if each is not None]
        weakref.finalize(comm, _unused.__setitem__, group.group_name, made).atexit = False
        return comm

    @override
    def new_pair(self) -> tuple[GroupComm, GroupComm]:
        one, other = self.new_connection(), self.new_connection()
        if not self._exchanges_data:
            one._other, other._other = other, one
        return one, other

    @override
    def queue(self, number: int) -> GroupComm:
        return self._other if self._other and number % 2 else self

    def _close_unused(self) -> None:
        """Close connections that no rank uses any more. Called on every rank.

        The garbage collector finds them at different times on different ranks, but the ranks must
        have equal numbers of groups. torch names groups of some ranks by that number and may not
        use a name twice, so nothing is closed where there are such groups.
        """
        world = dist.distributed_c10d._world
        may_close = all(name.isdecimal() for name in world.pg_names.values())
        made = {name: [each() for each in groups] for name, groups in dict(_unused).items()}
        # The user may have destroyed all groups, after which torch uses their names again.
        unused = {n: groups for n, groups in made.items() if all(g in world.pg_map for g in groups)}
        found = all_gather_json(self, list(unused) if may_close else [])
        for name in sorted(set.intersection(*map(set, found))):
            for group in unused[name]:
                dist.destroy_process_group(group)
            del _unused[name]

    def _gather(
        self,
        buffer: torch.Tensor,
        cuts: Sequence[int],
        operation: Operation,
        header: Header | None,
    ) -> Launched:
        own = slice(cuts[self.group_rank], cuts[self.group_rank + 1])
        device = self._wire_device(buffer.device)
        wire = buffer
        if device != buffer.device:
            wire = torch.empty_like(buffer, device=device)
            wire[own].copy_(buffer[own])
        name = f"rank {self.group_rank}: {operation.value}"
        with naming(name):
            works = self._transport(device).all_gather(wire, cuts, operation)
        finish = [] if wire is buffer else [lambda: buffer.copy_(wire)]
        return Launched(name, works, finish, header)

    def _transport(self, device: torch.device) -> Exchange | Collectives:
        return self._exchange if self._exchanges(device) else self._collectives

    def _exchanges(self, device: torch.device) -> bool:
        return backend_name(self._group, device) in EXCHANGING

    @property
    def _exchanges_data(self) -> bool:
        """True if data of this rank's devices travel as messages."""
        return self._exchanges(self._wire_device(self._devices[0] if self._devices else CPU))

    def _meeting_device(self) -> torch.device:
        """Return the kind of device on which any two ranks can meet, wherever their data are.

        If each side chose by its own tensor, they could meet in different backends of the group.
        """
        return self._wire_device(CPU)

    def _wire_device(self, device: torch.device) -> torch.device:
        """Return where a tensor on `device` must be for this group to move it."""
        backend = backend_name(self._group, device)
        if backend == "gloo":
            return CPU
        if backend is not None:
            return device
        if self._devices:
            return self._devices[0]
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise RuntimeError(f"the process group has no backend for tensors on {device}")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    def _check_group_counts(self) -> None:
        """Raise on every rank if the ranks belong to different numbers of groups.

        torch names a new group by that number, so the ranks would wait under different names.
        """
        counts = all_gather_json(self, len(dist.distributed_c10d._world.pg_names))
        if len(set(counts)) > 1:
            raise RuntimeError(
                "the ranks of the given process_group belong to different numbers of process "
                f"groups ({counts}), and torch cannot make another group of them; construct the "
                "optimizer before the groups that only some of these ranks are in"
            )

    def _timeout(self) -> timedelta | None:
        options = getattr(backend_of(self._group, self._meeting_device()), "options", None)
        return getattr(options, "_timeout", None)


def _backends(group: dist.ProcessGroup) -> str:
    """Return the backends of a group, as one name if it is the same for all devices.

    Torch warns when a group of several is destroyed.
    """
    config = dist.get_backend_config(group)
    names = {each.rpartition(":")[2] for each in config.split(",")}
    return names.pop() if len(names) == 1 else config


@contextmanager
def _unbound_world(hide: bool) -> Iterator[bool]:
    """Hide the device that the default group is bound to; yield whether it is bound to none now.

    Torch splits a new group off a default group that is bound to a device. All ranks of the default
    group have to take part in that, also those outside of the new group.
    """
    world: Any = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is None or not hide:
        yield bound is None
        return
    world.bound_device_id = None
    try:
        yield True
    finally:
        world.bound_device_id = bound


def connect(process_group: dist.ProcessGroup | None, near: Sequence[torch.Tensor] = ()) -> Comm:
    """Return the communication for `process_group`, the default group, or a single rank.

    `near` are tensors on the devices that this rank works on. The current device is no substitute:
    it is the same on all ranks of a program that never sets it.
    """
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return SoloComm()
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        if process_group != dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(
                f"process_group must be a ProcessGroup, not {type(process_group).__name__}; "
                "options of the optimizer are passed by name, and a DeviceMesh of one dimension "
                "has a get_group()"
            )
        # `new_group` returned this on a rank that it leaves out.
        raise ValueError(
            f"global rank {dist.get_rank()} is not a member of the given process_group; "
            "construct the optimizer only on the ranks of that group"
        )
    if dist.get_world_size(process_group) == 1:
        return SoloComm(process_group)
    devices = dict.fromkeys(tensor.device for tensor in near if tensor.device.type != "cpu")
    return GroupComm(process_group, list(devices))


def refuse_stray_rank() -> None:
    """Raise on a rank that `torchrun` started as one of several, but that has no process group."""
    if not dist.is_available() or dist.is_initialized() or not dist.is_torchelastic_launched():
        return
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise RuntimeError(
            f"torchrun has started {world_size} ranks, but this one has no process group and would "
            "train alone; call torch.distributed.init_process_group() first"
        )
