"""Progress of reading and writing: a bar for each stage in a terminal, nothing elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from shardstep.checkpoint.files import Progress as Told


class ByteProgress(AbstractContextManager["ByteProgress"]):
    """Shows the stages it is told of, for as long as it is entered.

    Args:
        console: Where to show them.
    """

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=console,
            # A log file keeps every redraw of a bar.
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        """Start drawing."""
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop drawing and leave the last state on the screen."""
        self._bars.stop()

    def stage(self, what: str, nbytes: int) -> Told:
        """Add a bar.

        Args:
            what: What is done, in a word.
            nbytes: With how many bytes.

        Returns:
            A function to be told how many more bytes are done.
        """
        task = self._bars.add_task(what, total=nbytes)

        def advance(done: int) -> None:
            self._bars.advance(task, done)

        return advance
