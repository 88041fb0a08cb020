"""The demo's progress: bars in a terminal, one line per run elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardstep.demo.run import RUNS, StepDone


class DemoProgress(AbstractContextManager["DemoProgress"]):
    """Shows the steps it is told of, for as long as it is entered.

    Args:
        console: Where to show them.
        num_steps: Steps of each run.
    """

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        # A log file keeps every redraw of a bar, so there each run gets one line instead.
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks = {
            run: self._bars.add_task(run, total=num_steps, start=False, loss="  -  ")
            for run in RUNS
        }

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

    def show(self, done: StepDone) -> None:
        """Advance the run that finished a step.

        Args:
            done: The step.
        """
        task = self._tasks[done.run]
        if done.step == 1:
            self._bars.start_task(task)
        self._bars.update(task, completed=done.step, loss=f"{done.loss:.3f}")
        if done.step == self._num_steps and not self._console.is_terminal:
            self._console.print(f"{done.run}: {done.step} steps, loss {done.loss:.3f} on rank 0")
