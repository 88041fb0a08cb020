"""State in a form that `torch.distributed.checkpoint` can take apart, and back from there.

Three things that module does not carry: keys that are not words, tensors in a tuple, which it would
pickle, and tensors that are made of others. They travel as words and in dicts, and become again
what the loading side's own state says they are. What is not there yet travels as None; see
Note [State that is not there yet] in `stateful.py`.

With the entries of a list travels how many there are: the loading side reads those that it has
itself, and would not notice that there are more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardstep.checkpoint.dcp.stand_in import StandIn
from shardstep.state.tree import Node, decode, wrap

LENGTH = "length"
"""Under this key is how many entries a list or tuple has."""


def portable(value: Any, started: bool = True) -> Any:
    """State as the checkpoint module can take it apart; None for a value that is not there yet."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        made = {str(key): portable(item, started) for key, item in value.items()}
        if len(made) != len(value):
            raise RuntimeError(f"keys {list(value)} of the optimizer state differ in type only")
        return made
    if holds(value, (torch.Tensor, Mapping)):
        made = {str(number): portable(item, started) for number, item in enumerate(value)}
        return {**made, LENGTH: len(value) if started else None}
    return value if started else None


def holds(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether there is something of these kinds in a value."""
    if isinstance(value, kinds):
        return True
    if isinstance(value, Mapping):
        return any(holds(item, kinds) for item in value.values())
    return type(value) in (list, tuple) and any(holds(item, kinds) for item in value)


class Reading:
    """Reads the state of one parameter, and notices whether it is there.

    Args:
        what: whose state it is, for error messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._there: list[str] = []
        self._absent: list[str] = []
        self._values: list[Any] = []

    def read(self, node: Node, value: Any) -> Any:
        """The state that `node` describes, as it was read; None if it was saved as not there.

        Raises:
            ValueError: if it is of another form, or there in part only.
        """
        read = self._walk(node, value, "")
        if self._there and self._absent:
            raise ValueError(
                f"{self._what} was loaded with {self._there[0]!r} but without {self._absent[0]!r}; "
                "the checkpoint was not made by an optimizer of this class and options"
            )
        if self._absent or (not self._there and all(each is None for each in self._values)):
            return None
        return read

    def _walk(self, node: Node, value: Any, path: str) -> Any:
        kind, *inner = node
        if kind == "tensor":
            return self._tensor(value, path)
        if kind == "dict":
            if not isinstance(value, Mapping) or not all(str(key) in value for key, _ in inner[0]):
                raise self._unfit(path, value)
            return {
                key: self._walk(item, value[str(key)], f"{path}.{key}") for key, item in inner[0]
            }
        if kind == "wrapper":
            name, items, context, shape, stride = inner
            parts = self._walk(["dict", items], value, path)
            if any(part is None for part in parts.values()):
                return None
            # There are no tensors in a context.
            return wrap(name, parts, decode(context, lambda leaf: torch.empty(0)), shape, stride)
        if kind in ("list", "tuple") and any(each[0] != "value" for each in _within(node)):
            here = len(inner[0])
            if not isinstance(value, Mapping) or not value.keys() >= set(map(str, range(here))):
                raise self._unfit(path, value)
            there = value.get(LENGTH)
            if there not in (None, here):
                raise ValueError(
                    f"{self._what} was saved with {there} entries in {path.removeprefix('.')!r}, "
                    f"and {here} were read, as many as there are here; take as many steps before "
                    "loading as it needs to have them, or use shardstep.checkpoint"
                )
            items = [
                self._walk(item, value[str(number)], f"{path}.{number}")
                for number, item in enumerate(inner[0])
            ]
            return items if kind == "list" else tuple(items)
        self._values.append(value)
        return value

    def _tensor(self, value: Any, path: str) -> Any:
        absent = value is None or (
            isinstance(value, StandIn) and not value.started and not value.asked
        )
        (self._absent if absent else self._there).append(path.removeprefix("."))
        if absent:
            return None
        if isinstance(value, StandIn):
            return value.hand_over()
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        if isinstance(value, (int, float)):
            return value  # step counters were numbers once
        raise self._unfit(path, value)

    def _unfit(self, path: str, value: Any) -> ValueError:
        place = path.removeprefix(".") or "the state"
        return ValueError(f"{self._what} was loaded with a {type(value).__name__} for {place!r}")


def _within(node: Node) -> list[Node]:
    """The nodes inside of a list or tuple, but for lists and tuples themselves."""
    if node[0] in ("list", "tuple"):
        return [found for item in node[1] for found in _within(item)]
    return [node]
