"""Saving, there and then or in the background.

A save in the background takes a copy, and a thread writes it. The copy is made before the call
returns, so it is of one moment. The thread talks to its peers on connections of its own. One save
runs at a time; what went wrong with it is raised on every rank by whatever is called next:
`wait()`, `save` or `async_save`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardstep.checkpoint.safetensors import Source
from shardstep.checkpoint.write import Job, comm_of, prepare, write_out
from shardstep.comm import Comm
from shardstep.comm.consensus import run_on_all_ranks

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer

logger = logging.getLogger(__name__)

ALIGNMENT_NBYTES = 64


class AsyncSave:
    """A save that runs in the background.

    Args:
        comm: the ranks, on connections that nobody else uses meanwhile.
        job: what to write, in memory that nobody else changes meanwhile.

    Attributes:
        path: where the checkpoint will be.
    """

    def __init__(self, comm: Comm, job: Job) -> None:
        self.path = job.goal
        self._error: BaseException | None = None
        # Not a daemon: the program does not end before what it has begun to save is saved.
        self._thread = threading.Thread(target=self._run, args=(comm, job), name="shardstep-save")
        self._thread.start()

    def _run(self, comm: Comm, job: Job) -> None:
        try:
            write_out(comm, job)
        except BaseException as error:
            self._error = error
            logger.error("saving to %s in the background failed: %s", job.goal, error)

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until it is over. Called on every rank.

        Returns:
            The checkpoint.

        Raises:
            RuntimeError: on every rank, if it failed; once.
        """
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(
                f"saving to {self.path} in the background failed: {error}"
            ) from error
        return self.path


class AsyncSaveState:
    """What background saves of one optimizer share: connections, memory, and the one that runs."""

    def __init__(self) -> None:
        self._comm: tuple[Any, Comm] | None = None
        self.memory: torch.Tensor | None = None
        self.running: AsyncSave | None = None

    def clear(self, comm: Comm) -> None:
        """Wait for the save that runs. Called on every rank."""
        running, self.running = self.running, None
        if running is not None:
            # Some ranks may have waited, and been told already: they are not to go on alone.
            run_on_all_ranks(comm, "the save before this one", lambda: str(running.wait()))

    def connection(self, comm: Comm) -> Comm:
        """The ranks of `comm` on connections of their own. Called on every rank."""
        # The default group may be another one than the last time.
        if self._comm is None or self._comm[0] is not comm.group:
            # Gloo: a thread that waits for an accelerator would hold up what that computes.
            self._comm = comm.group, comm.new_connection("gloo")
        return self._comm[1]

    def copied(self, job: Job) -> Job:
        """The same job on a copy of its tensors, in memory that is kept for the next one."""
        tensors = [_tensor(source) for file in job.files.values() for source in file.values()]
        total = sum(_room(tensor) for tensor in tensors)
        on_device = any(tensor.device.type != "cpu" for tensor in tensors)
        if self.memory is None or self.memory.numel() < total:
            self.memory = None  # not both at once
            self.memory = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=on_device)
        files: dict[str, dict[str, Source]] = {}
        start = 0
        for name, file in job.files.items():
            files[name] = {}
            for key, source in file.items():
                tensor = _tensor(source)
                place = self.memory[start : start + tensor.nbytes].view(tensor.dtype)
                files[name][key] = place.view(tensor.shape).copy_(
                    tensor.detach(), non_blocking=True
                )
                start += _room(tensor)
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            torch.get_device_module(device).current_stream(device).synchronize()
        return replace(job, files=files)


def _tensor(source: Source) -> torch.Tensor:
    assert isinstance(source, torch.Tensor)  # what is saved from memory is in memory
    return source


def _room(tensor: torch.Tensor) -> int:
    return math.ceil(tensor.nbytes / ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


_desks: weakref.WeakKeyDictionary[Any, AsyncSaveState] = weakref.WeakKeyDictionary()


class _Nobody:
    """Stands for the optimizer where there is none."""


_nobody = _Nobody()


def desk_of(optimizer: ZeroRedundancyOptimizer | None) -> AsyncSaveState:
    """Where the background saves of this optimizer are looked after."""
    return _desks.setdefault(optimizer if optimizer is not None else _nobody, AsyncSaveState())


def save(
    path: str | os.PathLike[str],
    optimizer: ZeroRedundancyOptimizer | None = None,
    model: torch.nn.Module | None = None,
    extra: Any = None,
    *,
    keep_last: int | None = None,
) -> Path:
    """Save a checkpoint: a folder of safetensors and JSON that is complete or not there.

    Called on every rank of the optimizer's process group, or of the default group, with the same
    path, on a file system that the ranks share. Each rank writes what it owns. If it raises, it
    raises on every rank, and leaves nothing behind.

    Args:
        path: the folder to make, such as `run/step-1000`; there must be nothing yet.
        optimizer: the optimizer.
        model: the model, as it is or inside of DDP or torch.compile. Every rank has all of its
            parameters, so each writes a share of them; buffers are rank 0's.
        extra: anything else: numbers, text, tensors, lists and dicts of these; rank 0's is saved.
        keep_last: if given, only so many of the newest checkpoints beside this one are kept.

    Returns:
        The checkpoint.

    Raises:
        FileExistsError: if there is something at `path`.
        BlockingIOError: if another save to `path` is under way.
        OSError: if it cannot be written there.
        TypeError: if there is something that a checkpoint cannot hold.
    """
    comm = comm_of(optimizer)
    desk_of(optimizer).clear(comm)
    return write_out(comm, prepare(path, optimizer, model, extra, keep_last))


def async_save(
    path: str | os.PathLike[str],
    optimizer: ZeroRedundancyOptimizer | None = None,
    model: torch.nn.Module | None = None,
    extra: Any = None,
    *,
    keep_last: int | None = None,
) -> AsyncSave:
    """Save as `save` does, and return as soon as a copy of everything is taken.

    Called on every rank. Training may go on at once: the checkpoint is of this moment. The copy
    takes the memory of this rank's share, on the CPU, and keeps it for the next save. A save that
    is still running is waited for first. Wait for the last one before the process group is
    destroyed.

    Args:
        path, optimizer, model, extra, keep_last: as for `save`.

    Returns:
        The save, to be waited for or asked whether it is done.

    Raises:
        RuntimeError: on every rank, if the save before this one failed; this one is not begun then.
    """
    desk = desk_of(optimizer)
    comm = comm_of(optimizer)
    desk.clear(comm)
    job = prepare(path, optimizer, model, extra, keep_last)

    def copy() -> None:
        nonlocal job
        job = desk.copied(job)

    run_on_all_ranks(comm, "copying what is to be saved", copy)
    desk.running = AsyncSave(desk.connection(comm), job)
    return desk.running
