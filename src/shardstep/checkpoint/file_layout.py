"""Assigning tensors to files, for ranks that save and for one process that writes for all."""

from __future__ import annotations

import heapq
import json
import platform
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from shardstep.checkpoint.files import MAX_JSON_NBYTES
from shardstep.checkpoint.format import (
    CONTENTS,
    Chunk,
    Contents,
    SavedModel,
    SavedParam,
    Stored,
    Tree,
    to_json,
)
from shardstep.checkpoint.inputs import ModelState
from shardstep.checkpoint.safetensors import Source
from shardstep.plan import Box, ShardPlan, boxes
from shardstep.state.tree import Node, encode, leaves

WEIGHTS = "model.safetensors"
HF_INDEX = "model.safetensors.index.json"


class FileLayout:
    """The files of a checkpoint. Every process names all of them.

    It fills `own_files`, the files of `own_ranks`, which it writes.
    """

    def __init__(self, world_size: int, own_ranks: Container[int]) -> None:
        self.world_size = world_size
        self._own_ranks = own_ranks
        self.own_files: dict[str, dict[str, Source]] = {}

    def add_chunk(
        self, kind: str, group_rank: int, key: str, box: Box, tensor: Source | None
    ) -> Chunk:
        """Assign a chunk to a rank's file, and keep its tensor if this process writes the file."""
        single = self.world_size == 1 or kind == "extra"
        number = "" if single else f"-{group_rank + 1:05}-of-{self.world_size:05}"
        file = f"{kind}{number}.safetensors"
        if group_rank in self._own_ranks:
            assert tensor is not None
            self.own_files.setdefault(file, {})[key] = tensor
        return Chunk(file, key, box)

    def add_whole(self, kind: str, group_rank: int, key: str, tensor: Source) -> Stored:
        """Assign a tensor, in one chunk, to a rank's file."""
        shape = tuple(tensor.shape)
        chunk = self.add_chunk(kind, group_rank, key, Box.whole(shape), tensor)
        return Stored(tensor.dtype, shape, (chunk,))

    def add_state(
        self,
        index: int,
        param: SavedParam,
        pieces: Sequence[tuple[int, Box]],
        source: Callable[[int, Box], Source],
    ) -> None:
        """Assign the tensors of a parameter's state that are not in the text to files.

        `pieces` are the boxes of the parameter, each with its rank. `source` returns a box of a
        tensor by its number, on the rank that writes it.
        """
        for number, leaf in enumerate(param.state.leaves if param.state is not None else ()):
            if param.state is None or leaf.data is not None:
                continue
            # The first rank with a part keeps what belongs to the whole parameter.
            whole = [(pieces[0][0], Box.whole(leaf.shape))]
            chunks = []
            for rank, box in pieces if leaf.shape == param.shape else whole:
                key = f"{index}.{number}:{param.name}:{leaf.path}@{list(box.offsets)}"
                tensor = source(number, box) if rank in self._own_ranks else None
                chunks.append(self.add_chunk("optimizer", rank, key, box, tensor))
            param.state.stored[number] = Stored(leaf.dtype, leaf.shape, tuple(chunks))

    def add_model(self, model: ModelState, of_rank_0: Container[str] = ()) -> SavedModel:
        """Assign a model's tensors, which every rank has, to ranks."""
        owners = assign_owners(model.tensors, of_rank_0, self.world_size)
        tensors = {}
        for name, rank in owners.items():
            tensors[name] = self.add_whole("model", rank, name, model.tensors[name])
        return SavedModel(tensors, model.aliases, self.add_value("model", model.extra))

    def add_value(self, name: str, value: Any) -> Tree:
        """Assign a nested value to rank 0."""
        try:
            node, tensors = encode(value, name)
        except TypeError as error:
            raise TypeError(
                f"{error}; a checkpoint holds tensors, numbers, text, lists and dicts"
            ) from None
        return self.add_tree(name, node, tensors.__getitem__)

    def add_tree(self, name: str, node: Node, source: Callable[[int], Source]) -> Tree:
        """Assign a nested value to rank 0. `source` returns its tensors by number."""
        stored = {}
        for number, leaf in enumerate(leaves(node)):
            if leaf.data is None:
                key = f"{name}.{number}:{leaf.path}"
                stored[number] = self.add_whole("extra", 0, key, source(number))
        return Tree(node, stored)


def pieces_of(plan: ShardPlan) -> list[list[tuple[int, Box]]]:
    """Return the boxes of each parameter, with the ranks that hold them in order."""
    pieces: list[list[tuple[int, Box]]] = [[] for _ in plan.specs]
    for rank, held in enumerate(plan.holdings):
        for param, interval in held.items():
            spec = plan.specs[param]
            if interval == spec.whole:
                pieces[param] = [(rank, Box.whole(spec.shape))]
                continue
            pieces[param] += [(rank, box) for _, box in boxes(interval, spec.shape, spec.stride)]
    return pieces


def assign_owners(
    tensors: Mapping[str, Source | Stored], of_rank_0: Container[str], world_size: int
) -> dict[str, int]:
    """Return the rank that writes or reads each replicated tensor, balanced by bytes.

    Rank 0 owns the tensors in `of_rank_0`, which may differ between ranks.
    """
    loads = [(0, rank) for rank in range(world_size)]
    owner = {}
    for name in sorted(tensors, key=lambda name: -tensors[name].nbytes):
        if name in of_rank_0:
            owner[name] = 0
            continue
        load, rank = loads[0]
        owner[name] = rank
        heapq.heapreplace(loads, (load + tensors[name].nbytes, rank))
    return {name: owner[name] for name in tensors}


def json_files(contents: Contents) -> dict[str, str]:
    """Return the text of the JSON files for these contents, by file name."""
    texts = {CONTENTS: to_json(contents)}
    if len(texts[CONTENTS]) > MAX_JSON_NBYTES:
        raise ValueError(
            f"{CONTENTS} would have {len(texts[CONTENTS]):,} bytes, but at most "
            f"{MAX_JSON_NBYTES:,} are read; keep large values in tensors"
        )
    if contents.model is not None:
        file_of = {name: stored.chunks[0].file for name, stored in contents.model.tensors.items()}
        if set(file_of.values()) - {WEIGHTS}:
            total = sum(stored.nbytes for stored in contents.model.tensors.values())
            texts[HF_INDEX] = hf_index(file_of, total)
    return texts


def hf_index(file_of: Mapping[str, str], nbytes: int) -> str:
    """Return the index that Hugging Face's loaders need for several files of weights."""
    return json.dumps({"metadata": {"total_size": nbytes}, "weight_map": dict(file_of)}, indent=2)


def made_by(world_size: int) -> dict[str, Any]:
    """Return the versions that write the checkpoint, and the number of ranks."""
    from shardstep import __version__

    return {
        "shardstep": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "world_size": world_size,
    }
