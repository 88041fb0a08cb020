"""Hooks that keep nothing alive, and do not follow their module into a copy or a file."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Protocol

from torch._compile import _disable_dynamo


class UncopiedHook:
    """A hook of one module or tensor. Copies of the module, also in files, get an empty one.

    A bound method is held weakly: once its object is freed, the hook does nothing. Modules and the
    graph of autograd outlive an optimizer, and must not keep it alive.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = weakref.WeakMethod(call) if isinstance(call, MethodType) else lambda: call

    @_disable_dynamo  # compiling a hook's own code would wait for gathers in the middle of a wait
    def __call__(self, *args: Any) -> None:
        """Call the hook."""
        call = self._call()
        if call is not None:
            call(*args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_empty_hook, ()


def _make_empty_hook() -> Callable[..., None]:
    return _empty_hook


def _empty_hook(*args: Any) -> None:
    pass


def when_freed(owner: object, act: Callable[..., None], *args: Any) -> Callable[[], object]:
    """Call `act` when `owner` is freed, or earlier by calling the function returned; only once.

    `args` must not refer to `owner`. At the end of the program nothing is called.
    """
    finalizer = weakref.finalize(owner, act, *args)
    finalizer.atexit = False
    return finalizer


class Removable(Protocol):
    """A handle of something that was put on a module or tensor."""

    def remove(self) -> None:
        """Take it away."""


def remove_hooks(handles: Sequence[Removable]) -> None:
    """Remove hooks from their modules and tensors."""
    for handle in handles:
        handle.remove()
