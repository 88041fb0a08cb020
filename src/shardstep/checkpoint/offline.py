"""Checkpoints in one process, without a process group: as plain dicts, and cut anew.

What is read here is read piece by piece; only what is asked for in full is held in full.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.contents import SavedOptimizer
from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.read import Checkpoint


def state_dict(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The optimizer of a checkpoint as the plain `torch.optim` state dict, on the CPU.

    It is what the unsharded optimizer's `state_dict()` would have been, and loads into one that was
    constructed with the same parameters in the same groups.

    Example:
        >>> plain = torch.optim.AdamW(model.parameters())  # doctest: +SKIP
        >>> plain.load_state_dict(shardstep.checkpoint.state_dict("run/step-1000"))  # doctest: +SKIP
    """
    with Checkpoint(Path(path)) as checkpoint:
        saved = _optimizer(checkpoint)
        state = {
            number: checkpoint.value(param.state)
            for number, param in enumerate(saved.params)
            if param.state is not None
        }
        return {
            "state": {**state, **checkpoint.value(saved.loose)},
            "param_groups": plain_groups(checkpoint, saved),
        }


def plain_groups(checkpoint: Checkpoint, saved: SavedOptimizer) -> list[dict[str, Any]]:
    """The groups as `torch.optim` keeps them, with numbers for parameters."""
    number_of = {param.name: number for number, param in enumerate(saved.params)}
    groups = []
    for names, options in saved.groups:
        group = {**checkpoint.value(options), "params": [number_of[name] for name in names]}
        if not saved.positional:
            group["param_names"] = list(names)
        groups.append(group)
    return groups


def weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The model of a checkpoint as a plain state dict, on the CPU."""
    with Checkpoint(Path(path)) as checkpoint:
        saved = checkpoint.contents.model
        if saved is None:
            raise CheckpointError(f"{checkpoint.path}: there is no model in it")
        found: dict[str, Any] = {
            name: checkpoint.whole(stored) for name, stored in saved.tensors.items()
        }
        found |= {name: found[other] for name, other in saved.aliases.items()}
        return found | checkpoint.value(saved.rest)


def _optimizer(checkpoint: Checkpoint) -> SavedOptimizer:
    saved = checkpoint.contents.optimizer
    if saved is None:
        raise CheckpointError(f"{checkpoint.path}: there is no optimizer in it")
    return saved
