"""Rewrite a checkpoint in the files that another number of ranks would have written.

A checkpoint loads at any world size as it is. Resharded for the ranks that load it, each rank reads
one file. One process does it, and holds two chunks of 16 MiB at a time.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from shardstep.checkpoint.files import Stages, no_stages
from shardstep.checkpoint.format import Contents, SavedParam, Tree
from shardstep.checkpoint.inputs import ModelState
from shardstep.checkpoint.read import Checkpoint
from shardstep.checkpoint.write import FileLayout, made_by, pieces_of, write_alone
from shardstep.layouts.choose import ELEMENT_WISE
from shardstep.local.multi_class import full_name
from shardstep.plan import Box, Layout, ParamSpec, ShardPlan, contiguous


def reshard(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    ranks: int,
    layout: Layout | None = None,
    *,
    verify: bool = True,
    stages: Stages = no_stages,
) -> Path:
    """Rewrite a checkpoint in the files that `ranks` ranks would have written.

    Called in one process. The result loads exactly as the original does. It is atomic like a save,
    and its time of saving is now.

    Args:
        path: the checkpoint.
        out: the folder to make; it must not exist.
        ranks: number of ranks; with 1, model and optimizer are one file each.
        layout: the layout; None for the default of the optimizer's class.
        verify: whether to compare every file with its digest first. Otherwise damage is copied and
            gets a valid digest.
        stages: receives progress.

    Returns:
        The new checkpoint.

    Raises:
        CheckpointError: if the checkpoint is damaged.
        FileExistsError: if `out` exists.
        OSError: if it cannot be written.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    with Checkpoint(Path(path)) as checkpoint:
        if verify:
            checkpoint.verify(stages=stages)
        files = FileLayout(ranks, range(ranks))
        return write_alone(out, files, _reshard(checkpoint, files, layout), stages)


def _reshard(checkpoint: Checkpoint, files: FileLayout, layout: Layout | None) -> Contents:
    """Return the same contents in other files."""
    old = checkpoint.contents
    optimizer, model, extra = old.optimizer, old.model, old.extra

    def move(name: str, tree: Tree) -> Tree:
        return files.add_tree(name, tree, lambda n: checkpoint.stream(tree.stored[n]))

    def move_param(index: int, param: SavedParam, pieces: list[tuple[int, Box]]) -> SavedParam:
        stored = {} if param.state is None else param.state.stored
        return files.add_state(
            index, param, pieces, lambda n, box: checkpoint.stream(stored[n], box)
        )

    if optimizer is not None:
        if layout is None:
            known = {full_name(cls) for cls in ELEMENT_WISE}
            layout = "sliced" if optimizer.class_name in known else "whole"
        plan = ShardPlan.make(list(map(_spec, optimizer.params)), files.world_size, layout)
        pairs = zip(optimizer.params, pieces_of(plan), strict=True)
        optimizer = replace(
            optimizer,
            params=tuple(move_param(number, *pair) for number, pair in enumerate(pairs)),
            groups=tuple(
                (names, move(f"group {number}", options))
                for number, (names, options) in enumerate(optimizer.groups)
            ),
            global_state=move("state", optimizer.global_state),
            extra_entries=move("beside", optimizer.extra_entries),
        )
    if model is not None:
        # A load deals tensors to ranks in the same way, so each rank reads one file.
        tensors = {name: checkpoint.stream(stored) for name, stored in model.tensors.items()}
        moved = files.add_model(ModelState(tensors, model.aliases, {}))
        model = replace(moved, extra_state=move("model", model.extra_state))
    # The first maker is of interest, the files in between are not.
    origin = old.made_by.get("cut_from", old.made_by)
    return Contents(
        optimizer,
        model,
        None if extra is None else move("extra", extra),
        {**made_by(files.world_size), "cut_from": origin},
    )


def _spec(param: SavedParam) -> ParamSpec:
    """Describe a parameter to the planner, in the memory format of its state.

    If the parameter has another format, ranks read their elements from several files.
    """
    strides = [leaf.stride for leaf in param.leaves if leaf.shape == param.shape]
    stride = strides[0] if strides else contiguous(param.shape)
    return ParamSpec(
        param.name, param.shape, stride, param.dtype, "cpu#0", group=0, trainable=param.trainable
    )
