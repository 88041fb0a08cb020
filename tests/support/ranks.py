"""Starts the ranks of a multi-process test and brings back what each of them returned or raised.

    def total(start: int) -> int:  # module-level, so that a rank can import it
        value = torch.tensor(start + dist.get_rank())
        dist.all_reduce(value)
        return value.item()

    def test_total() -> None:
        assert run_ranks(total, 2, 10) == [21, 21]

Ranks are forked from a server that has torch imported (0.1 s for two instead of 3.4 s). They see
the environment variables and share the hash seed of the moment that server started, so a test
passes settings as arguments, not through ``os.environ``. All that the ranks and the test exchange
are files in one temporary folder, the rendezvous included: there is no port for parallel pytest
workers to collide on, and no shared memory to leak when a rank is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

T = TypeVar("T")

#: Seconds the other ranks have, after the first failure, to report errors of their own.
GRACE = 5.0

# Building an optimizer imports torch._dynamo: paid once here, not in every rank. Of shardstep,
# coverage does not see the import in a rank then; it sees that of the process that runs the test.
_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.optim",
        "hypothesis",
        "pytest",
        "shardstep",
    ]
)


class RankFailure(AssertionError):
    """Some rank raised, died or did not finish; the message has the traceback of each."""


@dataclass(frozen=True)
class _Job:
    """What the test and its ranks agree on: the folder they share and how to form the group."""

    folder: Path
    world_size: int
    backend: str
    timeout: float

    def path(self, kind: str, rank: int) -> Path:
        return self.folder / f"{kind}-{rank}"


@dataclass(frozen=True)
class _Outcome:
    """What a rank reports once ``fn`` has ended: its value, or the traceback of its error."""

    value: Any
    error: str | None
    ended: float  # time.monotonic(), one clock for all processes


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 150.0,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[T]:
    """Runs ``fn(*args, **kwargs)`` on ``world_size`` fresh processes that form a default group.

    Args:
        fn: A module-level function; what it takes and returns has to be picklable.
        world_size: The number of ranks.
        *args: Passed to ``fn`` on every rank.
        timeout: Seconds for all ranks to return. A collective gives up after half of it.
        backend: The backend of the default process group.
        **kwargs: Passed to ``fn`` on every rank.

    Returns:
        What ``fn`` returned, in rank order; tensors bit for bit and on the CPU.

    Raises:
        RankFailure: If a rank raised or died, or was still running after ``timeout``.
        TypeError: If ``fn`` or its arguments cannot be pickled.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _Job(Path(folder), world_size, backend, timeout)
        try:
            torch.save((fn, args, kwargs), job.folder / "call")
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise TypeError(
                f"the ranks cannot import {fn!r} or its arguments ({error}): pass a module-level "
                "function (no lambda, no closure) and picklable arguments"
            ) from error
        processes: list[BaseProcess] = []
        try:
            _start_server()
            for rank in range(world_size):
                started = _FORKSERVER.Process(target=_rank_main, args=(job, rank))
                started.start()
                processes.append(started)
            _watch(job, processes)
            return _collect(job, processes, fn)
        finally:  # also when pytest-timeout or Ctrl-C interrupts the wait
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()


def raises_on_every_rank(
    fn: Callable[..., Any],
    world_size: int,
    exception: type[BaseException] | tuple[type[BaseException], ...],
    *args: Any,
    match: str | None = None,
    **kwargs: Any,
) -> list[tuple[str, str]]:
    """Checks that every rank raises ``exception`` by itself and returns [(type name, message)].

    No rank leaves before all have raised, so one that is stuck in a collective is not saved by
    the "connection closed" error it would get when a peer exits.

    Args:
        fn: As for :func:`run_ranks`, as are ``world_size``, ``args`` and ``kwargs``.
        world_size: The number of ranks.
        exception: The type, or the types one of which each rank has to raise.
        *args: Passed to ``fn`` on every rank.
        match: A pattern that ``re.search`` has to find in each message.
        **kwargs: ``timeout`` and ``backend`` of :func:`run_ranks`; the rest is passed to ``fn``.
    """
    return run_ranks(_expect_raise, world_size, fn, exception, match, *args, **kwargs)


def _expect_raise(
    fn: Callable[..., Any],
    exception: type[BaseException] | tuple[type[BaseException], ...],
    match: str | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> tuple[str, str]:
    try:
        value = fn(*args, **kwargs)
    except exception as error:
        if match is not None and not re.search(match, str(error)):
            raise AssertionError(f"the message does not match {match!r}") from error
        return type(error).__name__, str(error)
    raise AssertionError(f"expected {exception}, but {fn.__qualname__} returned {value!r}")


def _start_server() -> None:
    """Starts the server, unless it runs, with the environment its ranks are to have."""
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # no need for a hostname that resolves
        # Coverage reaches the ranks through multiprocessing. Without this the server would be
        # measured as well, and save its empty data after pytest, while files are combined.
        os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
        forkserver.ensure_running()


def _watch(job: _Job, processes: Sequence[BaseProcess]) -> None:
    """Returns when every rank has exited, or when there is no reason to wait for those left."""
    deadline = time.monotonic() + job.timeout
    failed = False
    while None in (codes := [process.exitcode for process in processes]):
        # After the codes, so that a rank that has exited by itself is seen to have reported.
        silent = [not job.path("outcome", rank).exists() for rank in range(job.world_size)]
        ranks = list(zip(codes, silent, strict=True))
        if not failed and any(code or (code == 0 and mute) for code, mute in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE)
        left = deadline - time.monotonic()
        if left <= 0 or (failed and not any(code is None and mute for code, mute in ranks)):
            break
        running = [p for p, code in zip(processes, codes, strict=True) if code is None]
        wait([process.sentinel for process in running], timeout=min(left, 0.1))


def _collect(job: _Job, processes: Sequence[BaseProcess], fn: Callable[..., T]) -> list[T]:
    """Returns the values, or raises with a section per failed rank, the first to fail first."""
    values: list[T] = []
    failures: list[tuple[float, str]] = []
    lingering: list[tuple[float, str]] = []  # to be expected of ranks that returned if others fail
    for rank, process in enumerate(processes):
        code, outcome = process.exitcode, None
        if job.path("outcome", rank).exists():
            # Results of a GPU rank come to the CPU: loading them must not start CUDA here.
            outcome = torch.load(job.path("outcome", rank), "cpu", weights_only=False)
        if outcome is not None and outcome.error is not None:
            failures.append((outcome.ended, f"rank {rank} raised:\n{outcome.error}"))
        elif code is not None and (code != 0 or outcome is None):
            stacks = job.path("stacks", rank)  # there is a stack if a signal killed the rank
            text = stacks.read_text() if stacks.exists() else ""
            failures.append((0.0, f"rank {rank} died with exit code {code}:\n{text}"))
        elif outcome is None:
            text = f"rank {rank} was still running:\n{_stacks(job, rank, process)}"
            failures.append((time.monotonic(), text))
        else:
            values.append(outcome.value)
            if code is None:
                text = f"rank {rank} returned but did not exit:\n{_stacks(job, rank, process)}"
                lingering.append((time.monotonic(), text))
    if failures := failures or lingering:
        name = getattr(fn, "__qualname__", repr(fn))
        summary = f"{len(failures)} of {job.world_size} ranks failed in {name}, in this order:"
        sections = [f"---- {text.rstrip()}" for _, text in sorted(failures)]
        raise RankFailure("\n\n".join([summary, *sections]))
    return values


def _stacks(job: _Job, rank: int, process: BaseProcess) -> str:
    """Where a rank hangs: faulthandler writes it even while the rank is stuck in C++."""
    path, size = job.path("stacks", rank), 0
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR1)
        for _ in range(20):  # until the file has stopped growing
            time.sleep(0.05)
            size, before = path.stat().st_size, size
            if 0 < size == before:
                break
        return path.read_text()
    return "(it ended meanwhile)"


def _rank_main(job: _Job, rank: int) -> None:
    """Called on every rank: forms the group, runs the call, reports, leaves with the others."""
    stacks = os.open(job.path("stacks", rank), os.O_WRONLY | os.O_CREAT)  # open until the end
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    # Ends a rank whose pytest was killed, since then nobody else does.
    faulthandler.dump_traceback_later(job.timeout + 2 * GRACE, exit=True, file=stacks)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            job.backend,
            init_method=f"file://{job.folder}/store",
            rank=rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout / 2),
        )
        fn, args, kwargs = torch.load(job.folder / "call", weights_only=False)
        _report(job, rank, _Outcome(fn(*args, **kwargs), None, time.monotonic()))
    except BaseException:
        # No farewell: peers that wait for this rank see its connections close, and fail as well.
        _report(job, rank, _Outcome(None, traceback.format_exc(), time.monotonic()))
        sys.exit(1)
    # Keeps the connections open while a peer may need them; `_watch` ends a wait in vain.
    while not all(job.path("outcome", peer).exists() for peer in range(job.world_size)):
        time.sleep(0.005)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _report(job: _Job, rank: int, outcome: _Outcome) -> None:
    unfinished = job.path("unfinished", rank)
    torch.save(outcome, unfinished)
    unfinished.replace(job.path("outcome", rank))  # atomic: an outcome that exists is complete
