"""Progress, warnings and errors of a command, on stderr.

Long work has bars in a terminal, and a line every few seconds elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
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

ERRORS = (CheckpointError, OSError, ValueError, TypeError, RuntimeError, MemoryError)

SECONDS_BETWEEN_LINES = 5.0


class Bars(Progress):
    """A bar for each task. Without a terminal, a line for each task that is not finished."""

    def start(self) -> None:
        """Show the tasks from now on."""
        self.stopped = Event()
        self.printer: Thread | None = None
        if self.console.is_terminal:
            super().start()
        else:
            # Work that reports nothing for a while has lines, too.
            self.printer = Thread(target=self._print_lines, daemon=True)
            self.printer.start()

    def stop(self) -> None:
        """Show nothing from now on."""
        self.stopped.set()
        if self.printer is None:
            super().stop()
        else:
            self.printer.join()

    def _print_lines(self) -> None:
        while not self.stopped.wait(SECONDS_BETWEEN_LINES):
            for task in self.tasks:
                if task.visible and not task.finished:
                    self.console.print(self._line(task), soft_wrap=True, highlight=False)

    def _line(self, task: Task) -> Text:
        cells = [column(task) for column in self.columns if not isinstance(column, str)]
        return Text(
            " ".join(cell.plain.strip() for cell in cells if isinstance(cell, Text) and cell)
        )


class _Size(DownloadColumn):
    def render(self, task: Task) -> Text:
        """Return done and total bytes; nothing for a bar without an end."""
        return Text() if task.total is None else super().render(task)


class _Speed(TransferSpeedColumn):
    def render(self, task: Task) -> Text:
        """Return bytes per second, once they are known."""
        return Text() if task.speed is None else super().render(task)


@contextmanager
def byte_progress(console: Console, doing: str) -> Iterator[Stages]:
    """Yield a function that adds a bar, given a word and a number of bytes."""
    with Bars(
        TextColumn("{task.description:>8}", markup=False),
        BarColumn(),
        _Size(),
        _Speed(),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        waiting = bars.add_task(doing, total=None)

        def add_bar(stage: str, nbytes: int) -> OnBytes:
            bars.update(waiting, visible=False)
            task = bars.add_task(stage, total=nbytes)
            return lambda done: bars.advance(task, done)

        try:
            yield add_bar
        finally:
            bars.live.transient = bars.tasks[waiting].visible  # it says nothing afterwards


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
