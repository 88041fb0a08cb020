"""The options of `shardstep demo`, its progress bars and its table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.multiprocessing.spawn import ProcessException

from demo.gpt import GPTConfig
from demo.picture import draw
from demo.record import EQUAL, DemoConfig, DemoRecord, RankRecord, Spread
from demo.run import MODULE, RUNS, UNSHARDED, WARMUP_STEPS, RoundDone, run_demo
from shardstep.cli.options import App, output_file, output_png
from shardstep.cli.reporting import Bars

app = App(add_completion=False, pretty_exceptions_show_locals=False)


class Device(StrEnum):
    """The devices to train on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@app.command(context_settings={"allow_extra_args": True})  # they are explained below
def demo(
    context: typer.Context,
    device: Annotated[
        Device, typer.Option(help="cuda: one rank per GPU, over NCCL. auto: cuda if there is any.")
    ] = Device.auto,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of processes to train on.",
            show_default="2; with cuda, all GPUs",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=WARMUP_STEPS + 1, help="Training steps of each run.")
    ] = 42,
    seed: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=2**32, help="Seed of the weights and the batches."),
    ] = 0,
    layers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Transformer blocks of the model.")
    ] = 4,
    width: Annotated[
        int, typer.Option(metavar="N", min=4, help="Width of the model, a multiple of 4.")
    ] = 256,
    batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Sequences per rank and step.")
    ] = 4,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of the table.")
    ] = False,
    out: Annotated[
        Any, typer.Option(parser=output_file, metavar="FILE", help="Write the JSON to a file, too.")
    ] = None,
    picture: Annotated[
        Any,
        typer.Option(
            parser=output_png,
            metavar="FILE",
            help="Draw loss curves and memory to a PNG file (needs matplotlib).",
        ),
    ] = None,
) -> None:
    """Train a small GPT with DDP, the drop-in and module=, and compare every loss.

    All runs use AdamW, the same initial weights and the same batches: source code of Python's
    standard library. The runs are interleaved, a few steps at a time. The table compares losses,
    memory, traffic and time.
    """
    model = GPTConfig(n_layer=layers, n_embd=width)
    if width % model.n_head:
        raise typer.BadParameter(
            f"{width} is not a multiple of {model.n_head}", param_hint="--width"
        )
    if context.args:
        hint = "--json prints to stdout; write a file with --out" if as_json else "try --help"
        raise typer.BadParameter(f"unexpected argument {context.args[0]!r}: {hint}")
    kind, ranks = _place(device, ranks)
    config = DemoConfig(
        model=model, ranks=ranks, steps=steps, seed=seed, batch_size=batch, device=kind
    )
    try:
        with demo_progress(Console(stderr=True), steps) as show:
            record = run_demo(config, on_round=show)
    except ProcessException as error:
        typer.echo(f"rank {error.error_index} failed: {error.msg.strip()}", err=True)
        raise typer.Exit(1) from None
    text = json.dumps(record.as_dict(), indent=2)
    if as_json:
        typer.echo(text)
    else:
        console, table = Console(), demo_table(record)
        if _least_width(table) > console.width:
            table.padding = 0
        # A terminal that is narrower still breaks lines. Cut numbers would be worse.
        console.width = max(console.width, _least_width(table))
        console.print(table, *verdict_lines(record), sep="\n")
    try:
        if out is not None:
            out.write_text(text + "\n")
        if picture is not None:
            draw(record, picture)
    except OSError as error:
        typer.echo(f"error: cannot write {error.filename or out} ({error.strerror})", err=True)
        raise typer.Exit(1) from None


def _place(device: Device, ranks: int | None) -> tuple[str, int]:
    """Return the device to train on, and the number of ranks."""
    num_gpus = torch.cuda.device_count()
    if device is Device.cpu or (device is Device.auto and not num_gpus):
        return "cpu", ranks or 2
    if (ranks or 1) > num_gpus:
        raise typer.BadParameter(
            f"each rank needs a GPU, and there are {num_gpus}; try --device cpu",
            param_hint="--ranks" if ranks else "--device",
        )
    return "cuda", ranks or num_gpus


@contextmanager
def demo_progress(console: Console, num_steps: int) -> Iterator[Callable[[RoundDone], None]]:
    """Yield a function to call after each round. Each run has a bar."""
    with Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        tasks = {run: bars.add_task(run, total=num_steps, loss="-") for run in RUNS}

        def show(done: RoundDone) -> None:
            bars.update(tasks[done.run], completed=done.step, loss=f"{done.loss:.3f}")

        yield show


def demo_table(record: DemoRecord) -> Table:
    """Lay out the runs, one per row, with their ratios to the unsharded run."""
    config = record.config
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{record.title}, {config.steps} steps, torch {record.torch_version}",
        caption="loss: last step, mean of the ranks; MB: fullest rank; gradients include "
        "messages in flight; ms: median of rounds, min–max",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("")
    for heading in ("loss", "grad\nMB", "state\nMB", "sent\nMB/step", "time\nms/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("time\n× DDP", justify="right", no_wrap=True)
    for run, ranks in record.runs.items():
        table.add_row(
            run,
            f"{record.losses(run)[-1]:.6f}",
            f"{max(rank.gradient_nbytes for rank in ranks) / 1e6:.1f}",
            f"{max(rank.state_nbytes for rank in ranks) / 1e6:.1f}",
            _sent(ranks),
            _spread(record.ms_per_step(run), ".0f"),
            _spread(record.time_ratio(run), ".2f") if run != UNSHARDED else "1",
        )
    return table


def _least_width(table: Table) -> int:
    return Console(width=1000).measure(table).minimum


def _sent(ranks: list[RankRecord]) -> str:
    sent = [rank.sent_nbytes_per_step for rank in ranks if rank.sent_nbytes_per_step is not None]
    return f"{fmean(sent) / 1e6:.1f}" if len(sent) == len(ranks) else "unknown"


def _spread(spread: Spread, form: str) -> str:
    middle, least, most = (format(value, form) for value in spread)
    return f"{middle}\n{least}–{most}"


ALONE = "One rank holds the whole state, so no memory is saved. Try `--device cpu --ranks 2`."
TIMES = (
    "Do not judge speed by this demo: the model is small, and its ranks share one machine. "
    "`shardstep bench` measures over a network."
)


def verdict_lines(record: DemoRecord) -> list[str]:
    """Return a line for each sharded run, with rich's markup: are its numbers DDP's?

    The last lines say what to expect of memory and times.
    """
    lines = [f"All {record.config.steps} losses and the final parameters, compared with DDP's:"]
    for run in record.runs:
        if run == UNSHARDED:
            continue
        verdict = record.verdict(run)
        # DDP adds more than two gradients in another order.
        other_order = run == MODULE and record.config.ranks > 2
        colour = "green" if verdict == EQUAL else "yellow" if other_order else "red"
        reason = ", since more than two gradients are added in another order"
        line = f"  {run}: [bold {colour}]{verdict}[/]"
        lines.append(line + reason if other_order and verdict != EQUAL else line)
    return [*lines, *([ALONE] if record.config.ranks == 1 else []), TIMES]
