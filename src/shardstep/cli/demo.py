"""The command `shardstep demo`, which runs the example in `examples/demo`."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

import shardstep


def demo(context: typer.Context) -> None:
    """Train a small GPT with DDP, sharded under DDP and sharded without DDP, and compare."""
    sys.path.insert(0, str(_examples_folder()))
    from demo.command import app

    app(context.args, prog_name="shardstep demo")


def _examples_folder() -> Path:
    package = Path(shardstep.__file__).parent
    folders = [package / "examples", package.parents[1] / "examples"]  # of a wheel, a checkout
    for folder in folders:
        if (folder / "demo").is_dir():
            return folder
    typer.echo(f"error: expected the demo in {folders[0] / 'demo'}; reinstall shardstep", err=True)
    raise typer.Exit(1)
