"""How an exchange of segments of different lengths is evened out.

Rank to rank, a segment goes from its owner to each of the others, and its gradients come from each
of them: whoever owns most of a bucket sends, receives and holds up to N - 1 times the bucket, while
the links of the others idle. Such an exchange is relayed: the bucket is cut into a slice for each
rank, whoever owns what lies in it, and the longer the slice, the less of the bucket the rank owns.
To gather, an owner hands each rank its slice, and each rank hands its slice to all others. To
reduce, each rank adds up its slice and hands the sum to the owner.

Either way nobody sends or receives more than the bucket once, whatever the segments; where all are
equal it would be (N - 1) / N of it. Among few ranks that is no gain over segments that differ a
little: there, only what would be three times the bucket for somebody is relayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from shardstep.plan.interval import Interval
from shardstep.plan.placement import ALIGNMENT

FEW_RANKS = 6
"""Measured with segments of a plan that is balanced as a whole: straight exchanges take 0.93 of the
time of relayed ones at 5 ranks, and 1.26 of it at 8."""

MOST_AMONG_FEW = 3
"""How many times the bucket anybody may send or receive where ranks are few."""

MIN_NUMEL = 2**16
"""Below this many elements it is the number of messages that counts, not their length."""


@dataclass(frozen=True, slots=True)
class Relay:
    """The messages of a relayed exchange; a gather and a reduction have two rounds of them each.

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
    """How to relay an exchange of segments with these bounds; None if it goes straight."""
    if isinstance(cuts, range) or cuts[-1] < MIN_NUMEL:
        return None
    return _relay(tuple(cuts))


@lru_cache(maxsize=1024)
def _relay(cuts: tuple[int, ...]) -> Relay | None:
    size, total = len(cuts) - 1, cuts[-1]
    segments = tuple(Interval(start, stop) for start, stop in pairwise(cuts))
    longest = max(segment.numel for segment in segments)
    if size <= FEW_RANKS:
        straight = longest * (size - 1) <= MOST_AMONG_FEW * total
    else:
        straight = longest * size == total
    if straight:
        return None
    # A slice has an (N - 1)th of what its rank does not own. Its rank hands it to N - 1 others, and
    # what it does own to others once: that makes the bucket once, for each rank.
    bounds = [(rank * total - cuts[rank]) // (size - 1) for rank in range(size)]
    bounds = [bound // ALIGNMENT * ALIGNMENT for bound in bounds] + [total]
    return Relay(segments, tuple(Interval(start, stop) for start, stop in pairwise(bounds)))


def gather_numel_sent(cuts: Sequence[int], rank: int, relaying: bool = True) -> int:
    """How many elements `rank` sends in a gather of these segments, relayed where that is less."""
    size = len(cuts) - 1
    route = relay(cuts) if relaying else None
    if route is None:
        return (cuts[rank + 1] - cuts[rank]) * (size - 1)
    return sum(
        route.from_owner(rank, other).numel + route.to_all(rank, other).numel
        for other in range(size)
        if other != rank
    )


def reduce_numel_sent(cuts: Sequence[int], rank: int, relaying: bool = True) -> tuple[int, int]:
    """How many elements `rank` sends to reduce to these segments: of gradients, and of sums."""
    route = relay(cuts) if relaying else None
    if route is None:
        return cuts[-1] - (cuts[rank + 1] - cuts[rank]), 0
    own = route.slices[rank]
    return cuts[-1] - own.numel, own.numel - own.intersect(route.segments[rank]).numel
