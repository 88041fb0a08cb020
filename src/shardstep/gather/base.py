"""The interface of a gather, and the gather that is over when it returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Protocol

from typing_extensions import override

from shardstep.comm import Comm, Work, span
from shardstep.params.sharded_params import GatherMessage, ParamStorage


class ParamGather(Protocol):
    """Sends updated parameters from their owners to all ranks. Called on every rank."""

    def launch(self, buckets: Collection[int] | None = None) -> None:
        """Launch the all-gathers of these buckets, or of all."""

    def end_step(self, error: Exception | None, buckets: Collection[int] | None = None) -> None:
        """Launch the last all-gathers of a step, with the error of this rank's step or None.

        The other ranks raise it when they wait.
        """

    def wait_for_errors(self) -> None:
        """Raise if the last step failed on another rank."""

    def wait(self) -> None:
        """Wait for every gather in flight."""

    def detach(self) -> None:
        """Wait for every gather in flight, and remove all hooks."""


class ImmediateGather(ParamGather):
    """Gathers that are over when `launch` returns.

    Buckets travel in the plan's order, as many at a time as the storage has buffers for.
    """

    def __init__(self, comm: Comm, storage: ParamStorage) -> None:
        self._comm = comm
        self._storage = storage
        self._errors: Work | None = None

    @override
    def end_step(self, error: Exception | None, buckets: Collection[int] | None = None) -> None:
        self._errors = self._comm.share_error(error)
        self.launch(buckets)

    @override
    def wait_for_errors(self) -> None:
        errors, self._errors = self._errors, None
        if errors is not None:
            errors.wait()

    @override
    def launch(self, buckets: Collection[int] | None = None) -> None:
        in_flight: deque[tuple[GatherMessage, Work]] = deque()

        def wait_for_oldest() -> None:
            message, work = in_flight.popleft()
            with span("wait for gather", message.bucket):
                work.wait()
            message.store()

        if self._comm.world_size == 1:
            return
        for number, message in enumerate(self._storage.messages):
            if buckets is not None and message.bucket not in buckets:
                continue
            if len(in_flight) == self._storage.depth:
                wait_for_oldest()
            with span("gather", message.bucket):
                work = self._comm.queue(number).all_gather(message.load(), message.cuts)
            in_flight.append((message, work))
        while in_flight:
            wait_for_oldest()
        self.wait_for_errors()

    @override
    def wait(self) -> None:
        pass

    @override
    def detach(self) -> None:
        pass
