"""Compares the parameters of all ranks by a digest of each."""

from __future__ import annotations

import torch

from shardstep.comm import Operation, all_gather_rows
from shardstep.params.dtensor import local_part
from shardstep.params.flat import flat
from shardstep.params.same_bits import as_integers
from shardstep.state.view import ShardView

CHUNK = 1 << 20
"""Elements that are multiplied at a time, to bound the memory."""


def verify(shards: ShardView) -> None:
    """Raise on every rank if a parameter differs between ranks. Called on every rank.

    Raises:
        RuntimeError: naming the first parameter that differs, and the ranks.
    """
    shards.wait_for_params()
    device = shards.params[0].device
    own = [_digest(local_part(param)).to(device) for param in shards.params]
    everyone = all_gather_rows(shards.comm, torch.stack(own), Operation.VERIFY)
    for index, rank in (everyone != everyone[0]).t().nonzero().tolist()[:1]:
        raise RuntimeError(
            f"parameter {shards.plan.specs[index].name!r} differs between ranks 0 and {rank}; "
            "load a checkpoint on every rank, or copy the parameters of one rank to all"
        )


def _digest(param: torch.Tensor) -> torch.Tensor:
    """Return a sum of a parameter's bits, in which the place of an element counts."""
    bits = as_integers(flat(param))
    total = torch.zeros((), dtype=torch.int64, device=param.device)
    # Odd numbers: the highest of 64 bits, times an even number, would vanish.
    weights = 2 * torch.arange(min(CHUNK, bits.numel()), device=param.device) + 1
    for chunk in torch.split(bits.flatten(), CHUNK):
        total = total * 31 + (chunk * weights[: chunk.numel()]).sum()
    return total
