"""Options of commands: flags in the help, and values that are checked before a command begins."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
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
    """A command whose help shows flags without a type: `--json`, not `--json <bool>`."""


class Group(_PlainFlags, TyperGroup):
    """A group of commands."""


class App(typer.Typer):
    """A typer application of such commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=Group, no_args_is_help=True, rich_markup_mode="markdown", **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        """Register a command."""
        return super().command(name, cls=Command, **options)


_BYTES = re.compile(r"([\d.]+)\s*(?:([KMGT])(I?)B?|B)")
_BITS = re.compile(r"([\d.]+)\s*([KMGT])?BITS?(?:/S)?")


def parse_nbytes(text: str) -> int:
    """Return the number of bytes that a text such as `5GB`, `500MB` or `2 GiB` means."""
    return _parse(_BYTES, text, "a number of bytes with its unit, such as 80GB")


def parse_rate(text: str) -> int:
    """Return the bits per second that a text such as `100gbit` or `250 Mbit/s` means."""
    return _parse(_BITS, text, "a rate, such as 100gbit")


def _parse(pattern: re.Pattern[str], text: str, meant: str) -> int:
    match = pattern.fullmatch(str(text).strip().upper())
    try:
        number, letter, *binary = match.groups() if match else ("", None)
        value = int(float(number) * (1024 if any(binary) else 1000) ** " KMGT".index(letter or " "))
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise typer.BadParameter(f"expected {meant}, not {text!r}")
    return value


def output_file(text: str) -> Path:
    """Return the path of a file that can be written."""
    is_new = not os.path.lexists(text)
    try:
        open(text, "ab").close()
        if is_new:
            os.unlink(text)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {text} ({error.strerror})") from None
    return Path(text)


def output_png(text: str) -> Path:
    """Return the path of a picture that can be drawn."""
    if not text.lower().endswith(".png"):
        raise typer.BadParameter(f"expected a name that ends with .png, not {text!r}")
    if find_spec("matplotlib") is None:
        raise typer.BadParameter('matplotlib is missing: pip install "shardstep[bench]"')
    return output_file(text)
