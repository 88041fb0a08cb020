"""Nested state in a form that `torch.distributed.checkpoint` can flatten, and back.

DCP does not support keys that are no strings, tensors in tuples, which it would pickle, and tensor
subclasses. All three become dicts with string keys. The loading side restores them from the
structure of the state there. A value that does not exist yet becomes None, as
Note [State before the first step] in `stateful.py` explains.

A list is saved with its length: DCP reads only the entries that the loading side has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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
    # DCP pickles a deque, as any other value.
    inside = tree_leaves(value, lambda each: isinstance(each, (torch.Tensor, Mapping, deque)))
    if any(isinstance(each, (torch.Tensor, Mapping)) for each in inside):
        made = {str(number): to_portable(item, started) for number, item in enumerate(value)}
        return {**made, LENGTH: len(value) if started else None}
    return value if started else None


def from_portable(node: Node, value: Any, owner: str) -> Any:
    """Return the state of structure `node`, or None if it was saved as absent."""
    present: list[str] = []
    absent: list[str] = []
    values: list[Any] = []

    def misfit(path: str, value: Any) -> ValueError:
        place = path.removeprefix(".") or "the state"
        return ValueError(f"{owner} was loaded with a {type(value).__name__} for {place!r}")

    def take(value: Any, path: str) -> Any:
        unread = isinstance(value, Placeholder) and not value.started and not value.reading
        if value is None or unread:
            absent.append(path.removeprefix("."))
            return None
        present.append(path.removeprefix("."))
        if isinstance(value, Placeholder):
            return value.take_part()
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        if isinstance(value, (int, float)):
            return value  # a step counter of older versions of torch
        raise misfit(path, value)

    def walk(node: Node, value: Any, path: str) -> Any:
        kind, *inner = node
        if kind == "tensor":
            return take(value, path)
        if not _has_tensors_or_dicts(node):
            values.append(value)
            return value
        if kind == "wrapper":
            name, items, context, shape, stride = inner
            parts = walk(["dict", items], value, path)
            if any(part is None for part in parts.values()):
                return None
            # A context holds no tensors.
            return wrap(name, parts, decode(context, lambda leaf: torch.empty(0)), shape, stride)
        items = inner[0] if kind == "dict" else list(enumerate(inner[0]))
        if not isinstance(value, Mapping) or not all(str(key) in value for key, _ in items):
            raise misfit(path, value)
        if kind != "dict" and value.get(LENGTH) not in (None, len(items)):
            raise ValueError(
                f"{owner} was saved with {value[LENGTH]} entries in {path.removeprefix('.')!r}, "
                f"and {len(items)} were read, since this optimizer has that many; before loading, "
                "take enough steps to have all, or use shardstep.checkpoint"
            )
        read = {key: walk(item, value[str(key)], f"{path}.{key}") for key, item in items}
        return read if kind == "dict" else (list if kind == "list" else tuple)(read.values())

    read = walk(node, value, "")
    if present and absent:
        raise ValueError(
            f"{owner} was loaded with {present[0]!r} but without {absent[0]!r}; the checkpoint was "
            "not made by an optimizer of this class and options"
        )
    nothing = not present and all(each is None for each in values)
    return None if absent or nothing else read


def _has_tensors_or_dicts(node: Node) -> bool:
    if node[0] in ("list", "tuple"):
        return any(_has_tensors_or_dicts(item) for item in node[1])
    return node[0] in ("tensor", "dict", "wrapper")
