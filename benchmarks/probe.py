"""How long the probe takes: every class of torch and of `pytorch-optimizer`.

    pip install --no-deps pytorch_optimizer
    python benchmarks/probe.py --out benchmarks/results/probe.json

Times are CPU times of one thread, medians over rounds in one process (*warm*). The slowest classes
are also probed in fresh processes (*cold*), where the probe does work that a process does once.
torch has loaded its compiler before, as with the first optimizer of any process. The table also has
the number of optimizer steps, and the time of one step on a small matrix. Classes that exceed the
100 ms of docs/layouts.md are named.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from optimizer_table import OPTIONS, WITHOUT, classes
from shardstep.layouts.probe import MATRICES, Verdict, probe
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.layouts.trial import Gradients, Run
from shardstep.local.sandbox import sandbox

LIMIT_MS = 100
LARGEST = 10**8
"""Elements of the largest parameter: numbers among the options may be sizes up to this."""


@dataclass(frozen=True)
class Case:
    """A class and what it is made with."""

    name: str
    optimizer_class: Any
    options: dict[str, Any]
    group_options: dict[str, Any]


def cases(only: Sequence[str]) -> list[Case]:
    """What is measured."""
    found = [
        Case(f"torch.{name}", cls, {}, {})
        for name, cls in sorted(vars(torch.optim).items())
        if isinstance(cls, type) and cls is not torch.optim.Optimizer
    ]
    found += [
        Case(cls.__name__, cls, *OPTIONS.get(cls.__name__, ({}, {})))
        for _, cls in classes(others=False)
        if cls.__name__ not in WITHOUT
    ]
    return [case for case in found if not only or case.name in only]


def attempt(case: Case) -> Verdict:
    """What is timed."""
    options = copy.deepcopy(case.options)
    recipe = OptimizerRecipe(case.optimizer_class, options, case.group_options)
    return probe(recipe, numbers=recipe.numbers(LARGEST))


def warm(found: Sequence[Case], rounds: int) -> dict[str, dict[str, Any]]:
    """One row per class, the slowest last."""
    times: dict[str, list[float]] = {case.name: [] for case in found}
    rows: dict[str, dict[str, Any]] = {}
    for case in found:
        with _counted() as steps:
            verdict = attempt(case)
        kind = verdict.kind + (" and random" if verdict.random else "")
        rows[case.name] = {"kind": kind, "why": verdict.why, "steps": steps[0]}
    for _ in range(rounds):
        for case in found:
            times[case.name].append(_timed(partial(attempt, case))[0])
    for case in found:
        rows[case.name] |= {"warm_ms": _spread(times[case.name]), "step_ms": _step_ms(case)}
    return dict(sorted(rows.items(), key=lambda item: item[1]["warm_ms"]["median"]))


def cold(name: str, processes: int) -> dict[str, float]:
    """Milliseconds of the first time, in processes of their own."""
    command = [sys.executable, __file__, "--first", name]
    runs = [subprocess.run(command, check=True, capture_output=True) for _ in range(processes)]
    return _spread([float(run.stdout) for run in runs])


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return 1e3 * (time.process_time() - start), result


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Counts the steps of all optimizers that are tried meanwhile."""
    steps, advance = [0], Run.advance

    def counting(self: Run, step: int, gradients: Gradients) -> bool:
        steps[0] += 1
        return advance(self, step, gradients)

    Run.advance = counting  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        Run.advance = advance  # type: ignore[method-assign]


def _step_ms(case: Case) -> float | None:
    """The median of ten steps of the class itself on one small matrix; None if it takes none."""
    param = torch.nn.Parameter(torch.ones(MATRICES.shapes[0]))
    times = []
    with sandbox(case.optimizer_class, torch.device("cpu")):
        try:
            groups = [{"params": [param], **case.group_options}]
            opt = case.optimizer_class(groups, **copy.deepcopy(case.options))
            for step in range(11):
                source = torch.Generator().manual_seed(step)
                param.grad = torch.randn(param.shape, generator=source)
                times.append(_timed(opt.step)[0])
        except Exception:
            return None
    return round(median(times[1:]), 3)


def _spread(values: Sequence[float]) -> dict[str, float]:
    spread = {"median": median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 2) for name, value in spread.items()}


def main() -> int:
    """Measure, print the slowest last, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("classes", nargs="*", help="names as printed; all if none is given")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slowest", type=int, default=8, help="how many are tried cold too")
    parser.add_argument("--processes", type=int, default=3, help="fresh ones for each of them")
    parser.add_argument("--first", metavar="CLASS", help="print the time of the first attempt")
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    if options.first:
        (case,) = cases([options.first])
        print(_timed(lambda: attempt(case))[0])
        return 0
    rows = warm(cases(options.classes), options.rounds)
    for name in list(rows)[len(rows) - options.slowest :]:
        rows[name]["cold_ms"] = cold(name, options.processes)
    for name, row in rows.items():
        ms, first = row["warm_ms"], row.get("cold_ms")
        print(
            f"{name:22} {ms['median']:7.1f} ms ({ms['min']:.1f} to {ms['max']:.1f})"
            + f"{row['steps']:5} steps"
            + (f" (one alone {row['step_ms']:.3f} ms)" if row["step_ms"] else "")
            + (f", cold {first['median']:.1f} ms" if first else "")
            + f": {row['kind']}"
        )
    over = [
        name
        for name, row in rows.items()
        if max(row["warm_ms"]["median"], row.get("cold_ms", row["warm_ms"])["median"]) >= LIMIT_MS
    ]
    print(f"{len(rows)} classes; {LIMIT_MS} ms or more: {', '.join(over) or 'none'}")
    if options.out:
        result = {
            "question": "milliseconds that trying a class takes, once per class and options",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "pytorch_optimizer": version("pytorch_optimizer"),
            "threads": 1,
            "rounds": options.rounds,
            "processes": options.processes,
            "limit_ms": LIMIT_MS,
            "at_or_over_limit": over,
            "classes": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
