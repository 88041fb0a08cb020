"""What is in a checkpoint: names, shapes and where bytes lie, as JSON that is checked when read.

All is keyed by the parameter's name and its logical shape. A tensor is stored in chunks, each a box
of it in some file; which rank wrote a file, and how many there were, plays no role. The
structure of the state is what `tree.encode` makes of it. Tensors of a few bytes are in the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.safetensors import MAX_HEADER_NBYTES, Digest
from shardstep.checkpoint.staging import Manifest, check, read_json
from shardstep.plan import Box, overlap
from shardstep.state.limits import is_counts, is_sizes
from shardstep.state.tree import Node, dtype_named, leaves, name_of

CONTENTS = "contents.json"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, stored under a key in a file."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tree:
    """A value: its structure, and those of its tensors that are in files, by their number."""

    node: Node
    stored: dict[int, Stored]


@dataclass(frozen=True, slots=True)
class SavedParam:
    """One parameter of the optimizer.

    Attributes:
        name: its name.
        shape: its logical shape.
        dtype: its dtype.
        trainable: whether it trained.
        state: its state, if it has any.
        per_element: for each tensor of the state, whether it has a value for each element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    state: Tree | None
    per_element: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """The optimizer.

    Attributes:
        kind: its class; None if it is not known.
        positional: whether parameters have no names of their own, only numbers.
        stepped: whether it ever took a step.
        params: its parameters, in order.
        groups: for each group, the names of its parameters and its options.
        loose: state that belongs to no parameter.
        beside: what the class keeps beside its state and groups.
        rounded: how many steps were rounded stochastically.
    """

    kind: str | None
    positional: bool
    stepped: bool
    params: tuple[SavedParam, ...]
    groups: tuple[tuple[tuple[str, ...], Tree], ...]
    loose: Tree
    beside: Tree
    rounded: int = 0


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The model's tensors, which of its names mean the same tensor, and what else it keeps."""

    tensors: dict[str, Stored]
    aliases: dict[str, str]
    rest: Tree


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds; parts that were not saved are None."""

    optimizer: SavedOptimizer | None = None
    model: SavedModel | None = None
    extra: Tree | None = None
    made_by: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> Iterable[tuple[str, Stored]]:
        """Every tensor in files, with a name to speak of it by."""
        if self.optimizer is not None:
            for param in self.optimizer.params:
                for path, stored in _named(param.state):
                    yield f"optimizer state {path!r} of {param.name!r}", stored
            for number, (_, options) in enumerate(self.optimizer.groups):
                for path, stored in _named(options):
                    yield f"option {path!r} of group {number}", stored
            for tree in (self.optimizer.loose, self.optimizer.beside):
                for path, stored in _named(tree):
                    yield f"optimizer state {path!r}", stored
        if self.model is not None:
            for name, stored in self.model.tensors.items():
                yield f"model tensor {name!r}", stored
            for path, stored in _named(self.model.rest):
                yield f"model state {path!r}", stored
        for path, stored in _named(self.extra):
            yield f"extra {path!r}", stored


def _named(tree: Tree | None) -> Iterable[tuple[str, Stored]]:
    if tree is not None:
        paths = [leaf.path for leaf in leaves(tree.node)]
        for number, stored in tree.stored.items():
            yield paths[number], stored


# ------------------------------------------------------------------------------------ to text


def to_json(contents: Contents) -> str:
    """The text of `contents.json`."""
    optimizer, model = contents.optimizer, contents.model
    said: dict[str, Any] = {"made_by": contents.made_by}
    if optimizer is not None:
        said["optimizer"] = {
            "class": optimizer.kind,
            "positional": optimizer.positional,
            "stepped": optimizer.stepped,
            "params": [
                {
                    "name": param.name,
                    "shape": list(param.shape),
                    "dtype": name_of(param.dtype),
                    "trainable": param.trainable,
                    "state": _tree_out(param.state),
                    "per_element": list(param.per_element),
                }
                for param in optimizer.params
            ],
            "groups": [[list(names), _tree_out(options)] for names, options in optimizer.groups],
            "loose": _tree_out(optimizer.loose),
            "beside": _tree_out(optimizer.beside),
            "rounded": optimizer.rounded,
        }
    if model is not None:
        said["model"] = {
            "tensors": {name: _stored_out(stored) for name, stored in model.tensors.items()},
            "aliases": model.aliases,
            "rest": _tree_out(model.rest),
        }
    if contents.extra is not None:
        said["extra"] = _tree_out(contents.extra)
    return json.dumps(said)


def _tree_out(tree: Tree | None) -> Any:
    if tree is None:
        return None
    return {
        "node": tree.node,
        "stored": {str(number): _stored_out(stored) for number, stored in tree.stored.items()},
    }


def _stored_out(stored: Stored) -> Any:
    return {
        "dtype": name_of(stored.dtype),
        "shape": list(stored.shape),
        "chunks": [
            [chunk.file, chunk.key, list(chunk.box.offsets), list(chunk.box.sizes)]
            for chunk in stored.chunks
        ],
    }


# ---------------------------------------------------------------------------------- from text


def read_contents(path: Path, manifest: Manifest) -> Contents:
    """Read and check what a checkpoint says it holds.

    Raises:
        CheckpointError: if it is damaged, or describes what cannot be.
    """
    if CONTENTS not in manifest.files:
        raise CheckpointError(f"{path}: its list of files lacks {CONTENTS}")
    check(path, CONTENTS, manifest.files[CONTENTS])
    return Reader(path / CONTENTS, manifest.files).contents(read_json(path / CONTENTS))


class Reader:
    """Takes contents from JSON, believing nothing.

    Args:
        path: the file, for messages.
        files: the files that tensors may lie in.
    """

    def __init__(self, path: Path, files: Mapping[str, Digest]) -> None:
        self._path = path
        self._files = files
        self._claimed: dict[str, dict[str, int]] = {}

    def contents(self, said: Any) -> Contents:
        """All of it."""
        try:
            optimizer, model, extra = (said.get(key) for key in ("optimizer", "model", "extra"))
            contents = Contents(
                None if optimizer is None else self._optimizer(optimizer),
                None if model is None else self._model(model),
                None if extra is None else self._tree(extra),
                dict(said.get("made_by", {})),
            )
            self._check_files()
            return contents
        except CheckpointError:
            raise
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            IndexError,
            RecursionError,
        ) as error:
            said = f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{self._path}: does not describe a checkpoint ({said[:300]})"
            ) from error

    def _check_files(self) -> None:
        """Make sure that files are as long as what is said to be in them.

        A file may be long without taking any room on the disk: it is not read on its own word.
        """
        for file, keys in self._claimed.items():
            rest = self._files[file].nbytes - sum(keys.values()) - 8
            if not 0 <= rest <= MAX_HEADER_NBYTES:
                raise self._bad(
                    f"the tensors in {file} take {sum(keys.values()):,} bytes, but the file has "
                    f"{self._files[file].nbytes:,}"
                )

    def _optimizer(self, said: Any) -> SavedOptimizer:
        params = tuple(self._param(each) for each in said["params"])
        groups = []
        grouped: list[str] = []
        for listed, options in said["groups"]:
            if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
                raise self._bad("a group is not a list of parameters")
            grouped += listed
            groups.append((tuple(listed), self._dict(options, {"params", "param_names"})))
        if grouped != [param.name for param in params] or len(set(grouped)) != len(grouped):
            raise self._bad("its groups are not made up of its parameters, each of them once")
        if not isinstance(said["class"], str | None):
            raise self._bad("the class of the optimizer is not a name")
        return SavedOptimizer(
            said["class"],
            self._bool(said["positional"]),
            self._bool(said["stepped"]),
            params,
            tuple(groups),
            self._global_state(said["loose"]),
            self._dict(said["beside"], {"state", "param_groups"}),
            self._count(said["rounded"]),
        )

    def _global_state(self, said: Any) -> Tree:
        tree = self._dict(said)
        if not all(isinstance(key, str) for key, _ in tree.node[1]):
            raise self._bad("state of no parameter is under a number, as if it were of one")
        return tree

    def _dict(self, said: Any, but: Container[str] = ()) -> Tree:
        """A value that has to be a dict, without certain keys."""
        tree = self._tree(said)
        if tree.node[0] != "dict" or any(key in but for key, _ in tree.node[1]):
            raise self._bad("something is not the dict that it should be")
        return tree

    def _count(self, said: Any) -> int:
        if not is_counts([said]):
            raise self._bad(f"it says {said!r:.100} where only a number can be")
        return int(said)

    def _bool(self, said: Any) -> bool:
        if not isinstance(said, bool):
            raise self._bad(f"it says {said!r:.100} where only true or false can be")
        return said

    def _param(self, said: Any) -> SavedParam:
        name, shape = said["name"], said["shape"]
        if not isinstance(name, str) or not is_sizes(shape):
            raise self._bad("it describes a parameter without a name or with an impossible shape")
        state = None if said["state"] is None else self._dict(said["state"])
        per_element = tuple(self._bool(each) for each in said["per_element"])
        found = leaves(state.node) if state is not None else []
        if len(per_element) != len(found):
            raise self._bad(f"the state of parameter {name!r} is not described completely")
        for leaf, divided in zip(found, per_element, strict=True):
            if divided != (leaf.shape == tuple(shape)):
                raise self._bad(
                    f"state {leaf.path!r} of parameter {name!r} has shape {leaf.shape} and is said "
                    f"{'' if divided else 'not '}to be per element, but the parameter has shape "
                    f"{tuple(shape)}"
                )
        return SavedParam(
            name,
            tuple(shape),
            dtype_named(said["dtype"]),
            self._bool(said["trainable"]),
            state,
            per_element,
        )

    def _model(self, said: Any) -> SavedModel:
        tensors = {name: self._stored(each) for name, each in said["tensors"].items()}
        aliases = said["aliases"]
        if not isinstance(aliases, dict) or not all(other in tensors for other in aliases.values()):
            raise self._bad("a name of the model stands for a tensor that is not there")
        return SavedModel(tensors, aliases, self._dict(said["rest"]))

    def _tree(self, said: Any) -> Tree:
        node = said["node"]
        found = leaves(node)
        stored = {int(number): self._stored(each) for number, each in said["stored"].items()}
        for number, leaf in enumerate(found):
            held = stored.get(number)
            if (held is None) == (leaf.data is None):
                raise self._bad(f"tensor {leaf.path!r} is in no file, or in one and in the text")
            if held is not None and (held.dtype, held.shape) != (leaf.dtype, leaf.shape):
                raise self._bad(f"tensor {leaf.path!r} is described in two different ways")
        if len(stored) != sum(leaf.data is None for leaf in found):
            raise self._bad("it has a tensor that belongs nowhere")
        return Tree(node, stored)

    def _stored(self, said: Any) -> Stored:
        dtype, shape = dtype_named(said["dtype"]), said["shape"]
        if not is_sizes(shape):
            raise self._bad("a tensor has an impossible shape")
        chunks = []
        for file, key, offsets, sizes in said["chunks"]:
            if file not in self._files:
                raise self._bad(f"a tensor lies in {file!r}, which is not a file of the checkpoint")
            if not (isinstance(key, str) and is_counts(offsets) and is_sizes(sizes)):
                raise self._bad(f"chunk {key!r:.100} has no name, or impossible offsets or sizes")
            box = Box(tuple(offsets), tuple(sizes))
            if not box.fits(shape):
                raise self._bad(f"chunk {key!r:.100} reaches out of its tensor")
            if key in self._claimed.setdefault(file, {}):
                raise self._bad(f"chunk {key!r:.100} of {file} belongs to two tensors")
            self._claimed[file][key] = box.numel * dtype.itemsize
            chunks.append(Chunk(file, key, box))
        # Chunks that do not overlap and together have as many elements as the tensor are all of it.
        if sum(chunk.box.numel for chunk in chunks) != math.prod(shape):
            raise self._bad("the chunks of a tensor are more or less than the tensor")
        if overlap([chunk.box for chunk in chunks]) is not None:
            raise self._bad(f"chunks of a tensor of shape {tuple(shape)} overlap")
        return Stored(dtype, tuple(shape), tuple(chunks))

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}; the checkpoint is damaged")
