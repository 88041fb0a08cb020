"""Read a checkpoint in one process: as plain state dicts, or to verify it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardstep.checkpoint.files import CheckpointError, Stages, no_stages
from shardstep.checkpoint.format import SavedModel, SavedOptimizer, split_masters
from shardstep.checkpoint.read import Checkpoint


def state_dict(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the optimizer of a checkpoint as a plain `torch.optim` state dict, on the CPU.

    It loads into an unsharded optimizer with the same parameters in the same groups.

    Raises:
        CheckpointError: if it is not a checkpoint, is damaged, or has no optimizer.

    Example:
        >>> import tempfile, torch, shardstep
        >>> model = torch.nn.Linear(3, 2)
        >>> opt = shardstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        >>> plain = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as run:
        ...     path = shardstep.checkpoint.save(f"{run}/step-0", opt, model)
        ...     plain.load_state_dict(state_dict(path))
        >>> plain.param_groups[0]["lr"]
        0.1
    """
    with Checkpoint(Path(path)) as checkpoint:
        return optimizer_dict(checkpoint)


def weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the model of a checkpoint as a plain state dict, on the CPU.

    Raises:
        CheckpointError: if it is not a checkpoint, is damaged, or has no model.
    """
    with Checkpoint(Path(path)) as checkpoint:
        return model_dict(checkpoint)


def verify(path: str | os.PathLike[str], *, stages: Stages = no_stages) -> tuple[int, int]:
    """Compare every file with its digest, and find every chunk of every tensor.

    Returns:
        The number of bytes and of tensors in files.

    Raises:
        CheckpointError: naming the first file that is wrong.
    """
    with Checkpoint(Path(path)) as checkpoint:
        nbytes = checkpoint.manifest.nbytes
        checkpoint.verify(progress=stages("checking", nbytes))
        tensors = list(checkpoint.contents.tensors())
        checkpoint.check_chunks(tensors)
        return nbytes, len(tensors)


def optimizer_dict(checkpoint: Checkpoint, *, named: bool = False) -> dict[str, Any]:
    """Return the optimizer's state dict, keyed by names as in DCP, or by numbers as in torch."""
    saved = saved_optimizer(checkpoint, named=named)
    keys = {param.name: param.name if named else n for n, param in enumerate(saved.params)}
    state, masters = split_masters(
        {
            keys[param.name]: checkpoint.read_value(param.state)
            for param in saved.params
            if param.state is not None
        }
    )
    groups = []
    for names, options in saved.groups:
        group = {**checkpoint.read_value(options), "params": [keys[name] for name in names]}
        if not saved.positional and not named:
            group["param_names"] = list(names)
        groups.append(group)
    found: dict[str, Any] = {
        **checkpoint.read_value(saved.extra_entries),
        "state": {**state, **checkpoint.read_value(saved.global_state)},
        "param_groups": groups,
    }
    if masters:
        found["masters"] = masters
    if saved.rounding_step:
        found["rounding_step"] = saved.rounding_step
    return found


def model_dict(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the model's state dict; several names of one tensor share it."""
    saved = saved_model(checkpoint)
    found = {name: checkpoint.read_tensor(stored) for name, stored in saved.tensors.items()}
    found |= {name: found[other] for name, other in saved.aliases.items()}
    return {**found, **checkpoint.read_value(saved.extra_state)}


def saved_optimizer(checkpoint: Checkpoint, *, named: bool = False) -> SavedOptimizer:
    """Return the optimizer, or raise if it is missing, or lacks names although `named`."""
    saved = checkpoint.contents.optimizer
    if saved is None:
        raise CheckpointError(f"{checkpoint.path}: there is no optimizer in it")
    if named and saved.positional:
        raise CheckpointError(
            f"{checkpoint.path}: its parameters have no names; save with model=, or construct the "
            "optimizer from model.named_parameters()"
        )
    return saved


def saved_model(checkpoint: Checkpoint) -> SavedModel:
    """Return the model, or raise if it is missing."""
    if checkpoint.contents.model is None:
        raise CheckpointError(f"{checkpoint.path}: there is no model in it")
    return checkpoint.contents.model
