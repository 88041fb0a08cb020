"""Things that are to be done when others are over, in a thread that waits for those."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from shardstep.comm.api import Work

PATIENCE = 10.0
"""Seconds that a program that ends waits for what is under way. What takes longer is not going to
be over: another rank has failed."""


class Background:
    """Does one thing after the other, in the order in which it is told of them.

    Its thread begins with the first and ends with this object.
    """

    def __init__(self) -> None:
        self._told: SimpleQueue[_Later | None] = SimpleQueue()
        self._begun = False

    def do(self, what: Callable[[], Work]) -> Work:
        """Have `what` called; what is returned is over when that is, and what it returns.

        Args:
            what: waits for something and launches something else.
        """
        later = _Later(what)
        _under_way.add(later)
        if not self._begun:
            # If there can be no more threads, this raises, and so it is to do the next time.
            threading.Thread(target=_work, args=(self._told,), daemon=True).start()
            self._begun = True
            weakref.finalize(self, self._told.put, None)
        self._told.put(later)
        return later


class _Later:
    """Something that is done in another thread."""

    def __init__(self, what: Callable[[], Work]) -> None:
        self._what: Callable[[], Work] | None = what
        self._launched: Work | None = None
        self._error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        """Do it, and remember what came of it."""
        assert self._what is not None
        try:
            self._launched = self._what()
        except BaseException as error:
            self._error = error
        self._what = None
        self.done.set()

    def wait(self) -> None:
        """Wait until it is done, and what it launched is over."""
        self.done.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        assert self._launched is not None
        self._launched.wait()


_under_way: weakref.WeakSet[_Later] = weakref.WeakSet()
os.register_at_fork(after_in_child=_under_way.clear)  # the thread stays with the parent


def _work(told: SimpleQueue[_Later | None]) -> None:
    while (later := told.get()) is not None:
        later.run()
        del later  # what it keeps alive is not to wait for the next one


@atexit.register
def _let_finish() -> None:
    """A thread that is inside of the backend when the interpreter ends would abort the program."""
    deadline = time.monotonic() + PATIENCE
    for later in list(_under_way):
        later.done.wait(max(0.0, deadline - time.monotonic()))
