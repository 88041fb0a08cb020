"""Uneven inputs: which ranks still have data, and their next action."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable

from shardstep.comm.api import Comm, all_gather_json

PARTS = ("action", "uncleared gradients", "arguments")
"""The parts of an announcement."""

AFTER_AN_ERROR = "after an error within Join, enter Join([...], enable=False) on every rank first"
"""Torch does not tell objects that an exception has ended the context."""


class JoinContext:
    """The `Join` context that an optimizer takes part in, if any.

    Attributes:
        config: the configuration that `Join` gives each object in it.
        enabled: whether a `Join` context is active.
        shadowing: whether this rank has run out of data and shadows a step of the others.
        source: the first rank that had data at the last announcement.
    """

    config: Any

    def __init__(self, joinable: Joinable) -> None:
        self._joinable = joinable
        self.enabled = False
        self.shadowing = False
        self.source = 0

    def enter(self, config: Any) -> None:
        """Take another configuration."""
        self.config, self.enabled = config, config.enable

    def leave(self) -> None:
        """Take part no longer. Torch does not reset the configuration."""
        self.enabled = False

    def notify(self) -> None:
        """Tell joined ranks that this one still has data. Called on every rank that has."""
        Join.notify_join_context(self._joinable)

    @contextmanager
    def shadow(self) -> Iterator[None]:
        """Mark the steps taken in this context as shadowed."""
        self.shadowing = True
        try:
            yield
        finally:
            self.shadowing = False

    def announce(self, comm: Comm, own: list[Any] | None) -> list[Any]:
        """Return the next action of the ranks that have data. Called on every rank.

        Those ranks pass it as `own`, joined ranks pass None.

        Raises:
            RuntimeError: on every rank, if ranks announce different actions.
        """
        if own is not None:
            if not self.config.is_first_joinable:
                raise RuntimeError(
                    "an optimizer with module= must be the first in Join([...]): joined ranks "
                    "shadow its actions"
                )
            self.notify()
        announced = all_gather_json(comm, own)
        active = [rank for rank, action in enumerate(announced) if action is not None]
        self.source = active[0]
        action: list[Any] = announced[self.source]
        for rank in active:
            for what, expected, got in zip(PARTS, action, announced[rank], strict=True):
                if got != expected:
                    raise RuntimeError(
                        f"ranks within Join must make the same calls, but rank {self.source} has "
                        f"{what} {expected} where rank {rank} has {got}"
                    )
        return action
