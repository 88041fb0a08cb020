"""Module hooks that stay behind when their module is copied or saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class UncopiedHook:
    """A hook for the module it was registered on, and for no copy of that module.

    `copy.deepcopy(module)` and `torch.save(module)` take a module's hooks along, and with them
    whatever these hold. In their place, a copy gets a hook that does nothing.

    Args:
        call: the hook.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call the hook."""
        self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _left_behind, ()


def _left_behind() -> Callable[..., None]:
    return _nothing


def _nothing(*args: Any) -> None:
    """What a copy of the module does instead."""
