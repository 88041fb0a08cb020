"""What 16-bit parameters cost in loss: fp32, and bf16 with masters, without, and at random.

    python benchmarks/precision.py --jobs 1 --out benchmarks/results/precision.json

The demo's GPT is trained on the same batches from the same weights, sharded with `module=` over two
ranks, five ways: in fp32; in fp32 from weights that were rounded to bf16 once, which shows how far
two runs drift apart that differ in nothing but that; in bf16 with fp32 masters; with stochastic
rounding instead; and without either. The loss is computed in fp32 from the logits in all of them.

Losses are the mean of both ranks'. What is compared is the loss on batches that were never trained
on, at the end, seed by seed: `above_fp32` is the difference to the fp32 run of the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F

from demo_model import GPT, DemoConfig, GPTConfig, make_batch, stdlib_source
from shardstep import MixedPrecision, ZeroRedundancyOptimizer

WORLD_SIZE = 2
HELD_OUT = 20
"""Batches per rank that are only looked at: those of steps that no run comes to."""


@dataclass(frozen=True)
class Way:
    """How a run treats its parameters."""

    dtype: torch.dtype
    precision: MixedPrecision | None
    rounded_start: bool = False


WAYS = {
    "fp32": Way(torch.float32, None),
    "fp32, start rounded": Way(torch.float32, None, rounded_start=True),
    "bf16, masters": Way(torch.bfloat16, MixedPrecision()),
    "bf16, stochastic": Way(
        torch.bfloat16, MixedPrecision(master_dtype=None, stochastic_rounding=True)
    ),
    "bf16": Way(torch.bfloat16, MixedPrecision(master_dtype=None)),
}


def _loss(model: GPT, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    logits, _ = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _train(way: Way, seed: int, steps: int, lr: float) -> dict[str, Any]:
    """Train one model. Called on every rank."""
    config = DemoConfig(model=GPTConfig(), batch_size=8)
    torch.manual_seed(seed)
    model = GPT(config.model)
    if way.rounded_start:
        model.bfloat16().float()
    model.to(way.dtype)
    text, rank = stdlib_source(), dist.get_rank()

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return make_batch(
            text, config.batch_size, config.model.block_size, seed=seed, step=step, rank=rank
        )

    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, module=model, precision=way.precision, lr=lr
    )
    losses = []
    for step in range(steps):
        loss = _loss(model, batch(step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        held_out = torch.stack(
            [_loss(model, batch(10**6 + number)) for number in range(HELD_OUT)]
        ).mean()
    found = torch.stack([*losses, held_out])
    dist.all_reduce(found)
    *trained, last = (found / dist.get_world_size()).tolist()
    return {
        "losses": [round(value, 5) for value in trained],
        "held_out": round(last, 5),
        "parameters": sum(param.numel() for param in model.parameters()),
    }


def _rank_main(rank: int, folder: str, name: str, seed: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE
    )
    run = _train(WAYS[name], seed, options.steps, options.lr)
    if rank == 0:
        print(f"seed {seed}, {name}: {run['held_out']:.4f}", flush=True)
        Path(folder, "run.json").write_text(json.dumps(run))
    dist.destroy_process_group()


def _run(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one model on ranks of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, name, seed, options)
        multiprocessing.spawn(_rank_main, arguments, nprocs=WORLD_SIZE)
        run: dict[str, Any] = json.loads(Path(folder, "run.json").read_text())
        return run


def _summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    base = [run["held_out"] for run in runs["fp32"]]
    ways = {}
    for name, each in runs.items():
        ends = [run["held_out"] for run in each]
        above = [end - start for end, start in zip(ends, base, strict=True)]
        ways[name] = {
            "held_out": ends,
            "mean_above_fp32": round(mean(above), 5),
            "above_fp32": [round(value, 5) for value in above],
            "losses": each[0]["losses"],
        }
    return {
        "ways": ways,
        "stdev_of_fp32_between_seeds": round(stdev(base), 5) if len(base) > 1 else None,
    }


def _result(runs: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "question": "what bf16 parameters cost in loss, with fp32 masters and without",
        "options": {"steps": options.steps, "seeds": options.seeds, "lr": options.lr},
        "world_size": WORLD_SIZE,
        "parameters": runs["fp32"][0]["parameters"],
        **_summary(runs),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, one thread per rank",
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def draw(result: dict[str, Any], path: Path) -> bool:
    """Write a PNG to `path`; return False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    colors = dict(
        zip(result["ways"], ["black", "#b9bec6", "#2f6fb2", "#3f9f6f", "#c2503f"], strict=True)
    )
    window = 20
    # Equal curves lie on each other: the first one is wide, and the others are broken differently.
    styles = iter([("-", 4.0), ("-", 2.5), ("--", 1.8), (":", 1.8), ("-.", 1.8)])
    for name, way in result["ways"].items():
        losses = way["losses"]
        smooth = [mean(losses[max(0, i - window) : i + 1]) for i in range(len(losses))]
        style, width = next(styles)
        left.plot(smooth, style, label=name, color=colors[name], linewidth=width)
    left.set_xlabel("step")
    left.set_ylabel(f"training loss, mean of {window} steps, seed 0")
    left.set_ylim(top=4.5)
    left.legend(fontsize=8, frameon=False)
    names = [name for name in result["ways"] if name != "fp32"]
    for position, name in enumerate(names):
        above = result["ways"][name]["above_fp32"]
        right.barh(position, mean(above), color=colors[name], height=0.6)
        right.plot(above, [position] * len(above), "k.", markersize=5)
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.axvline(0, color="black", linewidth=0.8)
    right.set_xlabel("held-out loss above fp32, each seed")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    options = result["options"]
    figure.suptitle(
        f"{result['parameters'] / 1e6:.1f}M-parameter GPT, AdamW, lr {options['lr']:g}, "
        f"{options['steps']} steps, {WORLD_SIZE} ranks; {result['date'][:10]}",
        fontsize=10,
    )
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return True


def main() -> int:
    """Train, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON, and a PNG")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of two ranks each")
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        started = {
            name: [pool.submit(_run, name, seed, options) for seed in range(options.seeds)]
            for name in WAYS
        }
        runs = {name: [run.result() for run in each] for name, each in started.items()}
    result = _result(runs, options)
    for name, way in result["ways"].items():
        print(f"{name:22} {mean(way['held_out']):.4f}  {way['mean_above_fp32']:+.4f}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result) + "\n")
        draw(result, options.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
