"""The entry point of the command `shardstep`. It names the packages that are missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without the extra's packages, say how to get them and exit 2."""
    try:
        from shardstep.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"rich", "typer"}:
            raise
        print(
            f'the shardstep command needs the package {package!r}: pip install "shardstep[cli]"',
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    app(prog_name="shardstep")
