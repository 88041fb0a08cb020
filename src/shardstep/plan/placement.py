"""Where each parameter lies: forming buckets, and placing them `sliced` or `whole`.

Parameters of one dtype, device and layout are laid into buckets in the order the optimizer was
given them. A bucket is then cut into one segment per rank:

- `sliced` cuts it evenly, wherever the cuts fall. No rank holds more than the mean by as much as
  one alignment unit per bucket; the last ranks may hold less.
- `whole` first deals every parameter to a rank, the largest first and each to the rank that has
  least, over all buckets together; a bucket then holds rank 0's parameters, rank 1's and so on,
  and is cut between them. Segments differ in length and no room is lost to padding. What a rank
  has is the larger of two fractions: of the bytes, and of the cost of a step.

Buckets come in the order of their first parameters, those of both layouts among each other: the
gradients of a bucket are complete in backward when that of its first parameter is there.

Frozen parameters are dealt the same way but into buckets of their own, which are never
communicated and do not count in the balance: somebody has to keep the state they may have.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardstep.plan.interval import Interval
from shardstep.plan.spec import Layout, ParamSpec

ALIGNMENT = 64
"""Parameters and cuts start at multiples of this many elements.

Vector kernels treat the last lanes of a tensor differently: a slice cut at an odd element can
differ from the same elements of the whole in the last bit. Cut at multiples of 64 elements from the
parameter's start they agree, for every dtype and vector width there is.
"""

MIN_SEGMENT_UNITS = 128
"""Buckets are made large enough that an even segment has this many alignment units, so that
rounding a cut up to the next unit costs less than one percent at any world size."""


def aligned(numel: int) -> int:
    """`numel` rounded up to whole alignment units; at least one, so that even an empty parameter
    lies in exactly one rank's segment."""
    return max(1, -(-numel // ALIGNMENT)) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one whole parameter lies in its bucket."""

    param: int
    bucket_offset: int
    numel: int

    @property
    def footprint(self) -> Interval:
        """The stretch of the bucket it occupies, padding up to the next unit included."""
        return Interval(self.bucket_offset, self.bucket_offset + aligned(self.numel))


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in one rank's segment of one bucket."""

    param: int
    bucket: int
    group_rank: int
    param_interval: Interval
    bucket_offset: int
    entire: bool

    @property
    def bucket_interval(self) -> Interval:
        """Where the piece lies in its bucket."""
        return Interval(self.bucket_offset, self.bucket_offset + self.param_interval.numel)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat buffer of one dtype on one device, cut into a segment per rank.

    Attributes:
        index: its place in the plan, which is also the order in which buckets are communicated.
        dtype: of all its parameters.
        device: as in `ParamSpec.device`.
        slots: its parameters, by ascending offset.
        cuts: `world_size + 1` ascending bucket offsets; a `range` when they are even.
        frozen: whether it holds parameters that do not train and are not communicated.
    """

    index: int
    dtype: torch.dtype
    device: str
    slots: tuple[Slot, ...]
    cuts: Sequence[int]
    frozen: bool

    @property
    def numel(self) -> int:
        """Length of the buffer, padding included."""
        return self.cuts[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, padding included."""
        return self.numel * self.dtype.itemsize

    @property
    def even(self) -> bool:
        """Whether all segments have the same length."""
        return isinstance(self.cuts, range)

    def segment(self, group_rank: int) -> Interval:
        """The stretch of the buffer that `group_rank` owns."""
        return Interval(self.cuts[group_rank], self.cuts[group_rank + 1])

    def pieces(self, group_rank: int) -> Iterator[Piece]:
        """The parts of parameters that lie in `group_rank`'s segment, by ascending offset."""
        segment = self.segment(group_rank)
        if segment.numel == 0:
            return
        first = bisect.bisect_right(self.slots, segment.start, key=lambda s: s.footprint.stop)
        for slot in self.slots[first:]:
            if slot.bucket_offset >= segment.stop:
                return
            held = Interval(slot.bucket_offset, slot.bucket_offset + slot.numel).intersect(segment)
            # Behind the parameter's last element there may be padding that the next rank owns.
            if held.numel or not slot.numel:
                yield Piece(
                    param=slot.param,
                    bucket=self.index,
                    group_rank=group_rank,
                    param_interval=held.shift(-slot.bucket_offset),
                    bucket_offset=held.start,
                    entire=held.numel == slot.numel,
                )


@dataclass(slots=True)
class _Draft:
    """A bucket that is still being filled."""

    dtype: torch.dtype
    device: str
    frozen: bool
    layout: Layout
    params: list[int]
    numel: int = 0


def _form(specs: Sequence[ParamSpec], world_size: int, bucket_bytes: int) -> list[_Draft]:
    """Gather parameters into buckets in the order given, closing a bucket once it is full."""
    drafts: list[_Draft] = []
    open_drafts: dict[tuple[torch.dtype, str, bool, Layout], _Draft] = {}
    floor = world_size * ALIGNMENT * MIN_SEGMENT_UNITS
    for index, spec in enumerate(specs):
        key = (spec.dtype, spec.device, not spec.trainable, spec.layout)
        draft = open_drafts.get(key)
        if draft is None:
            draft = open_drafts[key] = _Draft(*key, params=[])
            drafts.append(draft)
        draft.params.append(index)
        draft.numel += aligned(spec.numel)
        if draft.numel >= max(floor, bucket_bytes // spec.dtype.itemsize):
            del open_drafts[key]
    # Training buckets first: a bucket's index is then its place in the order of communication.
    return sorted(drafts, key=lambda draft: draft.frozen)


def _lay(specs: Sequence[ParamSpec], params: Sequence[int], start: int = 0) -> Iterator[Slot]:
    """Lay parameters back to back, each from the next alignment unit on."""
    for param in params:
        yield Slot(param, start, specs[param].numel)
        start += aligned(specs[param].numel)


def place(specs: Sequence[ParamSpec], world_size: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Lay the parameters into buckets and cut these, each parameter in its own layout."""
    owner = _deal(specs, world_size)
    buckets = []
    for index, draft in enumerate(_form(specs, world_size, bucket_bytes)):
        if draft.layout == "sliced":
            slots, cuts = _cut_evenly(specs, draft, world_size)
        else:
            slots, cuts = _cut_between(specs, draft, world_size, owner)
        buckets.append(Bucket(index, draft.dtype, draft.device, slots, cuts, draft.frozen))
    return tuple(buckets)


def _cut_evenly(
    specs: Sequence[ParamSpec], draft: _Draft, world_size: int
) -> tuple[tuple[Slot, ...], Sequence[int]]:
    """Cuts at equal distances, through parameters where they fall so."""
    segment_numel = aligned(-(-draft.numel // world_size))
    cuts = range(0, segment_numel * world_size + 1, segment_numel)
    return tuple(_lay(specs, draft.params)), cuts


def _cut_between(
    specs: Sequence[ParamSpec], draft: _Draft, world_size: int, owner: dict[int, int]
) -> tuple[tuple[Slot, ...], Sequence[int]]:
    """Each rank's parameters side by side, and cuts between these."""
    held: list[list[int]] = [[] for _ in range(world_size)]
    for param in draft.params:
        held[owner[param]].append(param)
    slots: list[Slot] = []
    cuts = [0]
    for params in held:
        slots.extend(_lay(specs, params, cuts[-1]))
        cuts.append(slots[-1].footprint.stop if params else cuts[-1])
    return tuple(slots), tuple(cuts)


def _deal(specs: Sequence[ParamSpec], world_size: int) -> dict[int, int]:
    """The rank of each parameter that is not cut.

    The largest come first, each goes to the rank that has least with it. Large is what takes a
    large fraction of all bytes or of the whole cost, whichever is larger, and so is what a rank
    has. Then in bytes and in cost alike no rank has more than twice the mean and one parameter; and
    no more than the mean and one parameter where the cost goes by the bytes.

    Trainable and frozen parameters are dealt as two separate hands, so that how much is frozen has
    no say in how the training work is balanced.
    """
    owner: dict[int, int] = {}
    for trainable in (True, False):
        hand = [
            index
            for index, spec in enumerate(specs)
            if spec.trainable is trainable and spec.layout == "whole"
        ]
        costs = {index: specs[index].cost or specs[index].nbytes for index in hand}
        all_bytes = sum(specs[index].nbytes for index in hand)
        all_cost = sum(costs.values())
        # Fractions of the whole, over the common denominator `all_bytes * all_cost`.
        weights = {
            index: (specs[index].nbytes * all_cost, costs[index] * all_bytes) for index in hand
        }
        # Ties go to the parameter that came first and to the lowest rank: every rank deals alike.
        hand.sort(key=lambda index: (-max(weights[index]), -sum(weights[index]), index))
        loads = [(0, group_rank, (0, 0)) for group_rank in range(world_size)]
        for index in hand:
            owner[index] = _give(loads, weights[index])
    return owner


def _give(loads: list[tuple[int, int, tuple[int, int]]], weight: tuple[int, int]) -> int:
    """Add `weight` to the rank that has least with it; says which it is.

    `loads` is a heap of (the larger of a rank's two fractions, rank, its two fractions).
    """
    best: tuple[int, int, int] | None = None
    looked_at: list[tuple[int, int, tuple[int, int]]] = []
    # Both fractions grow by the smaller weight at least: most ranks need not be looked at.
    while loads and (best is None or loads[0][0] + min(weight) < best[0]):
        looked_at.append(heapq.heappop(loads))
        _, group_rank, load = looked_at[-1]
        after = (load[0] + weight[0], load[1] + weight[1])
        mine = (max(after), sum(after), group_rank)
        best = mine if best is None else min(best, mine)
    assert best is not None
    for larger, group_rank, load in looked_at:
        if group_rank == best[2]:
            load = (load[0] + weight[0], load[1] + weight[1])
            larger = max(load)
        heapq.heappush(loads, (larger, group_rank, load))
    return best[2]
