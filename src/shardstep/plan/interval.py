"""Half-open intervals of element positions."""

from __future__ import annotations

from typing import NamedTuple


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
