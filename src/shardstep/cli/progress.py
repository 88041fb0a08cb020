"""Progress bars on a terminal; a log gets at most one line for each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from shardstep.checkpoint.files import Progress as OnBytes
from shardstep.checkpoint.files import Stages
from shardstep.demo.run import RUNS, StepDone


@contextmanager
def byte_progress(console: Console) -> Iterator[Stages]:
    """Yield a function that adds a bar, given a word and a number of bytes."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(
        TextColumn("{task.description:>8}"),
        *columns,
        console=console,
        disable=not console.is_terminal,
    ) as bars:

        def add_bar(stage: str, nbytes: int) -> OnBytes:
            task = bars.add_task(stage, total=nbytes)
            return lambda done: bars.advance(task, done)

        yield add_bar


@contextmanager
def demo_progress(console: Console, num_steps: int) -> Iterator[Callable[[StepDone], None]]:
    """Yield a function to call after each step; each run has a bar, or one line in a log."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bars:
        tasks = {
            run: bars.add_task(run, total=num_steps, start=False, loss="  -  ") for run in RUNS
        }

        def show(done: StepDone) -> None:
            if done.step == 1:
                bars.start_task(tasks[done.run])
            bars.update(tasks[done.run], completed=done.step, loss=f"{done.loss:.3f}")
            if done.step == num_steps and not console.is_terminal:
                console.print(f"{done.run}: {done.step} steps, loss {done.loss:.3f} on rank 0")

        yield show
