"""The exchange way: every rank sends segments straight to the ranks that want them, over Gloo.

All messages of a round are in flight at once. Gloo's own reduce-scatter sends as much as an
all-reduce; here each rank adds up the contributions to its segment itself, in rank order, so that
the sum is the same from run to run. Where somebody has much more than the others an exchange goes
in two rounds, as `plan/relay.py` says, and comes to the same bits. The second begins in a thread of
ours (`background.py`), whatever the caller does meanwhile: he may be waiting for a rank that waits
for this one.

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

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from shardstep.comm.api import Ledger, Work
from shardstep.comm.background import Background
from shardstep.comm.works import Then, Works, naming
from shardstep.plan import Relay, gather_numel_sent, reduce_numel_sent, relay

TAGS = range(1 << 30, 1 << 31)
"""Tags of messages. One of the user's own in the same group, that one rank is ready to receive and
another has yet to send, has the tag 0 or some small number, and is not to be taken for ours."""


class Exchange:
    """Messages between the ranks of a group.

    Args:
        upwards: the group for messages to higher ranks.
        downwards: the group of the same ranks for messages to lower ranks.
        ledger: where to count what is sent.
    """

    def __init__(
        self, upwards: dist.ProcessGroup, downwards: dist.ProcessGroup, ledger: Ledger
    ) -> None:
        self._upwards = upwards
        self._downwards = downwards
        self._ledger = ledger
        self._rank = dist.get_rank(upwards)
        self._size = dist.get_world_size(upwards)
        self._taken = 0
        self._background = Background()

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Work:
        """Fill `buffer` with every rank's segment. Called on every rank."""
        name = f"rank {self._rank}: gathering parameters"
        nbytes = gather_numel_sent(cuts, self._rank) * buffer.itemsize
        self._ledger.note("all_gather", nbytes)
        route = relay(cuts)
        if route is not None:
            return self._relay_gather(name, buffer, route)
        segments = [buffer[start:stop] for start, stop in pairwise(cuts)]
        own = [segments[self._rank]] * self._size
        return Works(name, self._round(self._tags(1)[0], own, segments))

    def _relay_gather(self, name: str, buffer: torch.Tensor, route: Relay) -> Work:
        rank, ranks = self._rank, range(self._size)
        tags = self._tags(2)
        first = self._round(
            tags[0],
            [buffer[route.from_owner(rank, other).slice] for other in ranks],
            [buffer[route.from_owner(other, rank).slice] for other in ranks],
        )

        def second() -> list[Any]:
            return self._round(
                tags[1],
                [buffer[route.to_all(rank, other).slice] for other in ranks],
                [buffer[route.to_all(other, rank).slice] for other in ranks],
            )

        return self._in_two_rounds(name, first, second)

    def reduce_scatter(self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        """Sum this rank's segment of `buffer` over all ranks. Called on every rank."""
        name = f"rank {self._rank}: reducing gradients"
        gradients, sums = reduce_numel_sent(cuts, self._rank)
        nbytes = gradients * buffer.itemsize + sums * out.itemsize
        self._ledger.note("reduce_scatter", nbytes)
        route = relay(cuts)
        if route is not None:
            return self._relay_reduction(name, buffer, route, out)
        segments = [buffer[start:stop] for start, stop in pairwise(cuts)]
        parts = self._room_for_parts(segments[self._rank])
        works = self._round(self._tags(1)[0], segments, parts)
        return Then(Works(name, works), lambda: _add_up(parts, out))

    def _relay_reduction(
        self, name: str, buffer: torch.Tensor, route: Relay, out: torch.Tensor
    ) -> Work:
        rank = self._rank
        mine, owned = route.slices[rank], route.segments[rank]
        slices = [buffer[each.slice] for each in route.slices]
        parts = self._room_for_parts(slices[rank])
        tags = self._tags(2)
        first = self._round(tags[0], slices, parts)

        def second() -> list[Any]:
            total = torch.empty(mine.numel, dtype=out.dtype, device=out.device)
            _add_up(parts, total)
            parts.clear()
            outgoing = [
                total[mine.intersect(segment).shift(-mine.start).slice]
                for segment in route.segments
            ]
            incoming = [
                out[slice_.intersect(owned).shift(-owned.start).slice] for slice_ in route.slices
            ]
            incoming[rank].copy_(outgoing[rank])
            return self._round(tags[1], outgoing, incoming)

        return self._in_two_rounds(name, first, second)

    def _room_for_parts(self, own: torch.Tensor) -> list[torch.Tensor]:
        """This rank's contribution to what it adds up, and room for those of the others."""
        ranks = range(self._size)
        return [own if source == self._rank else torch.empty_like(own) for source in ranks]

    def _in_two_rounds(self, name: str, first: list[Any], second: Callable[[], list[Any]]) -> Work:
        """Have `second` called, which begins the second round, when the first is over."""
        works = Works(name, first)
        inference = torch.is_inference_mode_enabled()

        def carry_on() -> Work:
            works.wait()
            with torch.inference_mode(inference), naming(name):
                return Works(name, second())

        return self._background.do(carry_on)

    def _tags(self, rounds: int) -> range:
        """A tag for each round of an operation, by which both sides tell the messages apart.

        All are taken when it is launched: when second rounds begin differs from rank to rank.
        """
        # Two for each, so that those of one operation never lie at both ends.
        first, self._taken = self._taken, (self._taken + 2) % len(TAGS)
        return TAGS[first : first + rounds]

    def _round(
        self, tag: int, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
    ) -> list[Any]:
        """Send `outgoing[r]` to rank r and receive `incoming[r]` from it, all in flight at once."""
        rank, size = self._rank, self._size
        # Each rank starts with another peer, so that nobody is everybody's first.
        sources = [(rank - distance) % size for distance in range(1, size)]
        targets = [(rank + distance) % size for distance in range(1, size)]
        works: list[Any] = [
            dist.irecv(_as_bytes(incoming[peer]), group=way, group_src=peer, tag=tag)
            for peer, way in ((peer, self._way(peer, rank)) for peer in sources)
            if incoming[peer].numel()
        ]
        works += [
            dist.isend(_as_bytes(outgoing[peer]), group=way, group_dst=peer, tag=tag)
            for peer, way in ((peer, self._way(rank, peer)) for peer in targets)
            if outgoing[peer].numel()
        ]
        return works

    def _way(self, source: int, target: int) -> dist.ProcessGroup:
        """See Note [A connection for each direction]."""
        return self._upwards if source < target else self._downwards


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
