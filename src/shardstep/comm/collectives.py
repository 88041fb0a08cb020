"""All-gather and reduce-scatter by the backend's own collectives (NCCL and its like)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardstep.comm.api import Finish, Operation, segments

# torch 2.13 renames these and warns about the old names, the only ones that 2.11 has.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

UNEVEN_LISTS = frozenset({"nccl"})
"""Backends whose list collectives take tensors of different lengths, and launch them as one.

On other backends each segment is a separate broadcast or reduction, in rank order everywhere.
"""


class Collectives:
    """The collectives of one group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)

    def all_gather(
        self, buffer: torch.Tensor, cuts: Sequence[int], operation: Operation
    ) -> list[Any]:
        """Gather all segments into `buffer`. Called on every rank."""
        group = self._group
        data = buffer.view(torch.uint8)
        parts = segments(data, [cut * buffer.itemsize for cut in cuts])
        own = parts[self._rank]
        if _even(parts):
            return [_all_gather_single(data, own, group=group, async_op=True)]
        if backend_name(group, buffer.device) in UNEVEN_LISTS:
            return [dist.all_gather(parts, own, group=group, async_op=True)]
        return [
            dist.broadcast(segment, group=group, group_src=source, async_op=True)
            for source, segment in enumerate(parts)
            if segment.numel()
        ]

    def reduce_scatter(
        self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor
    ) -> tuple[list[Any], Finish | None]:
        """Reduce each segment to its owner. Called on every rank."""
        group = self._group
        if buffer.is_complex():  # NCCL sums no complex numbers
            buffer, out = (torch.view_as_real(each).view(-1) for each in (buffer, out))
            cuts = [2 * cut for cut in cuts]
        parts = segments(buffer, cuts)
        own = parts[self._rank]
        total = out if out.dtype == buffer.dtype else own  # in place; `out` takes it at the end
        if _even(parts):
            works = [_reduce_scatter_single(total, buffer, group=group, async_op=True)]
        elif backend_name(group, buffer.device) in UNEVEN_LISTS:
            works = [dist.reduce_scatter(total, parts, group=group, async_op=True)]
        else:
            total = own
            works = [
                dist.reduce(segment, group=group, group_dst=target, async_op=True)
                for target, segment in enumerate(parts)
                if segment.numel()
            ]
        return works, None if total is out else lambda: out.copy_(total)


def _even(parts: Sequence[torch.Tensor]) -> bool:
    return len({part.numel() for part in parts}) == 1


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend for `device` in `group`, or None."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return the name of the backend for `device` in `group`, or None."""
    backend = backend_of(group, device)
    return None if backend is None else str(backend.name()).lower()
