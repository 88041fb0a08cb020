"""Broadcasts of many tensors, packed into few messages."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardstep.comm.api import Comm
from shardstep.comm.works import Operation

PACK_NBYTES = 4 * 2**20
"""Tensors travel together up to this size: a model may have hundreds of small buffers."""


def broadcast(
    comm: Comm, tensors: Iterable[torch.Tensor], source: int, operation: Operation
) -> None:
    """Copy the values that group rank `source` has to every rank.

    Called on every rank, with tensors of the same shapes and dtypes in the same order.
    """
    if comm.world_size == 1:
        return
    for pack in _packs(tensors):
        in_place = len(pack) == 1 and pack[0].is_contiguous()  # parameters may be large
        wire = pack[0].view(-1) if in_place else torch.cat([tensor.reshape(-1) for tensor in pack])
        cuts = [0] * (source + 1) + [wire.numel()] * (comm.world_size - source)
        comm.all_gather(wire, cuts, operation).wait()
        if not in_place and comm.group_rank != source:
            parts = wire.split([tensor.numel() for tensor in pack])  # type: ignore[no-untyped-call]
            for tensor, part in zip(pack, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _packs(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors of one dtype and device up to `PACK_NBYTES`, in the order given."""
    packs: list[list[torch.Tensor]] = []
    open_packs: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        pack = open_packs.get((tensor.dtype, tensor.device))
        if pack is None or sum(each.nbytes for each in pack) + tensor.nbytes > PACK_NBYTES:
            pack = open_packs[tensor.dtype, tensor.device] = []
            packs.append(pack)
        pack.append(tensor.detach())
    return packs
