"""Counts calls and bytes of all connections that optimizers make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from doubles import Wrapped, behind_the_door

from shardstep.comm import Comm


class Traffic:
    """The sum over connections, now or since the last `reset`."""

    def __init__(self) -> None:
        self.ledgers: list[Any] = []
        self._calls: Counter[str] = Counter()
        self._nbytes: Counter[str] = Counter()

    def reset(self) -> None:
        self._calls, self._nbytes = Counter(), Counter()
        self._calls, self._nbytes = self.calls, self.nbytes

    @property
    def calls(self) -> Counter[str]:
        """How often each operation was called."""
        total = sum((Counter(ledger.calls) for ledger in self.ledgers), Counter())
        return total - self._calls

    @property
    def nbytes(self) -> Counter[str]:
        """How many bytes this rank has sent, by operation."""
        total = sum((Counter(ledger.nbytes_sent) for ledger in self.ledgers), Counter())
        return total - self._nbytes


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count what optimizers send that are made within."""
    traffic = Traffic()

    class Counted(Wrapped):
        def __init__(self, inner: Comm) -> None:
            super().__init__(inner)
            if all(inner.ledger is not ledger for ledger in traffic.ledgers):
                traffic.ledgers.append(inner.ledger)

    with behind_the_door(Counted):
        yield traffic
