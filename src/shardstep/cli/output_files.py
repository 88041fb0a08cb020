"""Files that a command writes at its end, checked when it begins."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import typer


def output_file(text: str) -> Path:
    """Return the path of a file that can be written."""
    is_new = not os.path.lexists(text)
    try:
        open(text, "ab").close()
        if is_new:
            os.unlink(text)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {text} ({error.strerror})") from None
    return Path(text)


def output_png(text: str) -> Path:
    """Return the path of a picture that can be drawn."""
    if not text.lower().endswith(".png"):
        raise typer.BadParameter(f"expected a name that ends with .png, not {text!r}")
    if find_spec("matplotlib") is None:
        raise typer.BadParameter('matplotlib is missing: pip install "shardstep[bench]"')
    return output_file(text)
