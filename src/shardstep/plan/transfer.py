"""The copies of elements that turn one placement into another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardstep.plan.interval import Interval

Holding = Mapping[int, Interval]
"""The elements that one rank holds, by parameter."""


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
