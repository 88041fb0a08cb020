"""The commands `shardstep demo` and `shardstep bench`, which run files outside of the package.

They are in `examples/` and `benchmarks/` of a checkout. A wheel has copies of them in the package.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

import shardstep


def demo(context: typer.Context) -> None:
    """Train a small GPT with DDP, the drop-in and module=, and compare every loss."""
    sys.path.insert(0, str(_find("examples/demo").parent))
    from demo.command import app

    app(context.args, prog_name="shardstep demo")


def bench(context: typer.Context) -> None:
    """Measure speed against DDP, torch's ZeroRedundancyOptimizer and FSDP2."""
    launcher = _find("benchmarks/hosts.py")
    # This process becomes the launcher, so that Ctrl-C reaches it alone.
    environment = os.environ | {"SHARDSTEP_PROG": "shardstep bench"}
    os.execve(sys.executable, [sys.executable, str(launcher), *context.args], environment)


def _find(name: str) -> Path:
    package = Path(shardstep.__file__).parent
    places = [package / name, package.parents[1] / name]  # of a wheel, a checkout
    for place in places:
        if place.exists():
            return place
    typer.echo(f"error: expected {places[0]}; reinstall shardstep", err=True)
    raise typer.Exit(1)
