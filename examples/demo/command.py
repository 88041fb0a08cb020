"""The options of `shardstep demo`, its progress bars and its table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.multiprocessing.spawn import ProcessException

from demo.gpt import GPTConfig
from demo.record import EQUAL, DemoConfig, DemoRecord, RankRecord
from demo.run import MODULE, RUNS, UNSHARDED, WARMUP_STEPS, StepDone, run_demo

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=1, help="Local processes to train on.")] = 2,
    steps: Annotated[int, typer.Option(min=WARMUP_STEPS + 1, help="Steps of each run.")] = 60,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32, help="Chooses the weights and the batches.")
    ] = 0,
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks of the model.")] = 4,
    width: Annotated[int, typer.Option(min=4, help="Width of the model, a multiple of 4.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank and step.")] = 8,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", dir_okay=False, help="Also write the record here."),
    ] = None,
) -> None:
    """Train a small GPT with DDP, sharded under DDP and sharded without DDP, and compare.

    All runs start from the same weights and see the same batches: bytes of Python's own
    standard library. The comparison covers every loss, the final parameters, optimizer state,
    traffic and time.
    """
    model = GPTConfig(n_layer=layers, n_embd=width)
    if width % model.n_head:
        raise typer.BadParameter(
            f"{width} is not a multiple of {model.n_head}", param_hint="--width"
        )
    if json_path is not None and not json_path.parent.is_dir():
        # Before the demo runs, so that no record is lost.
        raise typer.BadParameter(f"there is no folder {json_path.parent}", param_hint="--json")
    config = DemoConfig(model=model, ranks=ranks, steps=steps, seed=seed, batch_size=batch)
    console = Console()
    try:
        with demo_progress(console, steps) as show:
            record = run_demo(config, on_step=show)
    except ProcessException as error:
        typer.echo(f"rank {error.error_index} failed: {error.msg.strip()}", err=True)
        raise typer.Exit(1) from None
    console.print(demo_table(record))
    for line in verdict_lines(record):
        console.print(line)
    if json_path is not None:
        json_path.write_text(json.dumps(record.as_dict(), indent=2) + "\n")


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


def demo_table(record: DemoRecord) -> Table:
    """Lay out the runs side by side, with their ratios to the unsharded run."""
    config = record.config
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"GPT with {record.num_parameters:,} parameters, {config.ranks} ranks, "
        f"{config.steps} steps, torch {record.torch_version}",
        title_justify="left",
    )
    table.add_column("")
    for run in record.runs:
        table.add_column(_heading(run).replace(", ", ",\n"), justify="right")
        if run != UNSHARDED:
            table.add_column("\nratio", justify="right")

    def row(
        name: str, measure: Callable[[list[RankRecord]], float | None], form: str, unit: str
    ) -> None:
        unsharded = measure(record.runs[UNSHARDED])
        cells = []
        for run, ranks in record.runs.items():
            value = measure(ranks)
            cells.append("unknown" if value is None else f"{value:{form}} {unit}".rstrip())
            if run != UNSHARDED:
                cells.append(f"{value / unsharded:.2f}" if value is not None and unsharded else "")
        table.add_row(name, *cells)

    def sent_megabytes(ranks: list[RankRecord]) -> float | None:
        sent = [rank.sent_nbytes_per_step for rank in ranks if rank.sent_nbytes_per_step]
        return fmean(sent) / 1e6 if len(sent) == len(ranks) else None

    row("final loss, mean", lambda ranks: fmean(r.losses[-1] for r in ranks), ".6f", "")
    for rank in range(config.ranks):
        row(f"state, rank {rank}", lambda rs, r=rank: rs[r].state_nbytes / 1e6, ".3f", "MB")  # type: ignore[misc]
    row("sent per step", sent_megabytes, ".3f", "MB")
    row("time per step", lambda ranks: max(rank.ms_per_step for rank in ranks), ".1f", "ms")
    return table


def verdict_lines(record: DemoRecord) -> list[str]:
    """Return a line for each sharded run, with rich's markup: are its numbers DDP's?"""
    lines = [f"Losses of all {record.config.steps} steps and final parameters, against DDP's:"]
    for run in record.runs:
        if run == UNSHARDED:
            continue
        verdict = record.verdict(run)
        # DDP adds more than two gradients in another order.
        other_order = run == MODULE and record.config.ranks > 2
        colour = "green" if verdict == EQUAL else "yellow" if other_order else "red"
        reason = ", since more than two gradients are added in another order"
        line = f"  {_heading(run)}: [bold {colour}]{verdict}[/]"
        lines.append(line + reason if other_order and verdict != EQUAL else line)
    return lines


def _heading(run: str) -> str:
    if run == UNSHARDED:
        return "AdamW\nunder DDP"
    return "sharded, module=" if run == MODULE else "sharded, under DDP"
