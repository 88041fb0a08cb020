"""Communication within a process group.

It has one of two ways for each kind of device: the collective way (NCCL and its like), the
backend's own all-gather and reduce-scatter; and the exchange way (Gloo, `exchange.py`). A buffer
whose device the backend cannot reach is staged through one that it can.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from shardstep.comm.api import Comm, Ledger, SoloComm, Work
from shardstep.comm.gloo import TAGS, Exchange
from shardstep.comm.works import Then, Works, naming

# torch 2.13 renames these and warns about the old names; 2.11 knows only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DIRECT = TAGS.start - 1
"""The tag of what is sent to one rank: not one of a user's (see `TAGS`), nor of an exchange."""


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
        self.group_rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ledger = Ledger()
        self._exchange = Exchange(group, downwards or group, self.ledger)
        self.relaying = self._exchanges(self._wire_device(device or torch.device("cpu")))

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Work:
        """Fill `buffer` with every rank's segment. Called on every rank."""
        wire_device = self._wire_device(buffer.device)
        wire = buffer
        if wire_device != buffer.device:
            wire = torch.empty_like(buffer, device=wire_device)
            own = slice(cuts[self.group_rank], cuts[self.group_rank + 1])
            wire[own].copy_(buffer[own])
        gather = self._exchange.all_gather if self._exchanges(wire_device) else self._gather
        with naming(f"rank {self.group_rank}: gathering parameters"):
            pending = gather(wire, cuts)
        return pending if wire is buffer else Then(pending, lambda: buffer.copy_(wire))

    def _gather(self, wire: torch.Tensor, cuts: Sequence[int]) -> Work:
        """The collective way."""
        data = wire.view(torch.uint8)
        segments = [
            data[start * wire.itemsize : stop * wire.itemsize] for start, stop in pairwise(cuts)
        ]
        own = segments[self.group_rank]
        self.ledger.note("all_gather", own.numel() * (self.world_size - 1))
        name = f"rank {self.group_rank}: gathering parameters"
        if len({segment.numel() for segment in segments}) == 1:
            return Works(name, [_all_gather_single(data, own, group=self.group, async_op=True)])
        # Segments of different lengths: the owner of each broadcasts it, in rank order everywhere.
        return Works(
            name,
            [
                dist.broadcast(segment, group=self.group, group_src=source, async_op=True)
                for source, segment in enumerate(segments)
                if segment.numel()
            ],
        )

    def reduce_scatter(self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        """Sum this rank's segment of `buffer` over all ranks. Called on every rank."""
        device = self._wire_device(buffer.device)
        staged = device != buffer.device
        arrived = torch.empty_like(out, device=device) if staged else out
        reduce = self._exchange.reduce_scatter if self._exchanges(device) else self._reduce
        with naming(f"rank {self.group_rank}: reducing gradients"):
            pending = reduce(buffer.to(device), cuts, arrived)
        return Then(pending, lambda: out.copy_(arrived)) if staged else pending

    def _reduce(self, wire: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        """The collective way."""
        segments = [wire[start:stop] for start, stop in pairwise(cuts)]
        own = segments[self.group_rank]
        self.ledger.note("reduce_scatter", (wire.numel() - own.numel()) * wire.itemsize)
        name = f"rank {self.group_rank}: reducing gradients"
        if len({segment.numel() for segment in segments}) == 1:
            summed = out if out.dtype == wire.dtype else torch.empty_like(own)
            work = _reduce_scatter_single(summed, wire, group=self.group, async_op=True)
            pending = Works(name, [work])
            return pending if summed is out else Then(pending, lambda: out.copy_(summed))
        # Segments of different lengths: each is reduced to its owner, in rank order everywhere.
        works = [
            dist.reduce(segment, group=self.group, group_dst=target, async_op=True)
            for target, segment in enumerate(segments)
            if segment.numel()
        ]
        return Then(Works(name, works), lambda: out.copy_(own))

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's `payload`. Called on every rank."""
        with naming(f"rank {self.group_rank}: comparing notes with the other ranks"):
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
        with naming(f"rank {self.group_rank}: sending to rank {target}"):
            dist.send(wire, group=self.group, group_dst=target, tag=DIRECT)

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Receive flat bytes from group rank `source`."""
        device = self._meeting_device()
        wire = data if data.device == device else torch.empty_like(data, device=device)
        with naming(f"rank {self.group_rank}: receiving from rank {source}"):
            dist.recv(wire, group=self.group, group_src=source, tag=DIRECT)
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

    def new_connection(self, backend: str | None = None) -> GroupComm:
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
        if self.relaying and backend is None:
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


def connect(process_group: dist.ProcessGroup | None, near: Sequence[torch.Tensor] = ()) -> Comm:
    """The communication for `process_group`, the default group, or no group at all.

    Args:
        process_group: the process group; None for the default group, if there is one.
        near: tensors on whose device this rank works. A rank that was never told its current
            device has the same one as all others.

    Raises:
        TypeError: if it is no process group.
        ValueError: if this rank is not a member of it.
    """
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return SoloComm()
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        if process_group != dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(
                f"process_group has to be a ProcessGroup, not a {type(process_group).__name__}; "
                "options of the optimizer are passed by name, and a DeviceMesh of one dimension "
                "has a get_group()"
            )
        # What `new_group` returns on ranks that it leaves out.
        raise ValueError(
            f"global rank {dist.get_rank()} is not a member of the given process_group; "
            "construct the optimizer only on the ranks of that group"
        )
    if dist.get_world_size(process_group) == 1:
        return SoloComm(process_group)
    devices = (tensor.device for tensor in near if tensor.device.type != "cpu")
    return GroupComm(process_group, next(devices, None))


def refuse_stray_rank() -> None:
    """Raise on a rank that `torchrun` has started as one of several, but that knows no others.

    Raises:
        RuntimeError: there is no process group, and was meant to be one.
    """
    if not dist.is_available() or dist.is_initialized() or not dist.is_torchelastic_launched():
        return
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise RuntimeError(
            f"torchrun has started {world_size} ranks, but this one has no process group and would "
            "train alone; call torch.distributed.init_process_group() first"
        )
