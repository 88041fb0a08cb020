"""Cutting a checkpoint anew, as another number of ranks would have written it.

A checkpoint loads at any world size as it is; cut for the ranks that load it, each of them reads
one file. One process does it, and holds two chunks of 16 MiB at a time, whatever the size.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from shardstep.checkpoint.file_layout import (
    FileLayout,
    deal,
    holders_of,
    made_by,
    state_key,
    texts_of,
    value_key,
)
from shardstep.checkpoint.format import (
    Contents,
    SavedModel,
    SavedOptimizer,
    SavedParam,
    Stored,
    Tree,
)
from shardstep.checkpoint.read import Checkpoint
from shardstep.checkpoint.safetensors import Stages, Streamed, no_stages
from shardstep.checkpoint.write import Job, write_out
from shardstep.comm import SoloComm
from shardstep.layouts.known_classes import ELEMENT_WISE
from shardstep.local.multi_class import full_name
from shardstep.plan import Box, Layout, ParamSpec, ShardPlan, boxes, contiguous
from shardstep.state.tree import leaves


def reshard(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    ranks: int,
    layout: Layout | None = None,
    *,
    verify: bool = True,
    stages: Stages = no_stages,
) -> Path:
    """Write a checkpoint anew, in the files that `ranks` ranks would have written.

    Called in one process. The result loads exactly as the original does. Like a save, it is
    complete or not there, and it counts as saved now.

    Args:
        path: the checkpoint.
        out: the folder to make; there must be nothing yet.
        ranks: for how many ranks to cut it; 1 for one file each of model and optimizer.
        layout: in which layout; None for the one that the optimizer's class is given by default.
        verify: whether every file is compared with its digest first. Without it, damage that goes
            unnoticed here is given a new digest.
        stages: told what is done.

    Returns:
        The new checkpoint.

    Raises:
        CheckpointError: if the checkpoint is damaged.
        FileExistsError: if there is something at `out`.
        OSError: if it cannot be written there.
    """
    if ranks < 1:
        raise ValueError(f"a checkpoint is cut for at least one rank, not {ranks}")
    with Checkpoint(Path(path)) as checkpoint:
        if verify:
            total = sum(digest.nbytes for digest in checkpoint.manifest.files.values())
            checkpoint.verify(progress=stages("checking", total))
        shelves = FileLayout(ranks, range(ranks))
        contents = _Cutting(checkpoint, shelves).contents(layout)
        job = Job(Path(out).absolute(), shelves.own, texts_of(contents), keep=None)
        total = sum(stored.nbytes for _, stored in contents.tensors())
        return write_out(SoloComm(), job, stages("writing", total))


def default_layout(kind: str | None) -> Layout:
    """The layout that an optimizer of the class of this name is given if nobody asks for one."""
    return "sliced" if kind in {full_name(cls) for cls in ELEMENT_WISE} else "whole"


class _Cutting:
    """Puts everything that is in a checkpoint onto the shelves of other ranks."""

    def __init__(self, checkpoint: Checkpoint, shelves: FileLayout) -> None:
        self._checkpoint = checkpoint
        self._shelves = shelves

    def contents(self, layout: Layout | None) -> Contents:
        """The same contents, in other files."""
        old = self._checkpoint.contents
        # Who made it first is of interest, the files in between are not.
        origin = old.made_by.get("cut_from", old.made_by)
        return Contents(
            None if old.optimizer is None else self._optimizer(old.optimizer, layout),
            None if old.model is None else self._model(old.model),
            None if old.extra is None else self._value("extra", old.extra),
            {**made_by(self._shelves.world_size), "cut_from": origin},
        )

    def _optimizer(self, saved: SavedOptimizer, layout: Layout | None) -> SavedOptimizer:
        specs = [_spec(param) for param in saved.params]
        chosen = default_layout(saved.kind) if layout is None else layout
        plan = ShardPlan.make(specs, self._shelves.world_size, chosen)
        held = [plan.intervals(rank) for rank in range(plan.world_size)]
        holders = holders_of(held)
        params = []
        for index, param in enumerate(saved.params):
            pieces = [
                (rank, box)
                for rank in holders[index]
                for _, box in boxes(held[rank][index], specs[index].shape, specs[index].stride)
            ]
            params.append(self._param(index, param, pieces))
        groups = [
            (names, self._value(f"group {number}", options))
            for number, (names, options) in enumerate(saved.groups)
        ]
        loose = self._value("state", saved.loose)
        beside = self._value("beside", saved.beside)
        return replace(
            saved, params=tuple(params), groups=tuple(groups), loose=loose, beside=beside
        )

    def _param(self, index: int, param: SavedParam, pieces: list[tuple[int, Box]]) -> SavedParam:
        if param.state is None:
            return param
        found = leaves(param.state.node)
        stored = {}
        for number, old in param.state.stored.items():
            # What belongs to the whole parameter is kept by the first that has a part of it.
            whole = [(pieces[0][0], Box.whole(old.shape))]
            chunks = [
                self._shelves.put(
                    "optimizer",
                    rank,
                    state_key(index, number, param.name, found[number], box),
                    box,
                    self._source(old, box),
                )
                for rank, box in (pieces if param.per_element[number] else whole)
            ]
            stored[number] = replace(old, chunks=tuple(chunks))
        return replace(param, state=Tree(param.state.node, stored))

    def _model(self, saved: SavedModel) -> SavedModel:
        tensors = {}
        # Dealt as a load deals them, so that each rank finds its share in one file.
        for name, rank in deal(saved.tensors, set(), self._shelves.world_size).items():
            old = saved.tensors[name]
            box = Box.whole(old.shape)
            chunk = self._shelves.put("model", rank, name, box, self._source(old, box))
            tensors[name] = replace(old, chunks=(chunk,))
        return SavedModel(tensors, saved.aliases, self._value("model", saved.rest))

    def _value(self, name: str, tree: Tree) -> Tree:
        found = leaves(tree.node)
        stored = {}
        for number, old in tree.stored.items():
            box = Box.whole(old.shape)
            key = value_key(name, number, found[number])
            chunk = self._shelves.put("extra", 0, key, box, self._source(old, box))
            stored[number] = replace(old, chunks=(chunk,))
        return Tree(tree.node, stored)

    def _source(self, stored: Stored, box: Box) -> Streamed:
        return Streamed(
            stored.dtype,
            box.sizes,
            lambda part, target: self._checkpoint.read(stored, part.out_of(box), target),
        )


def _spec(param: SavedParam) -> ParamSpec:
    """A parameter as the planner wants it.

    Its memory format is that of its state. Should that be another than the parameter's, ranks find
    their elements in more than one file, and that is all.
    """
    found = leaves(param.state.node) if param.state is not None else []
    alike = [leaf for leaf, each in zip(found, param.per_element, strict=True) if each]
    stride = alike[0].stride if alike else contiguous(param.shape)
    return ParamSpec(
        param.name, param.shape, stride, param.dtype, "cpu#0", group=0, trainable=param.trainable
    )
