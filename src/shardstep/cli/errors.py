"""Errors, warnings and progress of a command, on stderr."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from shardstep.checkpoint.files import CheckpointError, Stages
from shardstep.checkpoint.files import Progress as OnBytes

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
    bar without an end shows `doing`. Nothing moves where stderr is not a terminal.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            with byte_progress(Console(stderr=True), doing) as stages:
                yield stages
        except ERRORS as error:
            said = printable(" ".join(str(error).split())) or type(error).__name__
            typer.echo(f"error: {said}", err=True)
            raise typer.Exit(1) from None
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            typer.echo(f"note: {printable(warning.message)}", err=True)


@contextmanager
def byte_progress(console: Console, doing: str) -> Iterator[Stages]:
    """Yield a function that adds a bar, given a word and a number of bytes."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(
        TextColumn("{task.description:>8}"),
        *columns,
        console=console,
        disable=not console.is_terminal,
    ) as bars:
        waiting = bars.add_task(doing, total=None)

        def add_bar(stage: str, nbytes: int) -> OnBytes:
            bars.update(waiting, visible=False)
            task = bars.add_task(stage, total=nbytes)
            return lambda done: bars.advance(task, done)

        yield add_bar
