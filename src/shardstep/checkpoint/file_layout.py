"""Which tensor goes into which file, whoever writes it: ranks that save, or one process for all."""

from __future__ import annotations

import heapq
import json
import platform
from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

import torch

from shardstep.checkpoint.format import CONTENTS, Chunk, Contents, Stored, Tree, to_json
from shardstep.checkpoint.safetensors import Source
from shardstep.checkpoint.staging import MAX_JSON_NBYTES
from shardstep.plan import Box, Holding
from shardstep.state.tree import Leaf, encode, leaves

WEIGHTS = "model.safetensors"
HF_INDEX = "model.safetensors.index.json"


class FileLayout:
    """Which tensor goes into which file; what is written here is kept, the rest only named.

    Args:
        world_size: number of ranks that the files are cut for.
        here: whose files are written here.

    Attributes:
        own: the files that are written here, with the tensors in each.
    """

    def __init__(self, world_size: int, here: Container[int]) -> None:
        self.world_size = world_size
        self._here = here
        self.own: dict[str, dict[str, Source]] = {}

    def put(self, kind: str, group_rank: int, key: str, box: Box, tensor: Source | None) -> Chunk:
        """Note where a chunk goes, and keep it if it is written here."""
        alone = self.world_size == 1 or kind == "extra"
        number = "" if alone else f"-{group_rank + 1:05}-of-{self.world_size:05}"
        file = f"{kind}{number}.safetensors"
        if group_rank in self._here:
            assert tensor is not None
            self.own.setdefault(file, {})[key] = tensor
        return Chunk(file, key, box)

    def tree(self, name: str, value: Any) -> Tree:
        """A value that rank 0 writes for all."""
        try:
            node, tensors = encode(value, name)
        except TypeError as error:
            raise TypeError(
                f"{error}; a checkpoint holds tensors, numbers, text, lists and dicts"
            ) from None
        stored = {}
        for number, (leaf, tensor) in enumerate(zip(leaves(node), tensors, strict=True)):
            if leaf.data is None:
                box = Box.whole(leaf.shape)
                chunk = self.put("extra", 0, value_key(name, number, leaf), box, tensor)
                stored[number] = Stored(leaf.dtype, leaf.shape, (chunk,))
        return Tree(node, stored)


def value_key(name: str, number: int, leaf: Leaf) -> str:
    """What a tensor of a value that rank 0 writes is called in its file."""
    return f"{name}.{number}:{leaf.path}"


def state_key(param: int, number: int, name: str, leaf: Leaf, box: Box) -> str:
    """What a chunk of a parameter's state is called in its file."""
    return f"{param}.{number}:{name}:{leaf.path}@{list(box.offsets)}"


def holders_of(held: Sequence[Holding]) -> dict[int, list[int]]:
    """Which ranks hold some of each parameter, given what each rank holds."""
    holders: dict[int, list[int]] = {}
    for rank, holding in enumerate(held):
        for param in holding:
            holders.setdefault(param, []).append(rank)
    return holders


class _Sized(Protocol):
    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""


def deal(tensors: Mapping[str, _Sized], from_first: set[str], world_size: int) -> dict[str, int]:
    """Which rank sees to which tensor, so that all have about equally many bytes.

    Args:
        tensors: what every rank has.
        from_first: those that ranks may have in their own versions; rank 0's counts.
        world_size: number of ranks.
    """
    loads = [(0, rank) for rank in range(world_size)]
    owner = {}
    for name in sorted(tensors, key=lambda name: -tensors[name].nbytes):
        if name in from_first:
            owner[name] = 0
            continue
        load, rank = loads[0]
        owner[name] = rank
        heapq.heapreplace(loads, (load + tensors[name].nbytes, rank))
    return {name: owner[name] for name in tensors}


def texts_of(contents: Contents) -> dict[str, str]:
    """The files of text that belong to these contents."""
    texts = {CONTENTS: to_json(contents)}
    if len(texts[CONTENTS]) > MAX_JSON_NBYTES:
        raise ValueError(
            f"what is in the checkpoint would take {len(texts[CONTENTS]):,} bytes of text to "
            "describe, which is more than is read back; keep large things in tensors"
        )
    if contents.model is not None:
        where = {name: stored.chunks[0].file for name, stored in contents.model.tensors.items()}
        if set(where.values()) - {WEIGHTS}:
            total = sum(stored.nbytes for stored in contents.model.tensors.values())
            texts[HF_INDEX] = hf_index(where, total)
    return texts


def hf_index(file_of: Mapping[str, str], nbytes: int) -> str:
    """The index that Hugging Face's loaders look for beside several files of weights."""
    return json.dumps({"metadata": {"total_size": nbytes}, "weight_map": dict(file_of)}, indent=2)


def made_by(world_size: int) -> dict[str, Any]:
    """What writes the checkpoint, and for how many ranks."""
    from shardstep import __version__

    return {
        "shardstep": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "world_size": world_size,
    }
