"""Module hooks that do not follow their module into a copy or a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._compile import _disable_dynamo


class UncopiedHook:
    """A hook of one module. Copies of the module, also in files, get one that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    @_disable_dynamo  # compiling a hook's own code would wait for gathers in the middle of a wait
    def __call__(self, *args: Any) -> None:
        """Call the hook."""
        self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_empty_hook, ()


def _make_empty_hook() -> Callable[..., None]:
    return _empty_hook


def _empty_hook(*args: Any) -> None:
    pass
