"""How evenly Muon and AdamW divide: each rank's own step, one rank at a time, against all of it.

    python benchmarks/muon.py --ranks 4 --out benchmarks/results/muon.json

The 17.4M-parameter GPT: Muon for the matrices of its blocks, AdamW for the rest. The step of each
rank's pieces is timed in one process and one thread, with nothing sent, in turn with the step of
the unsharded optimizers; once for both classes together, and once for Muon alone. What is counted
is the process's own time on the processor, which others on the machine disturb little.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from demo_model import GPT, GPT_17M
from shardstep import MixedPrecision
from shardstep.layouts.choose import Layouts
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.local.multi_class import MultiClass
from shardstep.params.groups import group_ranges
from shardstep.params.inputs import describe, parameters
from shardstep.params.sharded_params import ShardedParams
from shardstep.plan import ShardPlan

MUON = {"lr": 0.02}
ADAMW = {"lr": 3e-4}


def _groups(model: GPT) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    inner = {name for name, p in named if p.dim() == 2 and name.startswith("blocks.")}
    return [
        {
            "params": [p for n, p in named if n in inner],
            "optimizer_class": torch.optim.Muon,
            **MUON,
        },
        {"params": [p for n, p in named if n not in inner]},
    ]


def _of_rank(rank: int, ranks: int) -> MultiClass:
    """The local optimizer of one rank, with gradients for its pieces."""
    torch.manual_seed(0)
    groups = _groups(GPT(GPT_17M))
    recipe = OptimizerRecipe(torch.optim.AdamW, ADAMW)
    layouts = Layouts("auto", recipe, ranks, MixedPrecision())
    specs = layouts.apply(groups, describe(groups))
    plan = ShardPlan.make(specs, ranks)
    shard = ShardedParams(plan, groups, rank, True, True, {}, None).shard
    for group, numbers in zip(groups, group_ranges(groups), strict=True):
        group["params"] = [tensor for _, tensor in shard.in_group(numbers)]
    mixture = MultiClass(groups, torch.optim.AdamW, **ADAMW)
    for param in parameters(mixture.param_groups):
        param.grad = torch.randn_like(param)
    return mixture


def _milliseconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return 1e3 * (time.process_time() - start)


def measure(ranks: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each step, and what the slowest rank takes of the unsharded ones."""
    torch.set_num_threads(1)
    whole = _of_rank(0, 1)
    shards = [_of_rank(rank, ranks) for rank in range(ranks)]
    contestants: dict[str, Callable[[], object]] = {}
    for name, mixture in [("unsharded", whole), *((f"rank {r}", s) for r, s in enumerate(shards))]:
        contestants[f"{name}, both"] = mixture.step
        contestants[f"{name}, Muon"] = mixture.parts[0].step
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 2):
        for name, step in contestants.items():
            taken = _milliseconds(step)
            if number >= 2:
                times[name].append(taken)
    medians = {name: median(each) for name, each in times.items()}
    result: dict[str, Any] = {"ms": {name: round(each, 2) for name, each in medians.items()}}
    for what in ("both", "Muon"):
        slowest = max(medians[f"rank {rank}, {what}"] for rank in range(ranks))
        result[f"slowest rank / unsharded, {what}"] = round(
            slowest / medians[f"unsharded, {what}"], 4
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "ranks": options.ranks,
        "rounds": options.rounds,
        **measure(options.ranks, options.rounds),
    }
    text = json.dumps(record, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
