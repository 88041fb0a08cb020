"""All-gather and reduce-scatter over Gloo, as messages straight between the ranks.

Gloo's own reduce-scatter sends as much as an all-reduce. Here each rank receives the contributions
to its segment and adds them in rank order, so the sum is the same from run to run. All messages of
an operation are in flight at once.

Note [A connection for each direction]

Two ranks of one Gloo group share one socket for both directions. That costs twice. First, Gloo
sends a message only after the receiver has announced that it is ready. The announcement queues
behind the data in the same socket, so the other direction stands still. Second, the thread that
calls `isend` writes under the connection's lock. Gloo's own thread, with data to read from the same
connection, spins on that lock and takes a core's time from the computation. So `new_connection`
makes two groups. Messages to higher ranks travel in one, messages to lower ranks in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from shardstep.comm.works import Finish

TAGS = range(1 << 30, 1 << 31)
"""Tags of these messages. The user may have messages in the same group, with small tags."""


class Exchange:
    """Messages between the ranks of a group.

    Args:
        upwards: the group for messages to higher ranks.
        downwards: the group of the same ranks for messages to lower ranks.
    """

    def __init__(self, upwards: dist.ProcessGroup, downwards: dist.ProcessGroup) -> None:
        self._upwards = upwards
        self._downwards = downwards
        self._rank = dist.get_rank(upwards)
        self._size = dist.get_world_size(upwards)
        self._launched = 0

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> list[Any]:
        """Send this rank's segment to every rank, and receive theirs. Called on every rank."""
        segments = [buffer[start:stop] for start, stop in pairwise(cuts)]
        return self._launch([segments[self._rank]] * self._size, segments)

    def reduce_scatter(
        self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor
    ) -> tuple[list[Any], Finish]:
        """Send every segment to its owner, and then add up this rank's. Called on every rank."""
        segments = [buffer[start:stop] for start, stop in pairwise(cuts)]
        own = segments[self._rank]
        parts = [own if rank == self._rank else torch.empty_like(own) for rank in range(self._size)]
        return self._launch(segments, parts), lambda: _add_up(parts, out)

    def _launch(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
    ) -> list[Any]:
        """Send `outgoing[r]` to rank r and receive `incoming[r]` from it, all in flight at once."""
        rank, size = self._rank, self._size
        tag = TAGS[self._launched % len(TAGS)]
        self._launched += 1
        # Each rank starts with another peer, so that no rank is the first of all others.
        sources = [(rank - distance) % size for distance in range(1, size)]
        targets = [(rank + distance) % size for distance in range(1, size)]
        received = [
            dist.irecv(
                incoming[peer].view(torch.uint8),
                group=self._direction(peer, rank),
                group_src=peer,
                tag=tag,
            )
            for peer in sources
            if incoming[peer].numel()
        ]
        sent = [
            dist.isend(
                outgoing[peer].view(torch.uint8),
                group=self._direction(rank, peer),
                group_dst=peer,
                tag=tag,
            )
            for peer in targets
            if outgoing[peer].numel()
        ]
        return received + sent

    def _direction(self, source: int, target: int) -> dist.ProcessGroup:
        """See Note [A connection for each direction]."""
        return self._upwards if source < target else self._downwards


def _add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add `parts` in their order, in the wider dtype of theirs and `out`'s."""
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
