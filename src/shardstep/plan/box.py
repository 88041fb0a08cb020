"""Intervals of a tensor's memory, boxes of its shape, and the conversion of one to the other.

A piece is an interval of a parameter's elements in memory order. Files address tensors by shape: a
chunk there is a box. An interval is a sequence of a few boxes, for any order of the dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMPARED_PER_BOX = 16
"""Limit of comparisons per box in `overlap`. A regular grid of boxes stays below it."""


class Interval(NamedTuple):
    """The positions `start, start + 1, ..., stop - 1`; empty when `start == stop`."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of positions."""
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """The slice that selects these positions in a flat tensor."""
        return slice(self.start, self.stop)

    def intersect(self, other: Interval) -> Interval:
        """Return the positions in both; an empty interval if there are none."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shift(self, offset: int) -> Interval:
        """Return the same interval, moved by `offset` positions."""
        return Interval(self.start + offset, self.stop + offset)


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: an offset and a size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Return the box that covers all of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in its tensor."""
        return tuple(map(slice, self.offsets, self._stops()))

    def intersect(self, other: Box) -> Box | None:
        """Return the elements in both boxes; None if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = map(min, self._stops(), other._stops())
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> Box:
        """Return the same box with offsets relative to the start of `outer`."""
        offsets = tuple(own - base for own, base in zip(self.offsets, outer.offsets, strict=True))
        return Box(offsets, self.sizes)

    def out_of(self, outer: Box) -> Box:
        """Undo `within(outer)`: return the same box with absolute offsets."""
        offsets = tuple(own + base for own, base in zip(self.offsets, outer.offsets, strict=True))
        return Box(offsets, self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Return True if the box lies inside a tensor of this shape."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= extent
            for start, size, extent in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def _stops(self) -> Iterator[int]:
        return (start + size for start, size in zip(self.offsets, self.sizes, strict=True))


def overlap(found: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two of these boxes of one tensor that share an element; None if no two do.

    Raise `ValueError` if the check would take very long. Boxes of memory intervals never do.
    """
    filled = [box for box in found if box.numel]
    if len(filled) < 2:
        return None
    if not filled[0].offsets:
        return filled[0], filled[1]
    # Sweep along the dimension with the most distinct offsets, so that few boxes are open at a
    # time: the chunks of a thousand ranks are not compared pairwise.
    dims = range(len(filled[0].offsets))
    along = max(dims, key=lambda dim: len({box.offsets[dim] for box in filled}))
    open_boxes: list[Box] = []
    compared = 0
    for box in sorted(filled, key=lambda box: box.offsets[along]):
        start = box.offsets[along]
        open_boxes = [b for b in open_boxes if b.offsets[along] + b.sizes[along] > start]
        compared += len(open_boxes)
        if compared > COMPARED_PER_BOX * (len(filled) + 100):
            raise ValueError(
                f"one tensor is cut into {len(filled):,} chunks, too many to check for overlaps"
            )
        for other in open_boxes:
            if box.intersect(other) is not None:
                return other, box
        open_boxes.append(box)
    return None


def boxes(
    interval: Interval, shape: Sequence[int], stride: Sequence[int]
) -> list[tuple[Interval, Box]]:
    """Split an interval of a dense tensor's memory into boxes, in memory order.

    Each box comes with the memory interval it fills, of which it is a view with the same strides.

    Example:
        >>> [box for _, box in boxes(Interval(2, 12), (4, 4), (4, 1))]
        [Box(offsets=(0, 2), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(2, 4))]
    """
    # From the slowest dimension to the fastest; dimensions of size one may be anywhere.
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], shape[dim] == 1))
    place = [order.index(dim) for dim in range(len(shape))]
    found = []
    for start, offsets, sizes in _cut(interval, [shape[dim] for dim in order]):
        box = Box(tuple(offsets[at] for at in place), tuple(sizes[at] for at in place))
        found.append((Interval(start, start + box.numel), box))
    return found


def _cut(
    interval: Interval, shape: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield first element, offsets and sizes of each box, for a tensor in C order."""
    if math.prod(shape) == interval.numel:
        yield interval.start, (0,) * len(shape), tuple(shape)
        return
    row_numel = math.prod(shape[1:])
    start, stop = interval
    while start < stop:
        row, offset = divmod(start, row_numel)
        rows = (stop - start) // row_numel
        if offset or not rows:  # a part of one row
            end = min(stop, (row + 1) * row_numel)
            base = row * row_numel
            for first, offsets, sizes in _cut(Interval(start - base, end - base), shape[1:]):
                yield base + first, (row, *offsets), (1, *sizes)
        else:
            end = start + rows * row_numel
            yield start, (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
        start = end
