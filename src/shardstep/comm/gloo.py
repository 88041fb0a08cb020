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

ERROR_NBYTES = 200
"""Room for a rank's error."""


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
        self._rank = dist.get_rank(upwards)
        self._size = dist.get_world_size(upwards)
        self._launched = count()
        self._notes = _notes.setdefault(upwards, count())

    def all_gather(
        self, buffer: torch.Tensor, cuts: Sequence[int], operation: Operation
    ) -> list[Any]:
        """Send this rank's segment to every rank, and receive theirs. Called on every rank."""
        incoming = segments(buffer, cuts)
        return self._launch([incoming[self._rank]] * self._size, incoming, operation)

    def share_error(self, error: Exception | None) -> tuple[list[Any], Finish]:
        """Send this rank's error, or None, to every rank. Called on every rank."""
        everyone = torch.zeros(self._size, ERROR_NBYTES, dtype=torch.uint8, device="cpu")
        if error is not None:
            text = f"{type(error).__name__}: {error}".encode()[:ERROR_NBYTES]
            everyone[self._rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cuts = range(0, everyone.numel() + 1, ERROR_NBYTES)
        works = self.all_gather(everyone.view(-1), cuts, Operation.ERRORS)

        def check() -> None:
            if error is not None or not everyone.any():
                return  # this rank has raised already
            failed = int(everyone.any(dim=1).nonzero()[0])
            text = bytes(everyone[failed].tolist()).rstrip(b"\0").decode(errors="replace")
            raise RuntimeError(
                f"rank {self._rank}: the optimizer's step failed on rank {failed}, so it fails on "
                f"every rank: {text}"
            )

        return works, check

    def reduce_scatter(
        self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor
    ) -> tuple[list[Any], Finish]:
        """Send every segment to its owner, and then add up this rank's. Called on every rank."""
        outgoing = segments(buffer, cuts)
        own = outgoing[self._rank]
        parts = [own if rank == self._rank else torch.empty_like(own) for rank in range(self._size)]
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
        rank, size = self._rank, self._size
        numbers = self._notes if operation is Operation.NOTES else self._launched
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
    """A message in flight, with errors that name the peer."""

    def __init__(self, launch: Callable[[], Any], peer: str) -> None:
        self._peer = peer
        # Torch ends a profiler's record of a message when the message is waited for. If the
        # profiler has stopped by then, that writes to freed memory.
        recorded = profiler._is_profiler_enabled
        if recorded:
            torch._C._autograd._enable_record_function(False)
        try:
            self._work = self._named(launch)
        finally:
            if recorded:
                torch._C._autograd._enable_record_function(True)

    def wait(self) -> None:
        """Wait for it."""
        self._named(self._work.wait)

    def _named(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except RuntimeError as error:
            raise RuntimeError(f"{self._peer}: {error}") from error


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
