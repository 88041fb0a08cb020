"""`latest` and `resume`: the choice of the checkpoint that a run continues from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardstep.checkpoint.files import (
    MANIFEST,
    CheckpointError,
    Manifest,
    continue_run,
    require,
    status_of,
)
from shardstep.checkpoint.inputs import optimizer_and_comm
from shardstep.checkpoint.load import Loaded, load
from shardstep.checkpoint.read import Checkpoint
from shardstep.checkpoint.staging import DAMAGED, find_checkpoints
from shardstep.comm.consensus import run_on_all_ranks

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer

Problem = tuple[str, bool]
"""The error of a checkpoint, and whether a permission is missing: it may be intact then."""


def latest(parent: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in the folder `parent`; None if there is none.

    All its files are there with their lengths, and its description is intact. Tensors are not read.

    Raises:
        CheckpointError: if the folder cannot be read, or is itself a checkpoint.
    """
    complete, _ = _find(Path(parent))
    return next((path for path in reversed(complete) if _problem(path, slice(0)) is None), None)


def resume(
    parent: str | os.PathLike[str],
    optimizer: ZeroRedundancyOptimizer | None = None,
    model: torch.nn.Module | None = None,
    *,
    strict: bool = True,
    names: Mapping[str, str] | None = None,
) -> Loaded | None:
    """Load the newest intact checkpoint in the folder `parent`, and continue its run.

    Called on every rank. All ranks choose the same one. Every file is compared with its digest
    first. If the newest checkpoint is damaged, the one before is tried, and so on. Rank 0 warns of
    each one that was passed over, and adds `.damaged` to its name: the run will save there again.
    From now on, `keep_last` counts and removes the checkpoints of the run that was loaded too.

    Args:
        parent: the folder of checkpoints, on a file system that all ranks share.
        optimizer, model, strict, names: as for `load`.

    Returns:
        The result of `load`; None if there is no checkpoint, as at the start of a run.

    Raises:
        CheckpointError: if there are checkpoints and all are damaged, if `parent` is itself a
            checkpoint, or if the one that was chosen does not fit the optimizer or the model.
    """
    optimizer, comm = optimizer_and_comm(optimizer)
    what = f"resuming from {parent}"
    share = slice(comm.group_rank, None, comm.world_size)
    damaged: dict[Path, Problem] = {}  # on rank 0

    def find() -> list[tuple[str, str]]:
        if comm.group_rank != 0:
            return []
        complete, incomplete = _find(Path(parent).absolute())
        damaged.update({path: _problem_of(error) for path, error in incomplete.items()})
        return [(str(path), complete[path].run) for path in reversed(complete)]

    for name, run in run_on_all_ranks(comm, what, find)[0]:
        path = Path(name)
        problems = run_on_all_ranks(comm, what, partial(_problem, path, share))
        problem = next((each for each in problems if each is not None), None)
        if problem is None:
            loaded = load(path, optimizer, model, strict=strict, names=names, verify=False)
            if run:  # checkpoints from before 0.2.0 may be of several runs
                continue_run(run)
            for other, (error, forbidden) in damaged.items():
                _pass_over(other, error, forbidden, path)
            return loaded
        if comm.group_rank == 0:
            damaged[path] = problem
    reasons = run_on_all_ranks(comm, what, lambda: [error for error, _ in damaged.values()])[0]
    if reasons:
        raise CheckpointError(
            f"rank {comm.group_rank}: no checkpoint in {parent} can be loaded. Repair one, or "
            f"resume from another folder for a fresh start. {'; '.join(reasons)}"
        )
    return None


def _find(parent: Path) -> tuple[dict[Path, Manifest], dict[Path, CheckpointError]]:
    """Return the complete checkpoints in `parent`, oldest first, and the errors of the others."""
    found = find_checkpoints(parent)
    require(
        any(found) or status_of(parent / MANIFEST) is None,
        f"{parent} is a checkpoint; pass the folder that it is in, {parent.parent}, or call load()",
    )
    return found


def _problem(path: Path, share: slice) -> Problem | None:
    """Open a checkpoint and compare some files with their digests. Return the error, if any."""
    try:
        with Checkpoint(path) as checkpoint:
            checkpoint.verify(sorted(checkpoint.manifest.files)[share])
    except CheckpointError as error:
        return _problem_of(error)
    return None


def _problem_of(error: CheckpointError) -> Problem:
    return str(error), isinstance(error.__cause__, PermissionError)


def _pass_over(path: Path, error: str, forbidden: bool, instead: Path) -> None:
    """Warn of a damaged checkpoint, and free its name unless it belongs to another user."""
    moved = ""
    if not forbidden and path.suffix != DAMAGED:
        # The run may have found a checkpoint of this name damaged before.
        numbers = ("", *(f".{number}" for number in range(2, 100)))
        names = [path.with_name(f"{path.name}{number}{DAMAGED}") for number in numbers]
        free = next(filterfalse(os.path.lexists, names), names[0])
        try:
            moved = f"; it is now {path.rename(free)}"
        except OSError as failed:
            moved = f"; it could not be renamed ({failed.strerror})"
    warnings.warn(
        f"resuming from {instead}, not from {path}, which is damaged: {error}{moved}", stacklevel=3
    )
