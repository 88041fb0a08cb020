"""How long trying an optimizer class takes: every class of torch and of `pytorch-optimizer`.

    pip install --no-deps pytorch_optimizer
    python benchmarks/probe.py --out benchmarks/results/probe.json

Each class is tried in a fresh process that has made an optimizer before, which loads torch's
compiler (*cold*: the first time, with all that happens once), and then again and again in the same
process (*warm*). One thread. Beside it stands what a single step of the class on one small matrix
takes, and how many steps of its optimizers were tried: nothing that runs the class can be faster
than a few of its steps. The limit is the one that docs/layouts.md promises; classes beyond it are
named.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing as mp
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from optimizer_table import OPTIONS, WITHOUT, classes
from shardstep.layout.probe import probe
from shardstep.layout.trial import MATRICES, Run
from shardstep.layout.unseen import unseen

LIMIT_MS = 100


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
        for cls in classes()
        if cls.__name__ not in WITHOUT
    ]
    return [case for case in found if not only or case.name in only]


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Try a class once cold and `rounds` times warm; called in a process of its own."""

    def once() -> Any:
        return probe(case.optimizer_class, copy.deepcopy(case.options), case.group_options)

    cold, verdict = _timed(once)
    warm = [_timed(once)[0] for _ in range(rounds)]
    with _counted() as steps:
        once()
    return {
        "kind": verdict.kind,
        "random": verdict.random,
        "why": verdict.why,
        "cold_ms": cold,
        "warm_ms": warm,
        "steps": steps[0],
        "step_ms": _step_ms(case),
    }


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return 1e3 * (time.perf_counter() - start), result


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Counts the steps of all optimizers that are tried meanwhile."""
    steps, advance = [0], Run.advance

    def counting(self: Run) -> bool:
        steps[0] += 1
        return advance(self)

    Run.advance = counting  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        Run.advance = advance  # type: ignore[method-assign]


def _step_ms(case: Case) -> float | None:
    """The median of ten steps of the class itself on one small matrix; None if it takes none."""
    param = torch.nn.Parameter(torch.ones(MATRICES[0]))
    times = []
    with unseen(case.optimizer_class, torch.device("cpu")):
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


def _child(case: Case, rounds: int, pipe: Any) -> None:
    pipe.send(measure(case, rounds))


def _in_fresh_process(case: Case, rounds: int) -> dict[str, Any]:
    # Forked: what is imported is there, and nothing has been tried yet.
    fork = mp.get_context("fork")
    mine, its = fork.Pipe(duplex=False)
    process = fork.Process(target=_child, args=(case, rounds, its))
    process.start()
    its.close()
    result: dict[str, Any] = mine.recv()
    process.join()
    return result


def _row(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    warm = [ms for run in runs for ms in run["warm_ms"]]
    return {
        **{key: runs[0][key] for key in ("kind", "random", "why", "steps")},
        "warm_ms": _spread(warm),
        "cold_ms": _spread([run["cold_ms"] for run in runs]),
        "step_ms": runs[0]["step_ms"],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    spread = {"median": median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 2) for name, value in spread.items()}


def main() -> int:
    """Measure, print the slowest last, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("classes", nargs="*", help="names as printed; all if none is given")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes for each class")
    parser.add_argument("--rounds", type=int, default=3, help="warm rounds in each of them")
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    rows = {
        case.name: _row([_in_fresh_process(case, options.rounds) for _ in range(options.processes)])
        for case in cases(options.classes)
    }
    rows = dict(sorted(rows.items(), key=lambda item: item[1]["warm_ms"]["median"]))
    for name, row in rows.items():
        warm, cold = row["warm_ms"], row["cold_ms"]
        print(
            f"{name:24} {warm['median']:8.1f} ms ({warm['min']:.1f}-{warm['max']:.1f}) warm "
            f"{cold['median']:8.1f} cold {row['steps']:5} steps of "
            f"{row['step_ms'] or float('nan'):7.3f} ms  "
            f"{row['kind']}{' and random' if row['random'] else ''}"
        )
    over = [name for name, row in rows.items() if row["warm_ms"]["median"] >= LIMIT_MS]
    over_cold = [name for name, row in rows.items() if row["cold_ms"]["median"] >= LIMIT_MS]
    print(f"{len(rows)} classes; at or over {LIMIT_MS} ms: warm {over}, cold {over_cold}")
    if options.out:
        from importlib.metadata import version

        result = {
            "question": "milliseconds that trying a class takes, once per class and options",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "pytorch_optimizer": version("pytorch_optimizer"),
            "threads": 1,
            "processes": options.processes,
            "rounds": options.rounds,
            "limit_ms": LIMIT_MS,
            "over_limit": {"warm": over, "cold": over_cold},
            "classes": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
