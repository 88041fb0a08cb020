"""From one placement to another: which elements go from which rank to which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardstep.plan.interval import Interval

Holding = Mapping[int, Interval]
"""What one rank holds: for each parameter, which of its elements."""


@dataclass(frozen=True, slots=True)
class Copy:
    """These elements of this parameter go from one rank to another (or stay, if they are equal)."""

    param: int
    param_interval: Interval
    source: int
    target: int


def transfers(held: Sequence[Holding], wanted: Sequence[Holding]) -> Iterator[Copy]:
    """The copies that give every rank what it wants out of what the ranks hold.

    Both sequences are indexed by group rank. Copies come ordered by source, then target, then
    parameter: an order in which blocking sends and receives cannot wait for each other in a circle.
    Elements held by several ranks are taken from the lowest of them.
    """
    owners: dict[int, list[tuple[Interval, int]]] = {}
    for source, holding in enumerate(held):
        for param, interval in holding.items():
            owners.setdefault(param, []).append((interval, source))
    copies: list[Copy] = []
    for target, holding in enumerate(wanted):
        for param, interval in holding.items():
            missing = [interval]
            for have, source in owners.get(param, ()):
                if not interval.numel and have == interval:
                    copies.append(Copy(param, interval, source, target))
                    break
                left: list[Interval] = []
                for gap in missing:
                    part = have.intersect(gap)
                    if part.numel:
                        copies.append(Copy(param, part, source, target))
                    rest = (Interval(gap.start, part.start), Interval(part.stop, gap.stop))
                    left += [each for each in rest if each.numel] if part.numel else [gap]
                missing = left
    copies.sort(key=lambda c: (c.source, c.target, c.param, c.param_interval))
    yield from copies
