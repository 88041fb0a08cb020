"""Saving, side by side: how long it takes, how long training waits, and how much memory it needs.

    python benchmarks/checkpoint.py time     # 82M-parameter GPT and AdamW, ranks on this machine
    python benchmarks/checkpoint.py memory   # 200M parameters: peak memory beyond what was held
    python benchmarks/checkpoint.py all --ranks 2 --out benchmarks/results/checkpoint.json

Contestants of `time` take turns, round after round: `torch.distributed.checkpoint.save` of each
rank's own tensors, ours, and ours in the background; then, fewer times because it takes long,
torch's ZeroRedundancyOptimizer, whose state is consolidated and written with `torch.save`. Every
figure is the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from demo_model import GPT, GPTConfig
from shardstep import ZeroRedundancyOptimizer, checkpoint

GPT_82M = GPTConfig(vocab_size=50257, block_size=1024, n_layer=6, n_head=12, n_embd=768, tied=True)
MIB = 2**20


def trained(cls: Any, model: nn.Module) -> Any:
    """An AdamW, sharded by `cls`, that has taken a step."""
    optimizer = cls(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def slowest(action: Callable[[], Any]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    action()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def measure_time(rank: int, folder: Path, rounds: int, slow_rounds: int) -> dict[str, Any]:
    """Seconds of each contestant, by round."""
    torch.manual_seed(0)
    model = GPT(GPT_82M)
    ours = trained(ZeroRedundancyOptimizer, model)
    own = {
        f"{rank}.{number}.{key}": value
        for number, state in enumerate(ours.optim.state.values())
        for key, value in state.items()
    }
    seconds: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], Any]) -> None:
        seconds.setdefault(name, []).append(round(slowest(action), 4))

    def fresh(name: str) -> Path:
        return folder / f"{name}-{len(seconds.get(name, []))}"

    def take_turns(turn: int) -> None:
        note("dcp.save", lambda: dcp.save(own, checkpoint_id=fresh("dcp.save")))
        note("save", lambda: checkpoint.save(fresh("save"), ours))
        note("save, model too", lambda: checkpoint.save(fresh("save, model too"), ours, model))
        pending: list[Any] = []
        note("async_save returns", lambda: pending.append(checkpoint.async_save(fresh("a"), ours)))
        note("async_save ends", lambda: pending[0].wait())
        note("load", lambda: checkpoint.load(folder / f"save-{turn}", ours))
        note("dcp.load", lambda: dcp.load(own, checkpoint_id=folder / f"dcp.save-{turn}"))
        note("consolidate_state_dict", lambda: ours.consolidate_state_dict(to=0))
        ours._consolidated = None
        dist.barrier()
        if rank == 0:
            for path in folder.iterdir():
                if not path.name.endswith(f"-{turn + 1}"):
                    shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        if rank == 0:
            print(
                f"round {turn}/{rounds}: { ({k: v[-1] for k, v in seconds.items()}) }", flush=True
            )

    for turn in range(rounds + 1):
        take_turns(turn)
    theirs = trained(TorchZero, model)

    def write_theirs() -> None:
        if rank == 0:
            torch.save(theirs.state_dict(), folder / "torch.pt")

    for turn in range(slow_rounds):
        note("torch ZeRO consolidate", lambda: theirs.consolidate_state_dict(to=0))
        note("torch ZeRO torch.save", write_theirs)
        if rank == 0:
            print(f"torch {turn + 1}/{slow_rounds}", flush=True)
    return {
        "parameters": sum(param.numel() for param in model.parameters()),
        # The first round makes buffers and warms caches.
        "seconds": {k: v if k.startswith("torch") else v[1:] for k, v in seconds.items()},
    }


def resident(field: str) -> int:
    """Bytes that this process has in memory, or had at most, by the kernel's account."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_beyond(action: Callable[[], Any]) -> int:
    """Bytes by which memory in use rose above what it was before, at most."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


def measure_memory(rank: int, folder: Path, elements: int) -> dict[str, Any]:
    """Bytes beyond what was held, at the peak of each operation on this rank."""
    width = 2048
    model = nn.ParameterList(
        nn.Parameter(torch.randn(width, width)) for _ in range(elements // width**2)
    )
    ours = trained(ZeroRedundancyOptimizer, model)
    checkpoint.save(folder / "warm-up", ours, model)
    shard = sum(value.nbytes for state in ours.optim.state.values() for value in state.values())
    bucket = max(bucket.nbytes for bucket in ours.plan.buckets)

    def in_background() -> None:
        checkpoint.async_save(folder / "async", ours, model).wait()

    peaks = {
        "save": peak_beyond(lambda: checkpoint.save(folder / "save", ours, model)),
        "load": peak_beyond(lambda: checkpoint.load(folder / "save", ours, model)),
        "async_save": peak_beyond(in_background),
        "consolidate_state_dict": peak_beyond(lambda: ours.consolidate_state_dict(to=0)),
    }
    return {
        "parameters": sum(param.numel() for param in model.parameters()),
        "MiB": {
            "own state": shard // MIB,
            "own state and share of the weights": (shard + shard // 2) // MIB,
            "bucket": bucket / MIB,
            **{f"{name} peak beyond": peak // MIB for name, peak in peaks.items()},
        },
    }


def run_rank(rank: int, ranks: int, folder: str, what: str, options: dict[str, Any]) -> None:
    """One rank, in a process of its own."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=5),
    )
    work = Path(folder) / "checkpoints"
    work.mkdir(exist_ok=True)
    measure: Any = measure_time if what == "time" else measure_memory
    measured = measure(rank, work, **options)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def measure(what: str, ranks: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank measured."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        mp.spawn(run_rank, (ranks, folder, what, options), nprocs=ranks)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def summary(times: dict[str, Any]) -> dict[str, Any]:
    """Medians, spreads, and the ratios that matter."""
    seconds = times["seconds"]
    middle = {name: median(values) for name, values in seconds.items() if values}
    result: dict[str, Any] = {
        name: {"median": round(middle[name], 4), "min": min(values), "max": max(values)}
        for name, values in seconds.items()
        if values
    }
    ratios = {
        "save / dcp.save": middle["save"] / middle["dcp.save"],
        "load / dcp.load": middle["load"] / middle["dcp.load"],
        "async_save returns / save": middle["async_save returns"] / middle["save"],
    }
    if "torch ZeRO consolidate" in middle:
        theirs = middle["torch ZeRO consolidate"]
        ratios["torch ZeRO consolidate + save / save"] = (
            theirs + middle["torch ZeRO torch.save"]
        ) / middle["save"]
        ratios["torch ZeRO consolidate / consolidate"] = theirs / middle["consolidate_state_dict"]
    return {"seconds": result, "ratios": {k: round(v, 3) for k, v in ratios.items()}}


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["time", "memory", "all"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow-rounds", type=int, default=1, help="of torch's consolidation")
    parser.add_argument("--elements", type=int, default=200_000_000, help="for memory")
    parser.add_argument("--out", type=Path, help="also write the result here, as JSON")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "ranks": given.ranks,
    }
    if given.what in ("time", "all"):
        rounds = {"rounds": given.rounds, "slow_rounds": given.slow_rounds}
        times = measure("time", given.ranks, rounds)[0]
        result["time"] = {"parameters": times["parameters"], **summary(times)}
    if given.what in ("memory", "all"):
        result["memory"] = measure("memory", given.ranks, {"elements": given.elements})
    print(json.dumps(result, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
