"""Half-open intervals of element positions, and what can be asked of them."""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """The positions `start, start + 1, ..., stop - 1`; empty when `start == stop`."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many positions it holds."""
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """The slice that picks these positions out of a flat tensor."""
        return slice(self.start, self.stop)

    def intersect(self, other: Interval) -> Interval:
        """The positions in both; an empty interval when there are none."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shift(self, offset: int) -> Interval:
        """The same interval, `offset` positions further on."""
        return Interval(self.start + offset, self.stop + offset)
