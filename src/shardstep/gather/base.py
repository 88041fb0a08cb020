"""The interface of a gather, and the gather that is over when it returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Protocol

from typing_extensions import override

from shardstep.comm import Comm, Work
from shardstep.comm.spans import span
from shardstep.params.storage import ParamStorage
from shardstep.plan import Message, ShardPlan


class ParamGather(Protocol):
    """Sends updated parameters from their owners to all ranks. Called on every rank."""

    def launch(self, buckets: Collection[int] | None = None) -> None:
        """Launch the all-gathers of these buckets, or of all."""

    def share_error(self, error: Exception | None) -> None:
        """Tell all ranks the error of this rank's step, or None; the others raise when they wait.

        Called before the last launch of a step.
        """

    def wait_for_errors(self) -> None:
        """Raise if the last step failed on another rank."""

    def wait(self) -> None:
        """Wait for every gather in flight."""

    def detach(self) -> None:
        """Wait for every gather in flight, and remove all hooks."""


def describe(error: Exception | None) -> str | None:
    """Return an error as other ranks are told of it."""
    return None if error is None else f"{type(error).__name__}: {error}"


class ImmediateGather(ParamGather):
    """Gathers that are over when `launch` returns.

    Buckets travel in the plan's order, as many at a time as the storage has buffers for.
    """

    def __init__(self, comm: Comm, plan: ShardPlan, storage: ParamStorage) -> None:
        self._comm = comm
        self._plan = plan
        self._storage = storage
        self._errors: Work | None = None

    @override
    def share_error(self, error: Exception | None) -> None:
        self._errors = self._comm.share_error(describe(error))

    @override
    def wait_for_errors(self) -> None:
        errors, self._errors = self._errors, None
        if errors is not None:
            errors.wait()

    @override
    def launch(self, buckets: Collection[int] | None = None) -> None:
        in_flight: deque[tuple[Message, Work]] = deque()

        def wait_for_oldest() -> None:
            message, work = in_flight.popleft()
            with span("wait for gather", message.bucket.index):
                work.wait()
            self._storage.store(message)

        if self._comm.world_size == 1:
            return
        for bucket in self._plan.training_buckets:
            if buckets is not None and bucket.index not in buckets:
                continue
            for message in self._storage.messages(bucket):
                if len(in_flight) == self._storage.depth:
                    wait_for_oldest()
                with span("gather", bucket.index):
                    buffer = self._storage.load(message)
                    in_flight.append((message, self._comm.all_gather(buffer, message.cuts)))
        while in_flight:
            wait_for_oldest()
        self.wait_for_errors()

    @override
    def wait(self) -> None:
        pass

    @override
    def detach(self) -> None:
        pass
