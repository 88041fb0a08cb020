"""Headers: every rank says which call it makes, before it waits for the data of the others.

Ranks that make different calls wait for each other: one that leaves a step out waits for gradients,
the others wait for its step. The data of different calls never meet. Their headers do: all have one
length, and one sequence of tags whatever the call. A rank reads the headers of a call before it
waits for the data, and every rank raises if they differ. A header that is sent ahead of the data
makes no rank wait longer.

A rank that recovers from an error has left out calls that the others may wait for. It sends headers
that say so, until all ranks have sent as many.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from shardstep.comm.api import ALONE, Launched, Operation, Work, naming
from shardstep.comm.gloo import Exchange

ERROR_NBYTES = 200
"""Room for a rank's error."""

NBYTES = 1 + ERROR_NBYTES

OPERATIONS = tuple(Operation)

CONTINUED = frozenset(
    {
        (Operation.REDUCE, Operation.REDUCE),
        (Operation.REDUCE, Operation.USED),
        (Operation.ERRORS, Operation.GATHER),
        (Operation.GATHER, Operation.GATHER),
    }
)
"""Pairs of an operation and the next one that belong to one call, a round or a step."""


class OutOfStepError(RuntimeError):
    """Ranks are at different places of the training loop, or have different options."""


class BatchSkippedError(OutOfStepError):
    """Another rank gave this batch up with `recover()`; call `recover()` here, too."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"rank {rank} skipped this batch; call recover() on every rank, and continue with the "
            "next batch"
        )


class Header(Work):
    """The header of one call, from every rank. Waiting for it compares the calls up to this one.

    `before` is the header of the call before, which may still be in flight.
    """

    def __init__(
        self,
        exchange: Exchange,
        before: Header | None,
        operation: Operation,
        error: Exception | None,
    ) -> None:
        self._before = before
        self._rank = exchange.rank
        self._rows = torch.zeros(exchange.size, NBYTES, dtype=torch.uint8, device="cpu")
        text = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:ERROR_NBYTES]
        own = bytes([OPERATIONS.index(operation)]) + text
        self._rows[self._rank, : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        cuts = range(0, self._rows.numel() + 1, NBYTES)
        name = f"rank {self._rank}: {operation.value}"
        with naming(name):
            works = exchange.all_gather(self._rows.view(-1), cuts, Operation.HEADER)
        self._work = Launched(name, works)
        self._compared = False

    @override
    def wait(self) -> None:
        """Wait for the headers of all ranks, and compare them.

        Raises:
            BatchSkippedError: if a rank recovers from an error instead.
            OutOfStepError: if ranks make different calls.
        """
        if not self._compared:
            if self._before is not None:
                self._before.wait()
            calls = self._calls()
            if Operation.RECOVER in calls:
                raise BatchSkippedError(calls.index(Operation.RECOVER))
            self._compare(dict(enumerate(calls)))

    def forgive(self) -> None:
        """Wait for the headers up to this one, and let calls that a rank left out pass."""
        if not self._compared:
            if self._before is not None:
                self._before.forgive()
            calls = enumerate(self._calls())
            self._compare({rank: call for rank, call in calls if call is not Operation.RECOVER})

    def _calls(self) -> list[Operation]:
        self._work.wait()
        return [OPERATIONS[number] for number in self._rows[:, 0].tolist()]

    def _compare(self, calls: dict[int, Operation]) -> None:
        first = next(iter(calls), 0)
        for rank, call in calls.items():
            if call is not calls[first]:
                raise OutOfStepError(
                    f"ranks are out of step: rank {first} is {calls[first].value} where rank "
                    f"{rank} is {call.value}; {ALONE}"
                )
        self._compared, self._before = True, None

    def raise_error(self) -> None:
        """Raise if the step failed on another rank, and not on this one."""
        texts = self._rows[:, 1:]
        if texts[self._rank].any() or not texts.any():
            return
        failed = int(texts.any(dim=1).nonzero()[0])
        text = bytes(texts[failed].tolist()).rstrip(b"\0").decode(errors="replace")
        raise RuntimeError(
            f"rank {self._rank}: the optimizer's step failed on rank {failed}, so it fails on "
            f"every rank: {text}"
        )


class Headers:
    """The headers of successive calls.

    Attributes:
        of_every_call: whether every call has a header, or only the end of a step, for its error.
        num_sent: the number of headers so far.
    """

    def __init__(self, exchange: Exchange, note: Callable[[str, int], None]) -> None:
        self._exchange = exchange
        self._note = note
        self._last: tuple[Operation, Header | None] = (Operation.HEADER, None)
        self.of_every_call = False
        self.num_sent = 0

    def begin(self, operation: Operation) -> Header | None:
        """Return the header of an operation, to wait for ahead of its data."""
        if not self.of_every_call:
            return None
        before, header = self._last
        if (before, operation) not in CONTINUED:
            return self.send(operation)
        self._last = operation, header
        return header

    def send(self, operation: Operation, error: Exception | None = None) -> Header:
        """Begin a call: send a header to every rank."""
        header = Header(self._exchange, self._last[1], operation, error)
        self._last = operation, header
        self._note("header", NBYTES * (self._exchange.size - 1))
        self.num_sent += 1
        return header

    def even_out(self, num_sent: int) -> None:
        """Send headers until there are `num_sent`, and forgive calls that a rank left out.

        Raises:
            OutOfStepError: on every rank, if ranks have made different calls before.
        """
        header = self._last[1]
        while self.num_sent < num_sent:
            header = self.send(Operation.RECOVER)
        if header is not None:
            header.forgive()
