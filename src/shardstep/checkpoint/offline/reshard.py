"""Rewrite a checkpoint in the files that another number of ranks would have written.

A checkpoint loads at any world size as it is. Resharded for the ranks that load it, each rank reads
one file. One process does it, and holds two chunks of 16 MiB at a time.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from shardstep.checkpoint.files import Stages, no_stages
from shardstep.checkpoint.format import (
    Contents,
    SavedModel,
    SavedOptimizer,
    SavedParam,
    Stored,
    Tree,
)
from shardstep.checkpoint.inputs import ModelState
from shardstep.checkpoint.read import Checkpoint
from shardstep.checkpoint.safetensors import Streamed
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
            checkpoint.verify(progress=stages("checking", checkpoint.manifest.nbytes))
        files = FileLayout(ranks, range(ranks))
        contents = _Resharding(checkpoint, files).contents(layout)
        return write_alone(out, files, contents, stages)


class _Resharding:
    """Places the tensors of a checkpoint in the files of other ranks."""

    def __init__(self, checkpoint: Checkpoint, files: FileLayout) -> None:
        self._checkpoint = checkpoint
        self._files = files

    def contents(self, layout: Layout | None) -> Contents:
        """Return the same contents in other files."""
        old = self._checkpoint.contents
        # The first maker is of interest, the files in between are not.
        origin = old.made_by.get("cut_from", old.made_by)
        return Contents(
            None if old.optimizer is None else self._optimizer(old.optimizer, layout),
            None if old.model is None else self._model(old.model),
            None if old.extra is None else self._value("extra", old.extra),
            {**made_by(self._files.world_size), "cut_from": origin},
        )

    def _optimizer(self, saved: SavedOptimizer, layout: Layout | None) -> SavedOptimizer:
        specs = [_spec(param) for param in saved.params]
        if layout is None:
            known = {full_name(cls) for cls in ELEMENT_WISE}
            layout = "sliced" if saved.class_name in known else "whole"
        plan = ShardPlan.make(specs, self._files.world_size, layout)
        pieces = pieces_of(plan)
        return replace(
            saved,
            params=tuple(
                self._param(index, param, pieces[index]) for index, param in enumerate(saved.params)
            ),
            groups=tuple(
                (names, self._value(f"group {number}", options))
                for number, (names, options) in enumerate(saved.groups)
            ),
            global_state=self._value("state", saved.global_state),
            extra_entries=self._value("beside", saved.extra_entries),
        )

    def _model(self, saved: SavedModel) -> SavedModel:
        # A load deals tensors to ranks in the same way, so each rank reads one file.
        tensors = {name: self._read(stored) for name, stored in saved.tensors.items()}
        model = self._files.add_model(ModelState(tensors, saved.aliases, {}))
        return replace(model, extra_state=self._value("model", saved.extra_state))

    def _value(self, name: str, tree: Tree) -> Tree:
        return self._files.add_tree(name, tree.node, lambda number: self._read(tree.stored[number]))

    def _param(self, index: int, param: SavedParam, pieces: list[tuple[int, Box]]) -> SavedParam:
        if param.state is None:
            return param
        old, made = param.state.stored, replace(param, state=Tree(param.state.node, {}))
        self._files.add_state(index, made, pieces, lambda n, box: self._read(old[n], box))
        return made

    def _read(self, stored: Stored, box: Box | None = None) -> Streamed:
        box = box or Box.whole(stored.shape)
        return Streamed(
            stored.dtype,
            box.sizes,
            lambda part, target: self._checkpoint.read_box(stored, part.out_of(box), target),
        )


def _spec(param: SavedParam) -> ParamSpec:
    """Describe a parameter to the planner, in the memory format of its state.

    If the parameter has another format, ranks read their elements from several files.
    """
    found = param.state.leaves if param.state is not None else []
    strides = [leaf.stride for leaf in found if leaf.shape == param.shape]
    stride = strides[0] if strides else contiguous(param.shape)
    return ParamSpec(
        param.name, param.shape, stride, param.dtype, "cpu#0", group=0, trainable=param.trainable
    )
