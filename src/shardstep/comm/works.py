"""What may be waited for, once or in several rounds, and what it says when it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardstep.comm.api import Work


@contextmanager
def naming(operation: str) -> Iterator[None]:
    """Have what the backend raises say what it was that failed."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f"shardstep: {operation} failed: {error}") from error


class Works:
    """Several backend works that make up one operation."""

    def __init__(self, operation: str, works: Sequence[Any]) -> None:
        self._operation = operation
        self._works = works
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Wait for each, naming the operation when the backend gives up."""
        if self._error is not None:
            # What failed, or was interrupted, has not arrived the second time it is asked for.
            raise RuntimeError(f"shardstep: {self._operation} failed before") from self._error
        # Gloo waits in vain for a message that was waited for before.
        works, self._works = self._works, ()
        try:
            with naming(self._operation):
                for work in works:
                    work.wait()
        except BaseException as error:
            self._error = error
            raise


class Then:
    """An operation with something left to do once it has arrived."""

    def __init__(self, pending: Work, finish: Callable[[], object]) -> None:
        self._pending = pending
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        """Wait, then do the rest, once."""
        self._pending.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None
