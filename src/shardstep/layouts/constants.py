"""Replaces torch's random numbers by constants: what is left is how a class uses them."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def constants_everywhere() -> AbstractContextManager[Any]:
    """While this lasts, every operation that draws random numbers gives constants."""
    everywhere: Any = _Everywhere
    return everywhere()  # type: ignore[no-any-return]


def quick_constants() -> AbstractContextManager[Any]:
    """The same in a fraction of the time, for all that goes through torch's functions.

    It looks into a function until that has drawn nothing once. Random numbers may slip through, in
    compiled or scripted code say; optimizers that share the work come to something else then, never
    to the same where constants would have shown a difference.
    """
    return _Quick()


class _Everywhere(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while a class is tried, and to make sure of that for each operation
        # takes as long as the operation.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if _draws(func):
            self.drawn = True
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(0.25 if tensor.is_floating_point() else 0)
        return out


@functools.cache
def _draws(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


class _Quick(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._plain: set[Any] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self._plain:
            return func(*args, **(kwargs or {}))
        everywhere: Any = _Everywhere
        with everywhere() as mode:
            out = func(*args, **(kwargs or {}))
        if not mode.drawn:
            self._plain.add(func)
        return out
