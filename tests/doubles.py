"""Doubles of communication that stand behind the door, each strict about one thing.

Each wraps a real `Comm` and does what that does, less kindly: a result is nowhere to be seen before
`wait()`, operations finish in any order, every call is written down. They nest.

    opt._comm = Counting(LateArrival(opt._comm))
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from shardstep.comm import Comm, Pending


class Wrapped:
    """Everything else as the wrapped one does it."""

    def __init__(self, inner: Comm) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def spoil(buffer: torch.Tensor) -> None:
    """Fill with what no test takes for a result: NaN, or all bits set."""
    if buffer.is_floating_point() or buffer.is_complex():
        buffer.fill_(float("nan"))
    else:
        buffer.view(torch.uint8).fill_(255)


class LateArrival(Wrapped):
    """A gather whose buffer is NaN, this rank's segment included, until it is waited for.

    What is sent is what was in the segment at the call: writing to it in flight has no effect.
    """

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Pending:
        hidden = buffer.clone()
        pending = self._inner.all_gather(hidden, cuts)
        spoil(buffer)
        return _Late(pending, hidden, buffer)


class _Late:
    def __init__(self, pending: Pending, hidden: torch.Tensor, buffer: torch.Tensor) -> None:
        self._pending = pending
        self._hidden = hidden
        self._buffer = buffer
        self.landed = False

    def wait(self) -> None:
        if not self.landed:
            self._pending.wait()
            self._buffer.copy_(self._hidden)
            self.landed = True


class AnyOrder(Wrapped):
    """Gathers that finish in an order of their own: some long before anybody waits for them.

    Whenever one is waited for, others that are in flight land first, in shuffled order. A buffer
    that is used for something else in the meantime is overwritten.
    """

    def __init__(self, inner: Comm, seed: int) -> None:
        super().__init__(LateArrival(inner))
        self._random = random.Random(seed)
        self._in_flight: list[_Late] = []
        self.landed_early = 0

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Pending:
        pending = self._inner.all_gather(buffer, cuts)
        assert isinstance(pending, _Late)
        self._in_flight.append(pending)
        return _Shuffled(self, pending)

    def land(self, wanted: _Late) -> None:
        self._random.shuffle(self._in_flight)
        while not wanted.landed:
            next_one = self._in_flight.pop()
            next_one.wait()
            self.landed_early += next_one is not wanted


class _Shuffled:
    def __init__(self, comm: AnyOrder, pending: _Late) -> None:
        self._comm = comm
        self._pending = pending

    def wait(self) -> None:
        self._comm.land(self._pending)


class Counting(Wrapped):
    """Writes down every gather that was launched, and which of them were waited for."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.launched: list[tuple[int, ...]] = []
        self.waited: list[int] = []
        self.most_in_flight = 0

    @property
    def unawaited(self) -> list[int]:
        return sorted(set(range(len(self.launched))) - set(self.waited))

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Pending:
        number = len(self.launched)
        self.launched.append(tuple(cuts))
        self.most_in_flight = max(self.most_in_flight, len(self.unawaited))
        return _Counted(self, number, self._inner.all_gather(buffer, cuts))


class _Counted:
    def __init__(self, comm: Counting, number: int, pending: Pending) -> None:
        self._comm = comm
        self._number = number
        self._pending = pending

    def wait(self) -> None:
        self._pending.wait()
        self._comm.waited.append(self._number)
