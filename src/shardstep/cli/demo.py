"""The command `shardstep demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardstep.cli.progress import DemoProgress
from shardstep.cli.table import demo_table, verdict_lines
from shardstep.demo.gpt import GPTConfig
from shardstep.demo.record import WARMUP_STEPS, DemoConfig
from shardstep.demo.run import RankFailed, run_demo


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
    try:
        model = GPTConfig(n_layer=layers, n_embd=width)
    except ValueError:
        raise typer.BadParameter(f"{width} is not a multiple of 4", param_hint="--width") from None
    if json_path is not None and not json_path.parent.is_dir():
        # Now, and not when there is a record to lose.
        raise typer.BadParameter(f"there is no folder {json_path.parent}", param_hint="--json")
    config = DemoConfig(model=model, ranks=ranks, steps=steps, seed=seed, batch_size=batch)
    console = Console()
    try:
        with DemoProgress(console, steps) as progress:
            record = run_demo(config, on_step=progress.show)
    except RankFailed as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    console.print(demo_table(record))
    for line in verdict_lines(record):
        console.print(line)
    if json_path is not None:
        json_path.write_text(json.dumps(record.as_dict(), indent=2) + "\n")
