"""The plan: the owner of every element, equal on every rank, and the copies from plan to plan."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from shardstep.plan.box import Interval
from shardstep.plan.placement import ALIGNMENT, Bucket, Piece, place
from shardstep.plan.spec import Layout, ParamSpec

MIN_BUCKET_BYTES = {"gloo": 2**20, "nccl": 8 * 2**20}
"""The smallest default bucket by backend. Over Gloo a message costs little. Launching a collective
costs as much as some MiB."""

MAX_BUCKET_BYTES = 25 * 2**20

Holding = Mapping[int, Interval]
"""The elements that one rank holds, by parameter."""


def default_bucket_bytes(specs: Sequence[ParamSpec], least: int = MIN_BUCKET_BYTES["gloo"]) -> int:
    """Return a sixteenth of the trainable bytes, so that buckets can overlap.

    It is at least `least`, which depends on the cost of a launch, and at most 25 MiB. Whole tensors
    have a launch per owner: where a launch costs something, their buckets are of 25 MiB.
    """
    if least > MIN_BUCKET_BYTES["gloo"] and any(spec.layout == "whole" for spec in specs):
        return MAX_BUCKET_BYTES
    trainable = sum(spec.nbytes for spec in specs if spec.trainable)
    return min(max(trainable // 16, least), MAX_BUCKET_BYTES)


@dataclass(frozen=True)
class ShardPlan:
    """The position of every parameter in the buckets, and every rank's share of them.

    Made with `ShardPlan.make`. The constructor checks that every element has exactly one owner.
    """

    specs: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    world_size: int

    @classmethod
    def make(
        cls,
        specs: Sequence[ParamSpec],
        world_size: int,
        layout: Layout | None = None,
        bucket_bytes: int | None = None,
    ) -> ShardPlan:
        """Place `specs` for `world_size` ranks, in each spec's layout if `layout` is None.

        Example:
            >>> plan = ShardPlan.make([ParamSpec.of("weight", (1000, 300))], world_size=4)
            >>> [plan.numel(rank) for rank in range(4)]
            [75008, 75008, 75008, 74976]
        """
        if world_size < 1:
            raise ValueError(f"a plan needs at least one rank, not world_size={world_size}")
        if bucket_bytes is None:
            bucket_bytes = default_bucket_bytes(specs)
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
        if layout is not None:
            if layout not in get_args(Layout):
                raise ValueError(f"layout must be one of {[*get_args(Layout)]}, not {layout!r}")
            specs = [replace(spec, layout=layout) for spec in specs]
        specs = tuple(specs)
        return cls(specs, place(specs, world_size, bucket_bytes), world_size)

    def __post_init__(self) -> None:
        seen: set[int] = set()
        for position, bucket in enumerate(self.buckets):
            where = f"bucket {position}"
            _require(bucket.index == position, where, f"has index {bucket.index}")
            _require(len(bucket.cuts) == self.world_size + 1, where, "has too few or many cuts")
            _require(bucket.cuts[0] == 0, where, "does not start at 0")
            # A range has two cuts to check. With many ranks, most segments of a bucket are empty.
            cuts = bucket.cuts[:2] if bucket.even else bucket.cuts
            _require([*cuts] == sorted(cuts), where, "has cuts out of order")
            on_units = all(cut % ALIGNMENT == 0 for cut in {*cuts})
            _require(on_units, where, "is cut off an alignment unit")
            end = 0
            for slot in bucket.slots:
                spec = self.specs[slot.param]
                _require(slot.param not in seen, spec, "is placed twice")
                seen.add(slot.param)
                _require(slot.numel == spec.numel, spec, f"is placed with {slot.numel} elements")
                _require(slot.bucket_offset % ALIGNMENT == 0, spec, "starts off a unit")
                _require(slot.bucket_offset >= end, spec, "overlaps the parameter before it")
                end = slot.footprint.stop
                _require(end <= bucket.numel, where, "is too short for its parameters")
                fits = (spec.dtype, spec.device) == (bucket.dtype, bucket.device)
                _require(fits, spec, f"lies in a {bucket.dtype} bucket on {bucket.device}")
                _require(spec.trainable is not bucket.frozen, spec, "lies in the wrong bucket")
                if spec.layout == "whole":
                    owner = bucket.owner(slot.bucket_offset)
                    _require(end <= bucket.segment(owner).stop, spec, "is cut in two")
        for index, spec in enumerate(self.specs):
            _require(index in seen, spec, "is placed nowhere")

    def pieces(self, group_rank: int) -> Iterator[Piece]:
        """Yield the pieces of `group_rank`, frozen parameters included, bucket by bucket."""
        for bucket in self.buckets:
            yield from bucket.pieces(group_rank)

    def intervals(self, group_rank: int) -> dict[int, Interval]:
        """Return the elements that `group_rank` owns, by parameter; other parameters are absent."""
        return {piece.param: piece.param_interval for piece in self.pieces(group_rank)}

    @cached_property
    def holdings(self) -> Sequence[dict[int, Interval]]:
        """The elements that each rank owns, by parameter."""
        return [self.intervals(rank) for rank in range(self.world_size)]

    def numel(self, group_rank: int) -> int:
        """Return the number of trainable elements that `group_rank` owns."""
        pieces = (piece for bucket in self.training_buckets for piece in bucket.pieces(group_rank))
        return sum(piece.param_interval.numel for piece in pieces)

    @cached_property
    def layout(self) -> str:
        """The layout of all parameters; `"mixed"` if they differ."""
        found = {spec.layout for spec in self.specs}
        return found.pop() if len(found) == 1 else "mixed" if found else "sliced"

    @cached_property
    def training_buckets(self) -> tuple[Bucket, ...]:
        """The buckets that are communicated."""
        return tuple(bucket for bucket in self.buckets if not bucket.frozen)

    @cached_property
    def fingerprint(self) -> str:
        """A digest that is equal on two ranks exactly if their plans are equal."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Copy:
    """A move of elements of one parameter from one rank to another, which may be the same rank."""

    param: int
    param_interval: Interval
    source: int
    target: int


def transfers(held: Sequence[Holding], wanted: Sequence[Holding]) -> Iterator[Copy]:
    """Yield the copies that give every rank the elements it wants. Each is held by one rank.

    Both sequences are indexed by group rank. Copies are ordered by source, target and parameter, so
    blocking sends and receives cannot deadlock.
    """
    owners: dict[int, list[tuple[Interval, int]]] = {}
    for source, holding in enumerate(held):
        for param, interval in holding.items():
            owners.setdefault(param, []).append((interval, source))
    copies: list[Copy] = []
    for target, holding in enumerate(wanted):
        for param, interval in holding.items():
            for have, source in owners.get(param, ()):
                part = have.intersect(interval)
                if part.numel or have == interval:  # an empty parameter has one owner too
                    copies.append(Copy(param, part, source, target))
    copies.sort(key=lambda c: (c.source, c.target, c.param, c.param_interval))
    yield from copies


def _require(holds: bool, what: object, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"this is not a plan: {what} {otherwise}")
