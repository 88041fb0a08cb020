"""Describe a checkpoint, or a folder of checkpoints, without reading a tensor."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.files import (
    FORMAT,
    MANIFEST,
    VERSION,
    CheckpointError,
    Manifest,
    length_of,
    require_folder,
    status_of,
)
from shardstep.checkpoint.format import SavedModel, SavedOptimizer, Stored, Tree
from shardstep.checkpoint.read import Checkpoint
from shardstep.checkpoint.staging import check_lengths, find_checkpoints, leftovers
from shardstep.state.tree import Leaf, decode, name_of, unwrap


def summary(path: str | os.PathLike[str], *, tensors: bool = False) -> dict[str, Any]:
    """Return a description of a checkpoint, for JSON.

    Args:
        path: the checkpoint.
        tensors: whether to list every tensor and its chunks.

    Raises:
        CheckpointError: if it is not a checkpoint, or its description is damaged.
    """
    with Checkpoint(Path(path)) as checkpoint:
        contents, manifest = checkpoint.contents, checkpoint.manifest
        described: dict[str, Any] = {
            "path": str(path),
            "format": FORMAT,
            "version": VERSION,
            "saved_at": _time(manifest),
            "made_by": contents.made_by,
            "nbytes": manifest.nbytes,
            "files": {name: digest.nbytes for name, digest in sorted(manifest.files.items())},
            "missing": [
                name for name in sorted(manifest.files) if length_of(checkpoint.path / name) is None
            ],
            "damage": None,
            "optimizer": contents.optimizer and _optimizer(contents.optimizer),
            "model": contents.model and _model(contents.model),
            "extra": contents.extra
            and {"nbytes": contents.extra.nbytes, "value": _shown(contents.extra)},
        }
        try:
            check_lengths(checkpoint.path, manifest)
            checkpoint.check_chunks(contents.tensors())
        except CheckpointError as error:
            described["damage"] = str(error)
        if tensors:
            described["tensors"] = [_tensor(name, stored) for name, stored in contents.tensors()]
        return described


def listing(parent: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the checkpoints in a folder, oldest first, and the remains of failed saves.

    Raises:
        CheckpointError: if there is neither.
    """
    folder = Path(parent)
    complete, problems = find_checkpoints(folder)
    require_folder(folder)
    entries: list[dict[str, Any]] = []
    for path in complete:
        try:
            with Checkpoint(path) as checkpoint:
                entries.append(
                    {
                        "path": str(path),
                        "saved_at": _time(checkpoint.manifest),
                        "nbytes": checkpoint.manifest.nbytes,
                        "made_by": checkpoint.contents.made_by,
                        "newest": False,
                    }
                )
        except CheckpointError as error:
            problems[path] = error
    if entries:
        entries[-1]["newest"] = True
    damaged = [{"path": str(path), "why": str(why)} for path, why in sorted(problems.items())]
    left = [{"path": str(path), "under_way": active} for path, active in leftovers(folder)]
    if not (entries or damaged or left):
        raise CheckpointError(
            f"{folder} has no {MANIFEST} and no checkpoints in it: it is not a checkpoint, or one "
            "that was never completed"
        )
    return {"path": str(parent), "checkpoints": entries, "damaged": damaged, "unfinished": left}


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether this is a checkpoint, damaged or not, and no folder of checkpoints."""
    return status_of(Path(path) / MANIFEST) is not None


def _time(manifest: Manifest) -> str:
    when = datetime.fromtimestamp(manifest.saved_at / 1e9, UTC)
    return when.astimezone().isoformat(timespec="seconds")


def _optimizer(saved: SavedOptimizer) -> dict[str, Any]:
    numel = {param.name: math.prod(param.shape) for param in saved.params}
    return {
        "class": saved.class_name,
        "stepped": saved.stepped,
        "named": not saved.positional,
        "parameters": len(saved.params),
        "trainable": sum(param.trainable for param in saved.params),
        "elements": sum(numel.values()),
        "state_nbytes": saved.global_state.nbytes
        + sum(leaf.nbytes for param in saved.params for leaf in param.leaves),
        "without_state": [param.name for param in saved.params if not param.entries],
        "with_master": sum(param.master is not None for param in saved.params),
        "groups": [
            {
                "parameters": len(names),
                "elements": sum(numel[name] for name in names),
                "options": _shown(options),
            }
            for names, options in saved.groups
        ],
    }


def _model(saved: SavedModel) -> dict[str, Any]:
    return {
        "tensors": len(saved.tensors),
        "elements": sum(math.prod(stored.shape) for stored in saved.tensors.values()),
        "nbytes": sum(stored.nbytes for stored in saved.tensors.values()),
        "dtypes": sorted({name_of(stored.dtype) for stored in saved.tensors.values()}),
        "aliases": saved.aliases,
    }


def _tensor(name: str, stored: Stored) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": name_of(stored.dtype),
        "shape": list(stored.shape),
        "nbytes": stored.nbytes,
        "chunks": [
            {"file": chunk.file, "key": chunk.key, **asdict(chunk.box)} for chunk in stored.chunks
        ],
    }


def _shown(tree: Tree) -> Any:
    """Return a value with a number or a description in place of each tensor."""

    def describe(leaf: Leaf) -> Any:
        if leaf.data is not None and math.prod(leaf.shape) == 1:
            value = leaf.empty(torch.device("cpu")).item()
            return value if isinstance(value, (bool, int, float)) else str(value)
        return f"tensor, {name_of(leaf.dtype)} {list(leaf.shape)}"

    return decode(tree.node, describe, wrap=unwrap)
