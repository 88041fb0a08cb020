"""Commands whose help shows flags without a type: `--json`, not `--json <bool>`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

F = TypeVar("F", bound=Callable[..., Any])


class _PlainFlags:
    def get_params(self, context: Any) -> list[Any]:
        """Return the parameters as typer finds them, flags without a type."""
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command."""


class Group(_PlainFlags, TyperGroup):
    """A group of commands."""


class App(typer.Typer):
    """A typer application of such commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=Group, no_args_is_help=True, rich_markup_mode="markdown", **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        """Register a command."""
        return super().command(name, cls=Command, **options)
