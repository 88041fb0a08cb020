"""Progress of long work: bars in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

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

from shardstep.checkpoint.files import Progress as OnBytes
from shardstep.checkpoint.files import Stages

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

        yield add_bar
