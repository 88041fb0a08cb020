"""`contents.json`: names, shapes and where each tensor is stored, validated when it is read.

Everything is keyed by a parameter's name and its logical shape. A tensor is stored in chunks, each
a box of it in some file. Which rank wrote a file plays no role. `state.tree.encode` describes
nested values, and keeps tensors of a few bytes in the text.

A master is stored as the first entry of its parameter's state, so resharding and listing treat it
as state. In dicts and in the optimizer the two are apart: an optimizer may take any key it finds in
its state for its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardstep.checkpoint.files import (
    CheckpointError,
    Digest,
    Manifest,
    check_file,
    read_json,
    require,
)
from shardstep.checkpoint.safetensors import MAX_HEADER_NBYTES
from shardstep.plan import Box, overlap
from shardstep.state.tree import Form, Leaf, Node, dtype_named, is_counts, is_sizes, leaves, name_of

K = TypeVar("K")

CONTENTS = "contents.json"
MASTER = "shardstep.master"
NO_MASTER = "is no float tensor of its shape"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, stored under a key in a file."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True, slots=True)
class Stored(Form):
    """A tensor in files."""

    chunks: tuple[Chunk, ...]


@dataclass
class Tree:
    """A nested value: its structure, and its tensors that are in files, by leaf number."""

    node: Node
    stored: dict[int, Stored]

    @cached_property
    def leaves(self) -> list[Leaf]:
        """The tensors of the value, in order."""
        return leaves(self.node)

    def with_stored(self, stored: dict[int, Stored]) -> Tree:
        """Return the same value with these tensors in files."""
        tree = Tree(self.node, stored)
        tree.leaves = self.leaves
        return tree

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(leaf.nbytes for leaf in self.leaves)


@dataclass(frozen=True, slots=True)
class SavedParam:
    """One parameter of the optimizer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    state: Tree | None

    @property
    def leaves(self) -> list[Leaf]:
        """The tensors of the state, in order."""
        return self.state.leaves if self.state is not None else []

    @property
    def per_element(self) -> list[bool]:
        """For each tensor of the state, True if it has the parameter's shape."""
        return [leaf.shape == self.shape for leaf in self.leaves]

    @property
    def entries(self) -> list[Node]:
        """The entries of the state, without the master."""
        items = self.state.node[1] if self.state is not None else []
        return [item for key, item in items if key != MASTER]

    @property
    def master(self) -> Stored | None:
        """The file entry of the master, if there is one."""
        if self.state is None or len(self.entries) == len(self.state.node[1]):
            return None
        return self.state.stored.get(0)

    @property
    def master_fits(self) -> bool:
        """False if there is a master that is not the first entry, or does not fit."""
        if self.state is None or len(self.entries) == len(self.state.node[1]):
            return True
        key, item = self.state.node[1][0]
        first = key == MASTER and item[0] == "tensor" and self.per_element[0]
        return first and dtype_named(item[1]).is_floating_point


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """The optimizer. Its groups are parameter names and options."""

    class_name: str | None
    positional: bool  # parameters are known by number only
    stepped: bool
    params: tuple[SavedParam, ...]
    groups: tuple[tuple[tuple[str, ...], Tree], ...]
    global_state: Tree
    extra_entries: Tree  # of the class's state dict
    rounding_step: int = 0


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The model's tensors, further names of the same tensors, and its extra state."""

    tensors: dict[str, Stored]
    aliases: dict[str, str]
    extra_state: Tree


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything in a checkpoint. Parts that were not saved are None."""

    optimizer: SavedOptimizer | None = None
    model: SavedModel | None = None
    extra: Tree | None = None
    made_by: dict[str, Any] = field(default_factory=dict)

    def trees(self) -> Iterator[tuple[str, str, Tree]]:
        """Yield the kind of every nested value, its owner as in " of 'weight'", and the value."""
        if self.optimizer is not None:
            for param in self.optimizer.params:
                if param.state is not None:
                    yield "optimizer state", f" of {param.name!r}", param.state
            for number, (_, options) in enumerate(self.optimizer.groups):
                yield "option", f" of group {number}", options
            yield "optimizer state", "", self.optimizer.global_state
            yield "optimizer state", "", self.optimizer.extra_entries
        if self.model is not None:
            yield "model state", "", self.model.extra_state
        if self.extra is not None:
            yield "extra", "", self.extra

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """Yield every tensor in files, with a description for messages."""
        for kind, owner, tree in self.trees():
            for number, stored in tree.stored.items():
                yield f"{kind} {tree.leaves[number].path!r}{owner}", stored
        for name, stored in self.model.tensors.items() if self.model is not None else ():
            yield f"model tensor {name!r}", stored


def attach_masters(states: Mapping[K, Any], masters: Mapping[K, torch.Tensor]) -> dict[K, Any]:
    """Return state by parameter that includes each parameter's master."""
    attached = {key: {MASTER: master, **states.get(key, {})} for key, master in masters.items()}
    return {**states, **attached}


def split_masters(states: Mapping[K, Any]) -> tuple[dict[K, Any], dict[K, torch.Tensor]]:
    """Return state and masters by parameter. A parameter with only a master has no state."""
    masters = {key: state[MASTER] for key, state in states.items() if MASTER in state}
    alone = {
        key: {name: value for name, value in state.items() if name != MASTER}
        for key, state in states.items()
    }
    return {key: state for key, state in alone.items() if state or key not in masters}, masters


def master_in_file(node: Node) -> Node:
    """Return a parameter's state whose master is not in the text, however small it is.

    A model may be loaded from masters.
    """
    if not node[1] or node[1][0][0] != MASTER:
        return node
    (key, master), *entries = node[1]
    return ["dict", [[key, [*master[:-1], None]], *entries]]


_KEYS = {
    "class_name": "class",
    "global_state": "loose",
    "extra_entries": "beside",
    "rounding_step": "rounded",
    "extra_state": "rest",
}
"""The keys in the file of fields that have another name here."""


def to_json(contents: Contents) -> str:
    """Return the text of `contents.json`."""
    data = {name: getattr(contents, name) for name in ("made_by", "optimizer", "model", "extra")}
    return json.dumps({k: v for k, v in data.items() if v is not None}, default=_json_form)


def _json_form(value: Any) -> Any:
    """Return a value that `json` does not know as values that it knows."""
    if isinstance(value, torch.dtype):
        return name_of(value)
    if isinstance(value, Chunk):
        return [value.file, value.key, value.box.offsets, value.box.sizes]
    names = [each.name for each in fields(value)]
    if isinstance(value, SavedParam):
        names.append("per_element")
    return {_KEYS.get(name, name): getattr(value, name) for name in names}


def read_contents(path: Path, manifest: Manifest) -> Contents:
    """Read and validate `contents.json`."""
    require(CONTENTS in manifest.files, f"{path}: its list of files lacks {CONTENTS}")
    check_file(path / CONTENTS, manifest.files[CONTENTS])
    return _Parser(path / CONTENTS, manifest.files).contents(read_json(path / CONTENTS))


class _Parser:
    """A parser of contents that trusts nothing. Only `files` may hold tensors."""

    def __init__(self, path: Path, files: Mapping[str, Digest]) -> None:
        self._path = path
        self._files = files
        self._claimed: dict[str, dict[str, int]] = {}  # bytes by file and key

    def contents(self, data: Any) -> Contents:
        try:
            parsers: dict[str, Callable[[Any], Any]] = {
                "optimizer": self._optimizer,
                "model": self._model,
                "extra": self._tree,
            }
            given = {key: data[key] for key in parsers if data.get(key) is not None}
            found = {key: parsers[key](each) for key, each in given.items()}
            contents = Contents(**found, made_by=dict(data.get("made_by", {})))
            # A sparse file is long and takes no disk space.
            for file, keys in self._claimed.items():
                claimed, nbytes = sum(keys.values()), self._files[file].nbytes
                fits = 0 <= nbytes - claimed - 8 <= MAX_HEADER_NBYTES
                self._require(fits, f"{file} has {nbytes:,} bytes, its tensors {claimed:,}")
            return contents
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            raise CheckpointError(
                f"{self._path}: does not describe a checkpoint ({reason})"
            ) from error

    def _require(self, holds: bool, problem: str) -> None:
        require(holds, f"{self._path}: {problem}; the checkpoint is damaged")

    def _optimizer(self, data: Any) -> SavedOptimizer:
        class_name, rounding_step = data["class"], data["rounded"]
        self._require(isinstance(class_name, str | None), "the optimizer's class is not a name")
        if class_name is not None and class_name.startswith("shardstep."):
            class_name = None  # 0.1.0 named its own wrapper of several classes; each group has its
        self._require(is_counts([rounding_step]), "the number of rounded steps is not a count")
        params = tuple(self._param(each) for each in data["params"])
        groups = []
        for names, options in data["groups"]:
            self._require(isinstance(names, list), "a group is not a list of parameters")
            groups.append((tuple(names), self._dict(options, {"params", "param_names"})))
        grouped = [name for names, _ in groups for name in names]
        once = len(set(grouped)) == len(grouped) and grouped == [param.name for param in params]
        self._require(once, "its groups do not list each of its parameters once")
        global_state = self._dict(data["loose"])
        named = all(isinstance(key, str) for key, _ in global_state.node[1])
        self._require(named, "state of no parameter has a number for a key")
        return SavedOptimizer(
            class_name,
            self._bool(data["positional"]),
            self._bool(data["stepped"]),
            params,
            tuple(groups),
            global_state,
            self._dict(data["beside"], {"state", "param_groups"}),
            rounding_step,
        )

    def _param(self, data: Any) -> SavedParam:
        name, shape = data["name"], data["shape"]
        self._require(isinstance(name, str), "a parameter has no name")
        self._require(is_sizes(shape), f"parameter {name!r} has an impossible shape")
        dtype, trainable = dtype_named(data["dtype"]), self._bool(data["trainable"])
        state = None if data["state"] is None else self._dict(data["state"])
        param = SavedParam(name, tuple(shape), dtype, trainable, state)
        self._require(
            param.per_element == [self._bool(each) for each in data["per_element"]],
            f"the shapes of parameter {name!r} and of its state contradict `per_element`",
        )
        self._require(param.master_fits, f"the master of {name!r} {NO_MASTER}")
        return param

    def _model(self, data: Any) -> SavedModel:
        tensors = {name: self._stored(each) for name, each in data["tensors"].items()}
        aliases = data["aliases"]
        known = isinstance(aliases, dict) and all(name in tensors for name in aliases.values())
        self._require(known, "a name of the model stands for a tensor that is not there")
        return SavedModel(tensors, aliases, self._dict(data["rest"]))

    def _bool(self, data: Any) -> bool:
        self._require(isinstance(data, bool), "a flag is neither true nor false")
        return bool(data)

    def _dict(self, data: Any, forbidden: Container[str] = ()) -> Tree:
        tree = self._tree(data)
        is_dict = tree.node[0] == "dict" and not any(key in forbidden for key, _ in tree.node[1])
        self._require(is_dict, "a value is not a dict, or has a key that it must not have")
        return tree

    def _tree(self, data: Any) -> Tree:
        stored = {int(number): self._stored(each) for number, each in data["stored"].items()}
        tree = Tree(data["node"], stored)
        found = tree.leaves
        in_files = {number for number, leaf in enumerate(found) if leaf.data is None}
        self._require(stored.keys() == in_files, "a tensor is in no file, or belongs to no value")
        for number, held in stored.items():
            same = (held.dtype, held.shape) == (found[number].dtype, found[number].shape)
            self._require(same, f"tensor {found[number].path!r} has two different descriptions")
        return tree

    def _stored(self, data: Any) -> Stored:
        dtype, shape = dtype_named(data["dtype"]), data["shape"]
        self._require(is_sizes(shape), "a tensor has an impossible shape")
        chunks = tuple(self._chunk(each, dtype, shape) for each in data["chunks"])
        # Chunks that do not overlap and have as many elements as the tensor cover it.
        complete = sum(chunk.box.numel for chunk in chunks) == math.prod(shape)
        self._require(complete, "the chunks of a tensor are more or less than the tensor")
        apart = overlap([chunk.box for chunk in chunks]) is None
        self._require(apart, f"chunks of a tensor of shape {tuple(shape)} overlap")
        return Stored(dtype, tuple(shape), chunks)

    def _chunk(self, data: Any, dtype: torch.dtype, shape: Sequence[int]) -> Chunk:
        file, key, offsets, sizes = data
        self._require(file in self._files, "a tensor is in a file that is not listed")
        self._require(isinstance(key, str), "a chunk has no name")
        self._require(is_counts(offsets) and is_sizes(sizes), "a chunk has impossible sizes")
        box = Box(tuple(offsets), tuple(sizes))
        self._require(box.fits(shape), f"chunk {key!r:.100} reaches out of its tensor")
        claimed = self._claimed.setdefault(file, {})
        self._require(key not in claimed, f"chunk {key!r:.100} of {file} belongs to two tensors")
        claimed[key] = box.numel * dtype.itemsize
        return Chunk(file, key, box)
