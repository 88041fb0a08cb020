"""The placement of parameters in buckets, `sliced` or `whole`.

Parameters of one dtype, device and layout fill buckets, from the last to the first. Each bucket is
then cut into one segment per rank:

- `sliced` cuts it evenly, wherever the cuts fall. No rank exceeds the mean by one alignment unit
  per bucket or more; the last ranks may hold less.
- `whole` first deals every parameter to a rank, over all buckets. A bucket then holds rank 0's
  parameters, rank 1's and so on, and is cut between them.

Buckets are ordered by their first parameters. In backward, a bucket's gradients are complete when
the gradient of its first parameter is ready.

Frozen parameters get separate buckets, which decide the owner of their state. They are never
communicated and do not count in the balance.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardstep.plan.box import Interval
from shardstep.plan.spec import Layout, ParamSpec

ALIGNMENT = 64
"""Parameters and cuts start at multiples of this many elements.

Vector kernels treat the last lanes of a tensor differently: a slice cut at an odd element can
differ in the last bit from the same elements of the whole tensor. Slices cut at multiples of 64
elements from the parameter's start agree, for every dtype and vector width.
"""

FIRST_BUCKET_BYTES = 2**20
"""The size of the bucket whose gradients come first, as under DDP."""

MIN_SEGMENT_UNITS = 128
"""The smallest even segment, in alignment units. With it, rounding a cut up to the next unit costs
less than one percent at any world size."""


def aligned(numel: int) -> int:
    """Round up to alignment units, at least one: even an empty parameter has one owner."""
    return max(1, -(-numel // ALIGNMENT)) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of one whole parameter in its bucket."""

    param: int
    bucket_offset: int
    numel: int

    @property
    def footprint(self) -> Interval:
        """The interval of the bucket it occupies, including padding up to the next unit."""
        return Interval(self.bucket_offset, self.bucket_offset + aligned(self.numel))


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter in one rank's segment of one bucket."""

    param: int
    bucket: int
    param_interval: Interval
    bucket_offset: int
    entire: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat buffer of one dtype on one device, cut into a segment per rank.

    Buckets are communicated in the order of `index`; frozen ones are not. `cuts` are
    `world_size + 1` ascending offsets, a `range` if they are even.
    """

    index: int
    dtype: torch.dtype
    device: str
    slots: tuple[Slot, ...]
    cuts: Sequence[int]
    frozen: bool

    @property
    def numel(self) -> int:
        """Length of the buffer, including padding."""
        return self.cuts[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, including padding."""
        return self.numel * self.dtype.itemsize

    @property
    def even(self) -> bool:
        """True if all segments have the same length."""
        return isinstance(self.cuts, range)

    def segment(self, group_rank: int) -> Interval:
        """Return the interval of the buffer that `group_rank` owns."""
        return Interval(self.cuts[group_rank], self.cuts[group_rank + 1])

    def owner(self, offset: int) -> int:
        """Return the rank whose segment has the element at `offset`."""
        if isinstance(self.cuts, range):
            return offset // self.cuts.step
        return bisect.bisect_right(self.cuts, offset) - 1

    def pieces(self, group_rank: int) -> Iterator[Piece]:
        """Yield the pieces in `group_rank`'s segment, by ascending offset."""
        for number, held in self.slots_in(self.segment(group_rank)):
            slot = self.slots[number]
            yield Piece(
                param=slot.param,
                bucket=self.index,
                param_interval=held.shift(-slot.bucket_offset),
                bucket_offset=held.start,
                entire=held.numel == slot.numel,
            )

    def slots_in(self, interval: Interval) -> Iterator[tuple[int, Interval]]:
        """Yield the number of each slot in an interval of the buffer, and its elements there."""
        if interval.numel == 0:  # with many ranks, most segments are empty
            return
        number = bisect.bisect_right(self.slots, interval.start, key=lambda s: s.footprint.stop)
        while number < len(self.slots) and self.slots[number].bucket_offset < interval.stop:
            slot = self.slots[number]
            held = Interval(slot.bucket_offset, slot.bucket_offset + slot.numel).intersect(interval)
            # The next interval may begin with the padding after the parameter's last element.
            if held.numel or not slot.numel:
                yield number, held
            number += 1


Kind = tuple[torch.dtype, str, bool, Layout]
"""The properties that parameters in one bucket have in common."""


def _form(specs: Sequence[ParamSpec], world_size: int, bucket_bytes: int) -> list[list[int]]:
    """Fill buckets with the parameters, from the last to the first, closing each when it is full.

    That is the order of backward. The first bucket of each kind is small, to be sent soon. The
    last takes the rest, and forward waits for it first. DDP divides gradients in
    the same way.
    """
    formed: list[list[int]] = []
    filling: dict[Kind, list[int]] = {}
    numel: Counter[Kind] = Counter()
    full: dict[Kind, int] = {}
    floor = world_size * ALIGNMENT * MIN_SEGMENT_UNITS
    for index in reversed(range(len(specs))):
        spec = specs[index]
        kind = (spec.dtype, spec.device, spec.trainable, spec.layout)
        if kind not in filling:
            formed.append(filling.setdefault(kind, []))
        filling[kind].insert(0, index)
        numel[kind] += aligned(spec.numel)
        limit = full.get(kind, min(bucket_bytes, FIRST_BUCKET_BYTES))
        if numel[kind] >= max(floor, limit // spec.dtype.itemsize):
            full[kind] = bucket_bytes
            del filling[kind], numel[kind]
    # Training buckets come first, so that a bucket's index gives the order of communication.
    return sorted(formed, key=lambda params: (not specs[params[0]].trainable, params[0]))


def place(specs: Sequence[ParamSpec], world_size: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Place parameters in buckets, and cut the buckets by the layout of their parameters."""
    owner = _deal(specs, world_size)
    buckets = []
    for index, params in enumerate(_form(specs, world_size, bucket_bytes)):
        first = specs[params[0]]
        whole = first.layout == "whole"
        slots: list[Slot] = []
        cuts = [0]
        end = 0
        for param in sorted(params, key=lambda param: (owner[param], param)) if whole else params:
            if whole:
                cuts += [end] * (owner[param] + 1 - len(cuts))
            slots.append(Slot(param, end, specs[param].numel))
            end = slots[-1].footprint.stop
        cuts += [end] * (world_size + 1 - len(cuts))
        step = aligned(-(-end // world_size))
        bounds = tuple(cuts) if whole else range(0, step * world_size + 1, step)
        frozen = not first.trainable
        buckets.append(Bucket(index, first.dtype, first.device, tuple(slots), bounds, frozen))
    return tuple(buckets)


def _deal(specs: Sequence[ParamSpec], world_size: int) -> dict[int, int]:
    """Assign each `whole` parameter to a rank, the largest first, trainable and frozen separately.

    A parameter's weight is the larger of two fractions: of all bytes, and of the whole cost. So is
    a rank's load. No rank gets more than twice the mean plus one parameter, in bytes and in cost.
    If the cost is the bytes, no rank gets more than the mean plus one parameter.
    """
    owner: dict[int, int] = {}
    for trainable in (True, False):
        hand = [n for n, s in enumerate(specs) if s.trainable is trainable and s.layout == "whole"]
        costs = {index: specs[index].cost or specs[index].nbytes for index in hand}
        all_bytes = sum(specs[index].nbytes for index in hand)
        all_cost = sum(costs.values())
        # Fractions of the total, over the common denominator `all_bytes * all_cost`.
        weights = {n: (specs[n].nbytes * all_cost, costs[n] * all_bytes) for n in hand}
        # Ties go to the first parameter and the lowest rank, so all ranks deal the same way.
        hand.sort(key=lambda index: (-max(weights[index]), -sum(weights[index]), index))
        ranks_of = {(0, 0): list(range(world_size))}
        for index in hand:
            owner[index] = _give(ranks_of, weights[index])
    return owner


Load = tuple[int, int]
"""A rank's fractions of all bytes and of the whole cost."""


def _give(ranks_of: dict[Load, list[int]], weight: Load) -> int:
    """Add `weight` to the rank with the smallest load after it, and return that rank.

    `ranks_of` has a heap of ranks for each load. Many ranks of a large group have the same load.
    """

    def after(load: Load) -> Load:
        return load[0] + weight[0], load[1] + weight[1]

    def order(load: Load) -> tuple[int, int, int]:
        return max(after(load)), sum(after(load)), ranks_of[load][0]

    load = min(ranks_of, key=order)
    group_rank = heapq.heappop(ranks_of[load])
    if not ranks_of[load]:
        del ranks_of[load]
    heapq.heappush(ranks_of.setdefault(after(load), []), group_rank)
    return group_rank
