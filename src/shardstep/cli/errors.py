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
    Task,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from shardstep.checkpoint.files import CheckpointError, Stages
from shardstep.checkpoint.files import Progress as OnBytes


class _Size(DownloadColumn):
    def render(self, task: Task) -> Text:
        """Return done and total bytes; nothing for a bar without an end."""
        return Text() if task.total is None else super().render(task)


class _Speed(TransferSpeedColumn):
    def render(self, task: Task) -> Text:
        """Return bytes per second; nothing for a bar without an end."""
        return Text() if task.total is None else super().render(task)


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
            message = printable(" ".join(str(error).split())) or type(error).__name__
            typer.echo(f"error: {message}", err=True)
            raise typer.Exit(1) from None
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            typer.echo(f"note: {printable(warning.message)}", err=True)


@contextmanager
def byte_progress(console: Console, doing: str) -> Iterator[Stages]:
    """Yield a function that adds a bar, given a word and a number of bytes."""
    with Progress(
        TextColumn("{task.description:>8}", markup=False),
        BarColumn(),
        _Size(),
        _Speed(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bars:
        waiting = bars.add_task(doing, total=None)

        def add_bar(stage: str, nbytes: int) -> OnBytes:
            bars.update(waiting, visible=False)
            task = bars.add_task(stage, total=nbytes)
            return lambda done: bars.advance(task, done)

        yield add_bar
