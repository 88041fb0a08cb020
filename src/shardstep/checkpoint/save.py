"""`save` and `async_save`.

A background save copies everything before it returns, so the checkpoint is of one moment. A thread
writes the copy, and talks to its peers on separate connections. One save runs at a time for each
optimizer. A failure is raised on every rank by the next `wait()`, `save` or `async_save`.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from shardstep.checkpoint.inputs import optimizer_and_comm
from shardstep.checkpoint.staging import unwatch_sigterm, watch_sigterm
from shardstep.checkpoint.write import SaveJob, plan_save, write_checkpoint
from shardstep.comm import Comm
from shardstep.comm.consensus import LostRankError, run_on_all_ranks

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer

logger = logging.getLogger(__name__)

ALIGNMENT_NBYTES = 64


class AsyncSave:
    """A save that runs in the background.

    Attributes:
        path: where the checkpoint will be.
        error: the reason why it failed, until `wait` raises it.
    """

    def __init__(self, comm: Comm, job: SaveJob) -> None:
        # Only this save uses these connections, and the memory of these files.
        self.path = job.path
        self.error: BaseException | None = None
        # Not a daemon: the program ends only after the save.
        self._thread = threading.Thread(target=self._run, args=(comm, job), name="shardstep-save")
        self._thread.start()

    def _run(self, comm: Comm, job: SaveJob) -> None:
        try:
            write_checkpoint(comm, job)
        except BaseException as error:
            self.error = error
            _failed.append(self)
            logger.error("%s", self)

    def __str__(self) -> str:
        return f"saving to {self.path} in the background" + (
            "" if self.error is None else f" failed: {self.error}"
        )

    def done(self) -> bool:
        """Return whether it has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until it has ended. Called on every rank.

        Returns:
            The checkpoint.

        Raises:
            RuntimeError: on every rank, if it failed; once.
        """
        self.join()
        message, error, self.error = str(self), self.error, None
        if error is not None:
            _failed.remove(self)
            raise RuntimeError(message) from error
        return self.path

    def join(self) -> None:
        """Wait until it has ended, and leave its error to `wait`."""
        self._thread.join()
        unwatch_sigterm()


_failed: list[AsyncSave] = []
"""Saves that failed, until their error is raised."""


@atexit.register
def _exit_with_error() -> None:
    """End the process with 1 if a save failed and the program never waited for it."""
    for save in _failed:
        print(f"shardstep: {save}; the program did not wait for it", file=sys.stderr)
    if _failed:
        # Nothing else sets the exit status now. So the other exit functions run from here.
        atexit.unregister(_exit_with_error)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class AsyncSaveState:
    """Connections, memory and the running save that one optimizer's background saves share."""

    def __init__(self) -> None:
        self._connection: tuple[Any, Comm] | None = None
        self._memory: torch.Tensor | None = None
        self.running: AsyncSave | None = None

    def finish_running(self, comm: Comm) -> None:
        """Wait for the running save. Called on every rank."""
        running, self.running = self.running, None
        if running is None:
            return
        running.join()
        if isinstance(running.error, LostRankError):
            running.wait()  # raises; to compare would take the timeout once more
        elif self._connection is not None and self._connection[0] is comm.group:
            # Some ranks may have waited and raised already. They must not go on alone.
            run_on_all_ranks(comm, "the save before this one", lambda: str(running.wait()))
        # Else its group was replaced, and ranks of the new one may not know of it.

    def connection(self, comm: Comm) -> Comm:
        """Return separate connections between the ranks of `comm`. Called on every rank."""
        # The default group may have been replaced since the last save.
        if self._connection is None or self._connection[0] is not comm.group:
            # Gloo: a thread that waits for NCCL would delay the GPU's work.
            self._connection = comm.group, comm.new_connection("gloo")
        return self._connection[1]

    def copy(self, job: SaveJob) -> SaveJob:
        """Return the job with copies of its tensors, in memory that the next save reuses."""
        tensors = tree_leaves(job.files)  # a save streams nothing
        sizes = [-(-each.nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES for each in tensors]
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        if self._memory is None or self._memory.numel() < sum(sizes):
            self._memory = None  # free the old one first
            self._memory = torch.empty(
                sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=bool(devices)
            )
        places = iter(torch.split(self._memory[: sum(sizes)], sizes))

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            place = next(places)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            return place.copy_(tensor.detach(), non_blocking=True)

        files = tree_map(copied, job.files)
        for device in devices:
            torch.get_device_module(device).current_stream(device).synchronize()
        return replace(job, files=files)


_states: weakref.WeakKeyDictionary[Any, AsyncSaveState] = weakref.WeakKeyDictionary()
_state_without_optimizer = AsyncSaveState()


def _begin(
    path: Any, optimizer: Any, model: torch.nn.Module | None, extra: Any, keep: int | None
) -> tuple[Comm, AsyncSaveState, SaveJob]:
    """Wait for the running save, and plan the next one. Called on every rank."""
    optimizer, comm = optimizer_and_comm(optimizer)
    state = _state_without_optimizer
    if optimizer is not None:
        state = _states.setdefault(optimizer, AsyncSaveState())
    state.finish_running(comm)
    return comm, state, plan_save(comm, path, optimizer, model, extra, keep)


def save(
    path: str | os.PathLike[str],
    optimizer: ZeroRedundancyOptimizer | None = None,
    model: torch.nn.Module | None = None,
    extra: Any = None,
    *,
    keep_last: int | None = None,
) -> Path:
    """Save an atomic checkpoint: a folder of safetensors and JSON.

    Called on every rank of the optimizer's process group, or of the default group, with the same
    path on a shared file system. Each rank writes the shards that it owns. If it raises, it raises
    on every rank, and leaves nothing behind.

    Args:
        path: the folder to create, such as `run/step-1000`; nothing may exist there.
        optimizer: the optimizer, also inside a wrapper of Accelerate, Lightning or Fabric.
        model: the model, plain or inside DDP or torch.compile. The ranks write a share of its
            parameters each; rank 0 writes the buffers.
        extra: rank 0's numbers, text and tensors, in lists and dicts.
        keep_last: if given, how many of the newest checkpoints in the same folder to keep.

    Returns:
        The checkpoint.

    Raises:
        FileExistsError: if there is something at `path`.
        BlockingIOError: if another save to `path` is under way.
        OSError: if it cannot be written there.
        TypeError: if there is a value that a checkpoint cannot hold.
    """
    comm, _, job = _begin(path, optimizer, model, extra, keep_last)
    watch_sigterm(comm.group_rank)
    try:
        return write_checkpoint(comm, job)
    finally:
        unwatch_sigterm()


def async_save(
    path: str | os.PathLike[str],
    optimizer: ZeroRedundancyOptimizer | None = None,
    model: torch.nn.Module | None = None,
    extra: Any = None,
    *,
    keep_last: int | None = None,
) -> AsyncSave:
    """Save as `save` does, and return as soon as everything is copied.

    Called on every rank. Training may go on at once. The copy takes the memory of this rank's files
    on the CPU, and the next save reuses it. A save that is still running is waited for first. Wait
    for the last one before the process group is destroyed.

    Args:
        path, optimizer, model, extra, keep_last: as for `save`.

    Returns:
        The running save.

    Raises:
        RuntimeError: on every rank, if the save before this one failed; this one is not begun then.
    """
    comm, state, job = _begin(path, optimizer, model, extra, keep_last)
    copies: list[SaveJob] = []
    run_on_all_ranks(comm, "copying a checkpoint", lambda: copies.append(state.copy(job)))
    watch_sigterm(comm.group_rank)
    state.running = AsyncSave(state.connection(comm), copies[0])
    return state.running
