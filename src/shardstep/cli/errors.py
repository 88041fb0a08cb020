"""Errors and warnings of a command, on stderr."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from shardstep.checkpoint.files import CheckpointError, Stages
from shardstep.cli.progress import byte_progress

ERRORS = (CheckpointError, OSError, ValueError, TypeError, RuntimeError, MemoryError)


def printable(value: Any) -> str:
    """Return a value as text without characters that control a terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in str(value)
    )


@contextmanager
def reporting(doing: str = "working") -> Iterator[Stages]:
    """Show progress and warnings; on an error, print one line and exit with 1.

    Yield a function that adds a bar, given a word and a number of bytes. Until it is called, a
    bar without an end shows `doing`.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            with byte_progress(Console(stderr=True), doing) as stages:
                yield stages
        except BrokenPipeError:
            raise  # `| head` is no error; click ends the command
        except ERRORS as error:
            text = str(error)
            if isinstance(error, OSError) and error.filename and error.strerror:
                text = f"{error.filename}: {error.strerror}"
            message = printable(" ".join(text.split())) or type(error).__name__
            typer.echo(f"error: {message}", err=True)
            raise typer.Exit(1) from None
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            typer.echo(f"note: {printable(warning.message)}", err=True)
