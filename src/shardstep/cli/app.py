"""The typer application: one module of this package per command, registered here."""

from __future__ import annotations

from typing import Annotated

import typer

from shardstep import __version__
from shardstep.cli.bundled import bench, demo
from shardstep.cli.checkpoint import app as checkpoint_app
from shardstep.cli.options import App
from shardstep.cli.plan import plan

app = App(name="shardstep", add_completion=False, pretty_exceptions_show_locals=False)

# These read their options themselves.
unread = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(context_settings=unread)(demo)
app.command()(plan)
app.command(context_settings=unread)(bench)
app.add_typer(checkpoint_app, name="checkpoint")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shardstep {__version__}")
        raise typer.Exit()


@app.callback()
def shardstep(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """ZeRO-1 and ZeRO-2 for PyTorch: DDP's numbers with 1/N of its optimizer state."""
