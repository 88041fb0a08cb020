"""The cost of a plan: bytes held and sent by every rank, without a loop over ranks and buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardstep.plan.messages import POOL, message_lengths
from shardstep.plan.placement import Bucket, aligned
from shardstep.plan.plan import ShardPlan
from shardstep.precision import UNCHANGED, MixedPrecision


@dataclass(frozen=True, slots=True)
class StateSize:
    """Bytes of the state of a piece: `fixed`, and `nbytes` for every `PER` elements."""

    fixed: int = 0
    nbytes: int = 0

    PER = 2**16

    def of(self, numel: int) -> int:
        """Return the bytes for a piece of `numel` elements."""
        return self.fixed + self.nbytes * numel // self.PER


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of all trainable parameters: bytes held, and bytes sent per step.

    Attributes:
        nbytes: the elements that the rank updates, in the parameters' dtypes.
        gradient_nbytes: its segments of the reduced gradients, padding included.
        master_nbytes: step tensors of a wider dtype.
        state_nbytes: optimizer state.
        gather_nbytes_sent: sent to gather all buckets.
        reduce_nbytes_sent: sent to reduce all buckets.
    """

    nbytes: int
    gradient_nbytes: int
    master_nbytes: int
    state_nbytes: int
    gather_nbytes_sent: int
    reduce_nbytes_sent: int


class _Sum:
    """A number for each rank. Adding to a run of ranks takes the same time for any length."""

    def __init__(self, world_size: int) -> None:
        self._differences = [0] * (world_size + 1)

    def add(self, first: int, stop: int, value: int) -> None:
        self._differences[first] += value
        self._differences[stop] -= value

    def __iter__(self) -> Iterator[int]:
        return accumulate(self._differences[:-1])


def shares(
    plan: ShardPlan,
    policy: MixedPrecision = UNCHANGED,
    state_sizes: Sequence[StateSize] | None = None,
) -> list[Share]:
    """Return the share of every rank. `state_sizes` has an entry for each parameter."""
    world_size, others = plan.world_size, plan.world_size - 1
    nbytes, gradients, masters, fixed, state, gathered, reduced = (
        _Sum(world_size) for _ in range(7)
    )
    for bucket in plan.training_buckets:
        itemsize, wire = bucket.dtype.itemsize, policy.wire_dtype(bucket.dtype).itemsize
        wide = policy.step_dtype(bucket.dtype)
        reduced.add(0, world_size, bucket.numel * wire)
        segments = [(0, world_size, bucket.cuts[1])]
        if not bucket.even:  # each parameter with its padding
            owners = [(bucket.owner(slot.bucket_offset), slot) for slot in bucket.slots]
            segments = [(owner, owner + 1, slot.footprint.numel) for owner, slot in owners]
        for first, stop, length in segments:
            gradients.add(first, stop, length * wide.itemsize)
            gathered.add(first, stop, length * itemsize * others)
            reduced.add(first, stop, -length * wire)
        for param, first, stop, held in _holdings(bucket):
            nbytes.add(first, stop, held * itemsize)
            if wide != bucket.dtype:
                masters.add(first, stop, aligned(held) * wide.itemsize)
            if state_sizes:
                fixed.add(first, stop, state_sizes[param].fixed)
                state.add(first, stop, state_sizes[param].nbytes * held)
    states = (a + b // StateSize.PER for a, b in zip(fixed, state, strict=True))
    columns = (nbytes, gradients, masters, states, gathered, reduced)
    return [Share(*row) for row in zip(*columns, strict=True)]


def _holdings(bucket: Bucket) -> Iterator[tuple[int, int, int, int]]:
    """Yield a parameter, a run of ranks, and the elements of it that each of these holds."""
    for slot in bucket.slots:
        start, stop = slot.bucket_offset, slot.bucket_offset + slot.numel
        first, last = bucket.owner(start), bucket.owner(max(start, stop - 1))
        if first == last:
            yield slot.param, first, first + 1, slot.numel
            continue
        yield slot.param, first, first + 1, bucket.cuts[first + 1] - start
        yield slot.param, first + 1, last, bucket.cuts[1]
        yield slot.param, last, last + 1, stop - bucket.cuts[last]


def pool_sizes(plan: ShardPlan, policy: MixedPrecision) -> dict[tuple[str, int], int]:
    """Return the bytes of the buffers that gradients are packed into, by device and place.

    Messages take the places in turn, in the order of backward. A buffer is as long as its longest
    message. A single rank needs none.
    """
    sizes: dict[tuple[str, int], int] = {}
    number = 0
    for bucket in reversed(plan.training_buckets) if plan.world_size > 1 else ():
        itemsize = policy.wire_dtype(bucket.dtype).itemsize
        for numel in message_lengths(bucket, itemsize):
            place = (bucket.device, number % POOL)
            sizes[place] = max(sizes.get(place, 0), numel * itemsize)
            number += 1
    return sizes
