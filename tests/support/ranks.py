"""Runs a function on several ranks and returns the value or the error of each.

    def total(start: int) -> int:  # module-level, so that a rank can import it
        value = torch.tensor(start + dist.get_rank())
        dist.all_reduce(value)
        return value.item()

    def test_total() -> None:
        assert run_ranks(total, 2, 10) == [21, 21]

Processes are reused: each takes call after call, as any rank of any world size. Every call forms
a new process group, and imports the test modules again. A process ends after a call that
failed or that left a trace in it: see `_settings` and `_survivors`. ``fresh=True`` asks for new
processes.

Processes are forked from a server that has torch imported (0.1 s for two instead of 3.4 s). They
have the environment variables and the hash seed of that server, so a test passes settings as
arguments, not through ``os.environ``. Arguments and results are files in a temporary folder, so a
killed rank leaks no shared memory. The test process has the store through which ranks meet, at a
port that the system chose: parallel pytest workers cannot collide.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import random
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.machinery import SourceFileLoader
from itertools import starmap
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from shared_gpu import ENVIRONMENT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

T = TypeVar("T")

#: Seconds the other ranks have, after the first failure, to report their own errors.
GRACE = 5.0

# Building an optimizer imports torch._dynamo: paid once here, not in every rank. Coverage sees the
# import of shardstep in the process that runs the test, not in a rank.
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
    """A rank raised, died or did not finish; the message has the traceback of each."""


@dataclass(frozen=True)
class _Job:
    """One call: the folder that the test and its ranks share, and how to form the group."""

    folder: Path
    port: int
    world_size: int
    backend: str
    timeout: float
    fresh: bool

    def path(self, kind: str, rank: int) -> Path:
        return self.folder / f"{kind}-{rank}"


@dataclass(frozen=True)
class _Outcome:
    """The report of a rank once ``fn`` has ended: its value, or the traceback of its error."""

    value: Any
    error: str | None
    ended: float  # time.monotonic(), one clock for all processes


class _Worker:
    """A process that runs one call at a time, as the rank it is told."""

    def __init__(self) -> None:
        self.connection, its_end = _FORKSERVER.Pipe()
        self.process: BaseProcess = _FORKSERVER.Process(target=_serve, args=(its_end,))
        self.process.start()
        its_end.close()
        self.idle = self.leaving = False

    def call(self, job: _Job, rank: int) -> None:
        self.idle = False
        self.connection.send((job, rank))

    @property
    def exitcode(self) -> int | None:
        """The exit code, or 0 if the process is ready for another call."""
        if not (self.idle or self.leaving) and self.connection.poll():
            try:
                self.idle = self.connection.recv()
            except (EOFError, ConnectionError):
                self.leaving = True
        return 0 if self.idle else self.process.exitcode

    def events(self) -> list[Any]:
        """Return what to wait for: the end of the process, or of the call."""
        return [self.process.sentinel, *([] if self.leaving else [self.connection])]

    def end(self, seconds: float = 0.0) -> None:
        """End the process: by itself within so many seconds, or else by force."""
        self.connection.close()
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()


_idle: list[_Worker] = []

_HOST = "127.0.0.1"

_TESTS = str(Path(__file__).parent.parent)

#: Besides those of shardstep, the modules whose functions tests replace.
_PATCHED = {"builtins", "os", "shutil", "time", "torch", "torch.distributed"}


@atexit.register  # before multiprocessing waits for its children
def end_idle_processes() -> None:
    """End the processes that wait for a call, so that each saves its coverage."""
    while _idle:
        _idle.pop().end(seconds=10)


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 150.0,
    backend: str = "gloo",
    fresh: bool = False,
    **kwargs: Any,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on ``world_size`` processes that form a default group.

    Args:
        fn: A module-level function; its arguments and its value must be picklable.
        world_size: The number of ranks.
        *args: Passed to ``fn`` on every rank.
        timeout: Seconds for all ranks to return. A collective gives up after two
            fifths of it: whoever forms a group may wait for a dead peer twice.
        backend: The backend of the default process group.
        fresh: Use new processes, and wait until they have exited.
        **kwargs: Passed to ``fn`` on every rank.

    Returns:
        The values of ``fn`` in rank order; tensors bit for bit and on the CPU.

    Raises:
        RankFailure: If a rank raised or died, or was still running after ``timeout``.
        TypeError: If ``fn`` or its arguments cannot be pickled.
    """
    # Ranks that wait for each other in a store of files poll it every 10 ms.
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _Job(Path(folder), store.port, world_size, backend, timeout, fresh)
        try:
            torch.save((fn, args, kwargs), job.folder / "call")
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise TypeError(
                f"the ranks cannot import {fn!r} or its arguments ({error}): pass a module-level "
                "function (no lambda, no closure) and picklable arguments"
            ) from error
        workers: list[_Worker] = []
        try:
            _start_server()
            for rank in range(world_size):
                workers.append(_Worker() if fresh else _take_worker())
                workers[-1].call(job, rank)
            _watch(job, workers)
            values = _collect(job, workers, fn)
            _idle.extend(worker for worker in workers if worker.idle)
            return values
        finally:  # also when pytest-timeout or Ctrl-C interrupts the wait
            for rank, worker in enumerate(workers):
                if worker not in _idle:  # one that has reported may still save its coverage
                    worker.end(seconds=float(job.path("outcome", rank).exists()))


def _take_worker() -> _Worker:
    while _idle:
        worker = _idle.pop()
        if worker.process.is_alive():
            return worker
        worker.end()
    return _Worker()


def raises_on_every_rank(
    fn: Callable[..., Any],
    world_size: int,
    exception: type[BaseException] | tuple[type[BaseException], ...],
    *args: Any,
    match: str | None = None,
    **kwargs: Any,
) -> list[tuple[str, str]]:
    """Check that every rank raises ``exception`` by itself, and return [(type name, message)].

    No rank leaves before all have raised, so one that is stuck in a collective is not saved by
    the "connection closed" error it would get when a peer exits.

    Args:
        fn: As for `run_ranks`, as are ``world_size``, ``args`` and ``kwargs``.
        world_size: The number of ranks.
        exception: The type, or the types one of which each rank has to raise.
        *args: Passed to ``fn`` on every rank.
        match: A pattern that ``re.search`` has to find in each message.
        **kwargs: ``timeout``, ``backend`` and ``fresh`` of `run_ranks`; the rest is for ``fn``.
    """
    return run_ranks(_expect_raise, world_size, fn, exception, match, *args, **kwargs)


def each_raises_on_every_rank(
    world_size: int, cases: Sequence[tuple[Any, ...]], **options: Any
) -> list[list[tuple[str, str]]]:
    """Check several cases as `raises_on_every_rank` does, in one call.

    No rank begins a case before all have raised in the one before.

    Args:
        world_size: The number of ranks.
        cases: A tuple for each: ``fn``, ``exception``, ``match`` and arguments for ``fn``.
        **options: ``timeout``, ``backend`` and ``fresh`` of `run_ranks`.

    Returns:
        For each case, (type name, message) in rank order.
    """
    seen = run_ranks(_expect_each, world_size, cases, **options)
    return [list(case) for case in zip(*seen, strict=True)]


def _expect_each(cases: Sequence[tuple[Any, ...]]) -> list[tuple[str, str]]:
    store, raised = _get_default_store(), []
    for number, case in enumerate(cases):
        raised.append(_expect_raise(*case))
        if store.add(f"raised {number}", 1) == dist.get_world_size():
            store.set(f"all raised {number}", "")
        store.wait([f"all raised {number}"])
    return raised


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


def new_process(fn: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a process outside of the pool, for a test that looks after it itself."""
    _start_server()
    process: BaseProcess = _FORKSERVER.Process(target=fn, args=args)
    process.start()
    return process


def _start_server() -> None:
    """Start the server, unless it runs, with the environment for the ranks."""
    with mock.patch.dict(os.environ, {**ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": "1"}):
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # no need for a hostname that resolves
        # Coverage reaches the ranks through multiprocessing. Without this the server would be
        # measured as well, and save its empty data after pytest, while files are combined.
        os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
        forkserver.ensure_running()


def _watch(job: _Job, workers: Sequence[_Worker]) -> None:
    """Return when every rank has finished, or when there is no reason to wait for those left."""
    deadline = time.monotonic() + job.timeout
    failed = False
    while None in (codes := [worker.exitcode for worker in workers]):
        # After the codes, so that a rank that has exited by itself is seen to have reported.
        silent = [not job.path("outcome", rank).exists() for rank in range(job.world_size)]
        ranks = list(zip(codes, silent, strict=True))
        if not failed and any(code or (code == 0 and mute) for code, mute in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE)
        left = deadline - time.monotonic()
        if left <= 0 or (failed and not any(code is None and mute for code, mute in ranks)):
            break
        running = [w for w, code in zip(workers, codes, strict=True) if code is None]
        wait([event for worker in running for event in worker.events()], timeout=min(left, 0.1))


def _collect(job: _Job, workers: Sequence[_Worker], fn: Callable[..., T]) -> list[T]:
    """Return the values, or raise with a section per failed rank, the first to fail first."""
    values: list[T] = []
    failures: list[tuple[float, str]] = []
    lingering: list[tuple[float, str]] = []  # to be expected of ranks that returned if others fail
    for rank, worker in enumerate(workers):
        code, outcome = worker.exitcode, None
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
            text = f"rank {rank} was still running:\n{_stacks(job, rank, worker.process)}"
            failures.append((time.monotonic(), text))
        else:
            values.append(outcome.value)
            if code is None:
                stack = _stacks(job, rank, worker.process)
                text = f"rank {rank} returned but did not exit:\n{stack}"
                lingering.append((time.monotonic(), text))
    if failures := failures or lingering:
        name = getattr(fn, "__qualname__", repr(fn))
        summary = f"{len(failures)} of {job.world_size} ranks failed in {name}, in this order:"
        sections = [f"---- {text.rstrip()}" for _, text in sorted(failures)]
        raise RankFailure("\n\n".join([summary, *sections]))
    return values


def _stacks(job: _Job, rank: int, process: BaseProcess) -> str:
    """Return the stacks of a rank: faulthandler writes them even while it is stuck in C++."""
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


def _serve(connection: Connection) -> None:
    """Run calls on this process until one leaves a trace or the test process is gone."""
    torch.set_num_threads(1)
    gc.freeze()  # collecting what a call left behind need not look at all of torch
    _compile_once()
    stacks = os.open(os.devnull, os.O_WRONLY)
    imported, names = set(sys.modules), _names()
    # NCCL refuses two ranks on one GPU unless they are on different hosts. It may read this once.
    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
    before, seeds = _settings(), (random.getstate(), torch.get_rng_state())
    while True:
        try:
            job, rank = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        with warnings.catch_warnings():
            _run_call(job, rank, stacks)
        if job.fresh:
            return
        warnings.onceregistry.clear()  # type: ignore[attr-defined]
        _drop_test_modules(imported)
        gc.collect()
        if _survivors() or _settings() != before or not all(starmap(_unchanged, names)):
            return
        random.setstate(seeds[0])
        torch.set_rng_state(seeds[1])
        faulthandler.cancel_dump_traceback_later()
        connection.send(True)


def _run_call(job: _Job, rank: int, stacks: int) -> None:
    """Form the group, run the call, report and leave the group with the others."""
    with open(job.path("stacks", rank), "wb") as file:
        os.dup2(file.fileno(), stacks)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    # Ends a rank whose pytest was killed during the call.
    faulthandler.dump_traceback_later(job.timeout + 2 * GRACE, exit=True, file=stacks)
    try:
        dist.init_process_group(
            job.backend,
            store=_meet(job, rank),
            rank=rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=0.4 * job.timeout),
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


def _meet(job: _Job, rank: int) -> dist.TCPStore:
    """Return the store of the ranks once all have reached it, which takes seconds at times."""
    limit = timedelta(seconds=job.timeout)
    store = dist.TCPStore(_HOST, job.port, is_master=False, timeout=limit)
    store.set(f"here {rank}", "")
    store.wait([f"here {each}" for each in range(job.world_size)], limit)
    return store


def _settings() -> dict[str, Any]:
    """Return the settings of this process that a call may not change if another is to follow."""
    from torch._dynamo.utils import counters

    return {
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        # Autograd's threads for a GPU stay, and count as dummies once Python ran in them.
        "threads": {t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)},
        "children": multiprocessing.active_children(),
        "signals": [signal.getsignal(s) for s in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)],
        "limits": [resource.getrlimit(r) for r in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)],
        "torch": (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled("cpu"),
        ),
        "compiled": dict(counters["frames"]),
        "group": dist.is_initialized(),
    }


def _names() -> list[tuple[Any, dict[str, Any]]]:
    """Return modules and classes with those of their members that tests may replace."""
    found: list[tuple[Any, dict[str, Any]]] = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "shardstep" or name in _PATCHED:
            every = vars(module).items()
            members = {k: v for k, v in every if callable(v) or type(v) in (int, str)}
            kinds = [v for v in members.values() if issubclass(type(v), type)]
            found += [(kind, _methods(kind)) for kind in kinds if kind.__module__ == name]
            found.append((module, members))
    return found


def _methods(kind: type) -> dict[str, Any]:
    methods = {name: value for name, value in vars(kind).items() if callable(value)}
    methods.pop("step", None)  # torch wraps that of an optimizer at first use
    return methods


def _unchanged(owner: Any, members: dict[str, Any]) -> bool:
    if isinstance(owner, type):
        return _methods(owner) == members
    return members.items() <= vars(owner).items()


def _survivors() -> bool:
    """Return whether objects of a call are still alive, for example through a hook or a cache."""
    kinds = (DeviceMesh, dist.ProcessGroup, nn.Module, torch.optim.Optimizer)
    return any(issubclass(type(thing), kinds) for thing in gc.get_objects())


def _compile_once() -> None:
    """Keep compiled code, as there may be no bytecode files: each call imports modules again."""
    compiled = functools.cache(functools.partial(compile, mode="exec", dont_inherit=True))
    SourceFileLoader.source_to_code = (  # type: ignore[method-assign]
        lambda self, data, path, **options: compiled(bytes(data), path)
    )


def _drop_test_modules(imported: set[str]) -> None:
    """Forget the test modules, so that the next call finds their globals as they are written."""
    for name in sys.modules.keys() - imported:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(_TESTS):
            del sys.modules[name]


def _report(job: _Job, rank: int, outcome: _Outcome) -> None:
    unfinished = job.path("unfinished", rank)
    torch.save(outcome, unfinished)
    unfinished.replace(job.path("outcome", rank))  # atomic: an outcome that exists is complete
