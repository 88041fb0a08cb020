"""Collectives in flight, with errors that name the operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

from typing_extensions import override


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Block until the result may be used (on an accelerator: by the current stream).

        A second call returns at once.
        """


class Operation(Enum):
    """The purposes of collectives. An error names them, and messages of each have their own tags.

    A rank that calls another one than its peers waits until the timeout; its message is not taken
    for theirs.
    """

    GATHER = "gathering parameters"
    REDUCE = "reducing gradients"
    USED = "telling which parameters have gradients"
    CLIP = "computing the norm of the gradients"
    UNSCALE = "looking for infinite gradients"
    BUFFERS = "copying buffers"
    START = "copying initial values"
    FULL = "gathering a whole gradient"
    LOAD = "copying loaded values"
    VERIFY = "comparing parameters"
    NOTES = "comparing notes with the other ranks"
    ERRORS = "telling whether the step succeeded"


LATE = (
    "a rank is stopped, or at another place of the loop: look for a batch, a forward or backward "
    "pass, a step or another call that only some ranks make"
)
GONE = "a peer has ended or failed: its own error says why"

Finish = Callable[[], object]
"""The rest of an operation, to be done once its works are complete."""


@contextmanager
def naming(operation: str) -> Iterator[None]:
    """Name `operation` in every error that the backend raises, and say what to look for."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        said = str(error)
        late = "timed out" in said.lower() or "timeout" in said.lower()
        hint = f" ({LATE})" if late else f" ({GONE})" if "by peer" in said else ""
        raise RuntimeError(f"shardstep: {operation} failed: {said}{hint}") from error


class Launched(Work):
    """The backend works of one operation, and calls that finish it, made once and in order."""

    def __init__(self, operation: str, works: Sequence[Any], finish: Sequence[Finish] = ()) -> None:
        self._operation = operation
        self._works = works
        self._finish = finish
        self._error: BaseException | None = None

    @override
    def wait(self) -> None:
        if self._error is not None:
            # An operation that failed or was interrupted stays incomplete.
            raise RuntimeError(f"shardstep: {self._operation} failed before") from self._error
        # Gloo hangs on a work that was waited for before.
        works, self._works = self._works, ()
        finish, self._finish = self._finish, ()
        try:
            with naming(self._operation):
                for work in works:
                    work.wait()
            for act in finish:
                act()
        except BaseException as error:
            self._error = error
            raise
