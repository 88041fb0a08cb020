"""The rows of the table in docs/frameworks.md, from runs at two ranks and at one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ranks import run_ranks

from frameworks.cells import COLUMNS, KINDS, rows, rows_elsewhere

FRAMEWORKS = {
    "accelerate": "accelerate",
    "trainer": "transformers",
    "lightning": "lightning",
    "fabric": "lightning",
}
"""The package of each framework."""


_OVER_GLOO = partial(run_ranks, timeout=280)


def _run(make: Callable[..., Any], name: str, folder: Path) -> Any:
    return make(importlib.import_module(f"frameworks.with_{name}").run, KINDS, folder)


def rows_of(
    name: str, folder: Path, run: Callable[..., Any] = _OVER_GLOO
) -> dict[str, dict[str, str]]:
    """Return the rows of one framework, by kind. `run` is called as `run_ranks` is."""
    found, other_rank = run(_run, 2, rows, name, folder)
    assert found == other_rank, f"rank 0 found {found}, rank 1 {other_rank}"
    (elsewhere,) = run(_run, 1, rows_elsewhere, name, folder)
    return {kind: {**found[kind], "resume at another N": elsewhere[kind]} for kind in KINDS}


def header() -> list[str]:
    """Return the table's first two lines."""
    names = ["framework", "mode", *COLUMNS]
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]


def lines(name: str, found: dict[str, dict[str, str]]) -> list[str]:
    """Return the table's lines for one framework."""
    return [
        f"| {name} | {kind} | {' | '.join(found[kind][each] for each in COLUMNS)} |"
        for kind in KINDS
    ]
