"""Nested state in a form that `torch.distributed.checkpoint` can flatten, and back.

DCP does not support keys that are no strings, tensors in tuples, which it would pickle, and tensor
subclasses. All three become dicts with string keys. The loading side restores them from the
structure of the state there. A value that does not exist yet becomes None, as
Note [State before the first step] in `stateful.py` explains.

A list is saved with its length: DCP reads only the entries that the loading side has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardstep.checkpoint.dcp.placeholder import Placeholder
from shardstep.state.tree import Node, decode, wrap

LENGTH = "length"
"""The key of the length of a list or tuple."""


def to_portable(value: Any, started: bool = True) -> Any:
    """Return state in portable form; unless `started`, with None for every value."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        made = {str(key): to_portable(item, started) for key, item in value.items()}
        if len(made) != len(value):
            raise RuntimeError(f"keys {list(value)} of the optimizer state differ in type only")
        return made
    if contains(value, (torch.Tensor, Mapping)):
        made = {str(number): to_portable(item, started) for number, item in enumerate(value)}
        return {**made, LENGTH: len(value) if started else None}
    return value if started else None


def contains(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether a value is, or holds at any depth, an instance of `kinds`."""
    if isinstance(value, kinds):
        return True
    if isinstance(value, Mapping):
        return any(contains(item, kinds) for item in value.values())
    return type(value) in (list, tuple) and any(contains(item, kinds) for item in value)


def from_portable(node: Node, value: Any, owner: str) -> Any:
    """Return the state of structure `node`, or None if it was saved as absent."""
    reader = _Reader(owner)
    read = reader.walk(node, value, "")
    if reader.present and reader.absent:
        raise ValueError(
            f"{owner} was loaded with {reader.present[0]!r} but without {reader.absent[0]!r}; "
            "the checkpoint was not made by an optimizer of this class and options"
        )
    nothing = not reader.present and all(each is None for each in reader.values)
    return None if reader.absent or nothing else read


class _Reader:
    """Restores state from its portable form, and notes which tensors are there."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.present: list[str] = []
        self.absent: list[str] = []
        self.values: list[Any] = []

    def walk(self, node: Node, value: Any, path: str) -> Any:
        """Return the state of structure `node` at `path`."""
        kind, *inner = node
        if kind == "tensor":
            return self._tensor(value, path)
        if not _has_tensors_or_dicts(node):
            self.values.append(value)
            return value
        if kind == "wrapper":
            name, items, context, shape, stride = inner
            parts = self.walk(["dict", items], value, path)
            if any(part is None for part in parts.values()):
                return None
            # A context holds no tensors.
            return wrap(name, parts, decode(context, lambda leaf: torch.empty(0)), shape, stride)
        items = inner[0] if kind == "dict" else list(enumerate(inner[0]))
        if not isinstance(value, Mapping) or not all(str(key) in value for key, _ in items):
            raise self._misfit(path, value)
        if kind != "dict" and value.get(LENGTH) not in (None, len(items)):
            raise ValueError(
                f"{self._owner} was saved with {value[LENGTH]} entries in "
                f"{path.removeprefix('.')!r}, and {len(items)} were read, since this optimizer has "
                "that many; before loading, take enough steps to have all, or use "
                "shardstep.checkpoint"
            )
        read = {key: self.walk(item, value[str(key)], f"{path}.{key}") for key, item in items}
        return read if kind == "dict" else (list if kind == "list" else tuple)(read.values())

    def _tensor(self, value: Any, path: str) -> Any:
        absent = value is None or (
            isinstance(value, Placeholder) and not value.started and not value.reading
        )
        (self.absent if absent else self.present).append(path.removeprefix("."))
        if absent:
            return None
        if isinstance(value, Placeholder):
            return value.take_part()
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        if isinstance(value, (int, float)):
            return value  # a step counter of older versions of torch
        raise self._misfit(path, value)

    def _misfit(self, path: str, value: Any) -> ValueError:
        place = path.removeprefix(".") or "the state"
        return ValueError(f"{self._owner} was loaded with a {type(value).__name__} for {place!r}")


def _has_tensors_or_dicts(node: Node) -> bool:
    if node[0] in ("list", "tuple"):
        return any(_has_tensors_or_dicts(item) for item in node[1])
    return node[0] in ("tensor", "dict", "wrapper")
