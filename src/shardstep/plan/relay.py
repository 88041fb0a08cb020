"""How an exchange in which one rank has far more than its share is evened out.

Rank to rank, a segment goes from its owner to each of the others, and its gradients come from each
of them: the owner of a segment that is most of a bucket sends, receives and holds N - 1 times what
the others do, while their links idle. Such an exchange is relayed. The bucket is cut into a slice
for each rank, whoever owns what lies in it. To gather, an owner hands each rank its slice, and each
rank hands its slice to all others: every byte still arrives once. To reduce, each rank adds up its
slice, and hands the sum to the owner: that takes one Nth more bytes in all.

Either way no rank sends, receives or holds on the way much more than twice the bucket, whatever the
cuts and however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from shardstep.plan.interval import Interval
from shardstep.plan.placement import aligned

MIN_NUMEL = 2**16
"""Below this many elements it is the number of messages that counts, not their length."""


@dataclass(frozen=True, slots=True)
class Relay:
    """The messages of a relayed exchange; both kinds have two rounds of them.

    Attributes:
        segments: for each rank, what it owns.
        slices: for each rank, what goes through it.
    """

    segments: tuple[Interval, ...]
    slices: tuple[Interval, ...]

    def from_owner(self, owner: int, through: int) -> Interval:
        """What `owner` hands to rank `through`, in the first round of a gather."""
        return self.segments[owner].intersect(self.slices[through])

    def to_all(self, through: int, target: int) -> Interval:
        """What rank `through` hands to `target`, in the second round of a gather."""
        slice_ = self.slices[through]
        nothing_new = slice_.intersect(self.segments[target]) == slice_
        return Interval(slice_.start, slice_.start) if nothing_new else slice_


def relay(cuts: Sequence[int]) -> Relay | None:
    """How to relay an exchange of segments with these bounds; None if it is better straight.

    Straight, the owner of the longest segment sends it N - 1 times; relayed, everybody sends about
    the bucket once and the owner its segment once more. Relayed is what takes at most half.
    """
    if isinstance(cuts, range) or cuts[-1] < MIN_NUMEL:
        return None
    return _relay(tuple(cuts))


@lru_cache(maxsize=1024)
def _relay(cuts: tuple[int, ...]) -> Relay | None:
    size, total = len(cuts) - 1, cuts[-1]
    segments = tuple(Interval(start, stop) for start, stop in pairwise(cuts))
    longest = max(segment.numel for segment in segments)
    if longest * (size - 2) <= 2 * total:
        return None
    step = aligned(-(-total // size))
    bounds = [min(rank * step, total) for rank in range(size + 1)]
    return Relay(segments, tuple(Interval(start, stop) for start, stop in pairwise(bounds)))


def gather_numel_sent(cuts: Sequence[int], rank: int) -> int:
    """How many elements `rank` sends in a gather of these segments."""
    size = len(cuts) - 1
    route = relay(cuts)
    if route is None:
        return (cuts[rank + 1] - cuts[rank]) * (size - 1)
    return sum(
        route.from_owner(rank, other).numel + route.to_all(rank, other).numel
        for other in range(size)
        if other != rank
    )


def reduce_numel_sent(cuts: Sequence[int], rank: int) -> tuple[int, int]:
    """How many elements `rank` sends to reduce to these segments: of gradients, and of sums."""
    route = relay(cuts)
    if route is None:
        return cuts[-1] - (cuts[rank + 1] - cuts[rank]), 0
    own = route.slices[rank]
    return cuts[-1] - own.numel, own.numel - own.intersect(route.segments[rank]).numel
