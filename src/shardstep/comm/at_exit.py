"""The end of a process that has connections over Gloo.

A rank that ends with an error closes its connections, so that the others learn of it at once.
Connections of Gloo last until Python has taken down all modules, which is seconds, and for as long
as a forked process has them, too. torch has no call that closes them.

A rank that ends well sleeps first. Gloo's threads take Python's lock to let go of the tensors of
the last collectives. If Python is shutting down by then, it ends the thread, and C++ the process,
with SIGABRT ("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

Sockets = set[tuple[int, int]]
"""Descriptors with their inodes, which tell a socket from a later one of the same number."""

_own: Sockets = set()
_uses_gloo = False


def ends_with_error() -> bool:
    """Return True if the program ends with an uncaught error."""
    return hasattr(sys, "last_value")


def sleep_at_exit() -> None:
    """Note that this process uses Gloo."""
    global _uses_gloo
    _uses_gloo = True


@contextmanager
def noting_connections(expected: int) -> Iterator[None]:
    """Note the connections that are made meanwhile, if there are as many as expected.

    Otherwise another thread made one, which must not be closed.
    """
    before = _sockets()
    yield
    now = _sockets()
    made = {each for each in now - before if _is_connected(each[0])}
    _own.intersection_update(now)
    if len(made) == expected:
        _own.update(made)


def _sockets() -> Sockets:
    found: Sockets = set()
    with suppress(OSError):  # not on Linux
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found


def _is_connected(descriptor: int) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        return bool(connection.getpeername())
    return False


@atexit.register
def _end() -> None:
    if not ends_with_error():
        if _uses_gloo:
            time.sleep(0.1)
    elif not _raised_within(sys.last_traceback):
        # Threads have ended by now: a background save is complete.
        for descriptor, _ in _own & _sockets():
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_WR)


def _raised_within(traceback: TracebackType | None) -> bool:
    """Return True if an error was raised in a call of this package.

    The other ranks are about to raise it as well, or have ended: they hear more if they read on.
    """
    package = __name__.partition(".")[0]
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] == package:
            return True
        traceback = traceback.tb_next
    return False


def _leave_to_parent() -> None:
    """Let go of the connections in a forked process."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor, _ in _own & _sockets():
        os.dup2(nothing, descriptor)  # not closed: the number must not be used again
    os.close(nothing)
    _own.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
