"""All-gather and reduce-scatter over Gloo, as messages straight between the ranks.

Gloo's own reduce-scatter sends as much as an all-reduce. Here each rank adds the contributions to
its segment in rank order, so the sum is the same from run to run.

Note [A connection for each direction]

Two ranks of one Gloo group share one socket for both directions. That costs twice. First, the
receiver's announcement that it is ready queues behind its own data. Second, `isend` writes under
the connection's lock, on which Gloo's thread spins when it has data to read. So `new_connection`
makes two groups: one for messages to higher ranks, one for messages to lower ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from shardstep.comm.api import Finish, Operation, segments

TAGS = range(1 << 30, 1 << 31)
"""Tags of these messages. The user may have messages in the same group, with small tags."""

NUM_TAGS = len(TAGS) // len(Operation)
"""Tags of each operation. A message that is longer than its receiver expects aborts the process in
Gloo, so a rank that calls another operation than its peers must not meet them."""

_notes: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
"""The numbers of the notes that the ranks of a group compare.

They do so to agree on how to go on, also after one of them has launched more or fewer operations
than the others, and also where they use different objects over the same group.
"""


class Exchange:
    """Messages to higher ranks in one group, and to lower ranks in another of the same ranks."""

    def __init__(self, upwards: dist.ProcessGroup, downwards: dist.ProcessGroup) -> None:
        self._upwards = upwards
        self._downwards = downwards
        self.rank = dist.get_rank(upwards)
        self.size = dist.get_world_size(upwards)
        self._launched = count()
        # These meet also after a rank has launched more or fewer operations than the others.
        self._apart = {
            Operation.NOTES: _notes.setdefault(upwards, count()),
            Operation.HEADER: count(),
        }

    def all_gather(
        self, buffer: torch.Tensor, cuts: Sequence[int], operation: Operation
    ) -> list[Any]:
        """Send this rank's segment to every rank, and receive theirs. Called on every rank."""
        incoming = segments(buffer, cuts)
        return self._launch([incoming[self.rank]] * self.size, incoming, operation)

    def reduce_scatter(
        self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor
    ) -> tuple[list[Any], Finish]:
        """Send every segment to its owner, and then add up this rank's. Called on every rank."""
        outgoing = segments(buffer, cuts)
        own = outgoing[self.rank]
        parts = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        works = self._launch(outgoing, parts, Operation.REDUCE)
        return works, lambda: _add_up(parts, out)

    def _launch(
        self,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        operation: Operation,
    ) -> list[Any]:
        """Send `outgoing[r]` to rank r and receive `incoming[r]` from it, all in flight at once.

        See Note [A connection for each direction].
        """
        rank, size = self.rank, self.size
        numbers = self._apart.get(operation, self._launched)
        tag = _FIRST_TAG[operation] + next(numbers) % NUM_TAGS
        # Each rank starts with another peer, so that no rank is the first of all others.
        sources = [(rank - distance) % size for distance in range(1, size)]
        targets = [(rank + distance) % size for distance in range(1, size)]
        messages: list[_Message] = []
        for peer in sources:
            if incoming[peer].numel():
                data = incoming[peer].view(torch.uint8)
                group = self._upwards if peer < rank else self._downwards
                launch = partial(dist.irecv, data, group=group, group_src=peer, tag=tag)
                messages.append(_Message(launch, f"from rank {peer}"))
        for peer in targets:
            if outgoing[peer].numel():
                data = outgoing[peer].view(torch.uint8)
                group = self._upwards if rank < peer else self._downwards
                launch = partial(dist.isend, data, group=group, group_dst=peer, tag=tag)
                messages.append(_Message(launch, f"to rank {peer}"))
        return messages


class _Message:
    """A message in flight.

    Attributes:
        peer: the other rank.
        wait: waits for it, once.
    """

    def __init__(self, launch: Callable[[], Any], peer: str) -> None:
        self.peer = peer
        # Torch ends a profiler's record of a message when the message is waited for. If the
        # profiler has stopped by then, that writes to freed memory.
        recorded = profiler._is_profiler_enabled
        if recorded:
            torch._C._autograd._enable_record_function(False)
        try:
            self.wait = launch().wait
        except RuntimeError as error:
            raise RuntimeError(f"{peer}: {error}") from error
        finally:
            if recorded:
                torch._C._autograd._enable_record_function(True)


_FIRST_TAG = {
    operation: TAGS.start + number * NUM_TAGS for number, operation in enumerate(Operation)
}


def _add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add `parts` in their order, in the wider dtype of theirs and `out`'s."""
    total, *rest = parts
    if out.dtype == total.dtype:
        total = torch.add(total, rest.pop(0), out=out)
    elif out.itemsize > total.itemsize:
        total = out.copy_(total)
    for part in rest:
        total.add_(part)
    if total is not out:
        out.copy_(total)
