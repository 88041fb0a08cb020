"""Doubles of `Comm`, each strict about one thing.

Each wraps a real `Comm`. Results appear only at `wait()`, operations finish in any order, or every
call is recorded. Doubles nest.

    with behind_the_door(LateArrival):
        opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from shardstep import comm, optimizer
from shardstep.comm import Comm, Work


@contextmanager
def behind_the_door(double: Callable[[Comm], Comm]) -> Iterator[list[Comm]]:
    """Make optimizers communicate through doubles, and yield the list of these."""
    made: list[Comm] = []

    def connect(*args: Any) -> Comm:
        made.append(double(comm.connect(*args)))
        return made[-1]

    with mock.patch.object(optimizer, "connect", connect):
        yield made


class Wrapped:
    """A `Comm` that passes every call on."""

    def __init__(self, inner: Comm) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def new_connection(self, *options: Any) -> Comm:
        """Return the same double over new connections."""
        return type(self)(self._inner.new_connection(*options))

    def new_pair(self) -> tuple[Comm, Comm]:
        """Return the same doubles over a new pair."""
        one, other = map(type(self), self._inner.new_pair())
        one.other, other.other = other, one
        return one, other

    def queue(self, number: int) -> Comm:
        """Return this double or the other of the pair."""
        return self if self._inner.queue(number) is self._inner else self.other


def spoil(buffer: torch.Tensor) -> None:
    """Fill with a value that no test expects: NaN, or all bits set."""
    if buffer.is_floating_point() or buffer.is_complex():
        buffer.fill_(float("nan"))
    else:
        buffer.view(torch.uint8).fill_(255)


class LateArrival(Wrapped):
    """Fills outputs with NaN until `wait()`, this rank's segment included.

    Inputs are read at the call: writing to them in flight has no effect.
    """

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int], *operation: Any) -> Work:
        hidden = buffer.clone()
        pending = self._inner.all_gather(hidden, cuts, *operation)
        spoil(buffer)
        return _Late(pending, hidden, buffer)

    def reduce_scatter(self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        hidden = torch.empty_like(out)
        pending = self._inner.reduce_scatter(buffer.clone(), cuts, hidden)
        spoil(buffer)  # it may not be read, or counted on, until the operation is over
        spoil(out)
        return _Late(pending, hidden, out)


class _Late:
    def __init__(self, pending: Work, hidden: torch.Tensor, buffer: torch.Tensor) -> None:
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
    """Finishes operations in shuffled order, some long before their `wait()`.

    A `wait()` lands others in flight first, in another order on every rank. This overwrites buffers
    that are reused too early.
    """

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner if isinstance(inner, LateArrival) else LateArrival(inner))
        self._random = random.Random(inner.group_rank)
        self._in_flight: list[_Late] = []
        self.landed_early = 0

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int], *operation: Any) -> Work:
        return self._fly(self._inner.all_gather(buffer, cuts, *operation))

    def reduce_scatter(self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        return self._fly(self._inner.reduce_scatter(buffer, cuts, out))

    def _fly(self, pending: Work) -> Work:
        assert isinstance(pending, _Late)
        self._in_flight.append(pending)
        return _Shuffled(self, pending)

    def land(self, wanted: _Late) -> None:
        self._random.shuffle(self._in_flight)
        while not wanted.landed:
            next_one = self._in_flight[-1]
            next_one.wait()  # may raise, and be waited for again
            self._in_flight.pop()
            self.landed_early += next_one is not wanted


class _Shuffled:
    def __init__(self, comm: AnyOrder, pending: _Late) -> None:
        self._comm = comm
        self._pending = pending

    def wait(self) -> None:
        self._comm.land(self._pending)


class Counting(Wrapped):
    """Records every gather that was launched, and those that were waited for."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.launched: list[tuple[int, ...]] = []
        self.waited: list[int] = []
        self.most_in_flight = 0

    @property
    def unawaited(self) -> list[int]:
        return sorted(set(range(len(self.launched))) - set(self.waited))

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int], *operation: Any) -> Work:
        number = len(self.launched)
        self.launched.append(tuple(cuts))
        self.most_in_flight = max(self.most_in_flight, len(self.unawaited))
        return _Counted(self, number, self._inner.all_gather(buffer, cuts, *operation))


class _Counted:
    def __init__(self, comm: Counting, number: int, pending: Work) -> None:
        self._comm = comm
        self._number = number
        self._pending = pending

    def wait(self) -> None:
        self._pending.wait()
        self._comm.waited.append(self._number)
