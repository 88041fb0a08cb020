"""The messages in which a bucket travels if it must be packed.

A bucket that is longer than a message, such as one with a large embedding, travels in several: each
has the same stretch of every rank's segment. So a large parameter does not set the size of the
buffers that gradients or parameters are packed into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardstep.plan.box import Interval
from shardstep.plan.placement import ALIGNMENT, MIN_SEGMENT_UNITS, Bucket

MAX_MESSAGE_BYTES = 50 * 2**20
"""The longest message, unless that leaves each of many ranks with very little.

A bucket is closed by the parameter that fills it, so most are a little longer than 25 MiB."""

POOL = 4
"""Number of messages in flight at once. A full pool holds backward up until the oldest arrives:
that bounds the memory and keeps the wire busy."""


@dataclass(frozen=True, slots=True)
class Message:
    """The elements `stretch` of every segment of a bucket, end to end.

    `cuts` are the `world_size + 1` bounds of the ranks' parts in the message.
    """

    bucket: Bucket
    stretch: Interval
    cuts: Sequence[int]

    @property
    def numel(self) -> int:
        """Length of the message, including padding."""
        return self.cuts[-1]

    def own(self, group_rank: int) -> Interval:
        """Return the part of `group_rank`'s segment that this message brings."""
        segment = self.bucket.segment(group_rank)
        return self.stretch.intersect(Interval(0, segment.numel))

    def parts(self) -> Iterator[tuple[int, int, Interval, int]]:
        """Yield each rank, the number of each slot, its elements here, and their offset here."""
        for group_rank, (start, stop) in enumerate(pairwise(self.cuts)):
            first = self.bucket.cuts[group_rank] + self.stretch.start
            here = Interval(first, first + stop - start)
            for number, held in self.bucket.slots_in(here):
                if held.numel:
                    elements = held.shift(-self.bucket.slots[number].bucket_offset)
                    yield group_rank, number, elements, start + held.start - first


def messages_of(bucket: Bucket, itemsize: int) -> list[Message]:
    """Divide a bucket into messages; `itemsize` is that of an element on the wire."""
    world_size = len(bucket.cuts) - 1
    stretches, lengths = _divide(bucket, itemsize)
    if len(stretches) == 1:
        return [Message(bucket, Interval(0, bucket.numel), bucket.cuts)]
    found = []
    for stretch in stretches:
        cuts: Sequence[int] = range(0, world_size * stretch.numel + 1, stretch.numel)
        if not bucket.even:
            cuts = tuple(accumulate((_held(length, stretch) for length in lengths), initial=0))
        found.append(Message(bucket, stretch, cuts))
    return found


def message_lengths(bucket: Bucket, itemsize: int) -> list[int]:
    """Return the length of each message, as fast for many ranks of which few own anything."""
    stretches, lengths = _divide(bucket, itemsize)
    if len(stretches) == 1:
        return [bucket.numel]
    if bucket.even:
        return [(len(bucket.cuts) - 1) * stretch.numel for stretch in stretches]
    owners = [length for length in lengths if length]
    return [sum(_held(length, stretch) for length in owners) for stretch in stretches]


def _divide(bucket: Bucket, itemsize: int) -> tuple[list[Interval], list[int]]:
    """Return the stretch of each message, and the lengths of segments: one if all are equal."""
    floor = (len(bucket.cuts) - 1) * ALIGNMENT * MIN_SEGMENT_UNITS
    count = -(-bucket.numel // max(floor, MAX_MESSAGE_BYTES // itemsize))
    if count <= 1:
        return [Interval(0, bucket.numel)], []
    cuts = bucket.cuts[:2] if bucket.even else bucket.cuts  # with many ranks, that is long
    lengths = [stop - start for start, stop in pairwise(cuts)]
    longest = max(lengths)
    step = -(-longest // (count * ALIGNMENT)) * ALIGNMENT
    starts = range(0, longest, step)
    return [Interval(start, min(start + step, longest)) for start in starts], lengths


def _held(length: int, stretch: Interval) -> int:
    """Return the number of elements in a stretch of a segment of this length."""
    return min(length, stretch.stop) - min(length, stretch.start)
