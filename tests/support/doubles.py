"""Doubles of communication that stand behind the door, each strict about one thing.

Each wraps a real `Comm` and does what that does, less kindly: a result is nowhere to be seen before
`wait()`, operations finish in any order, every call is written down. They nest.

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
    """Optimizers made within communicate through doubles, which come in the list."""
    made: list[Comm] = []

    def connect(*args: Any) -> Comm:
        made.append(double(comm.connect(*args)))
        return made[-1]

    with mock.patch.object(optimizer, "connect", connect):
        yield made


class Wrapped:
    """Everything else as the wrapped one does it."""

    def __init__(self, inner: Comm) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def new_connection(self) -> Comm:
        """The same double over connections of its own."""
        return type(self)(self._inner.new_connection())


def spoil(buffer: torch.Tensor) -> None:
    """Fill with what no test takes for a result: NaN, or all bits set."""
    if buffer.is_floating_point() or buffer.is_complex():
        buffer.fill_(float("nan"))
    else:
        buffer.view(torch.uint8).fill_(255)


class LateArrival(Wrapped):
    """What is to be filled is NaN, this rank's own segment included, until it is waited for.

    What is sent is what was there at the call: writing to it in flight has no effect.
    """

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Work:
        hidden = buffer.clone()
        pending = self._inner.all_gather(hidden, cuts)
        spoil(buffer)
        return _Late(pending, hidden, buffer)

    def reduce_scatter(self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        hidden = torch.empty_like(out)
        pending = self._inner.reduce_scatter(buffer.clone(), cuts, hidden)
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
    """Operations finish in an order of their own: some long before anybody waits for them.

    Whenever one is waited for, others that are in flight land first, in shuffled order, another on
    every rank. A buffer that is used for something else in the meantime is overwritten.
    """

    def __init__(self, inner: Comm) -> None:
        super().__init__(LateArrival(inner))
        self._random = random.Random(inner.group_rank)
        self._in_flight: list[_Late] = []
        self.landed_early = 0

    def new_connection(self) -> Comm:
        return AnyOrder(self._inner._inner.new_connection())

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Work:
        return self._fly(self._inner.all_gather(buffer, cuts))

    def reduce_scatter(self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        return self._fly(self._inner.reduce_scatter(buffer, cuts, out))

    def _fly(self, pending: Work) -> Work:
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

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Work:
        number = len(self.launched)
        self.launched.append(tuple(cuts))
        self.most_in_flight = max(self.most_in_flight, len(self.unawaited))
        return _Counted(self, number, self._inner.all_gather(buffer, cuts))


class _Counted:
    def __init__(self, comm: Counting, number: int, pending: Work) -> None:
        self._comm = comm
        self._number = number
        self._pending = pending

    def wait(self) -> None:
        self._pending.wait()
        self._comm.waited.append(self._number)
