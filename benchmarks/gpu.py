"""The contestants on one CUDA device: the step alone, whole iterations, and several ranks.

    python benchmarks/gpu.py step        # step() of an 836M-parameter AdamW, world size 1, NCCL
    python benchmarks/gpu.py iteration   # forward, backward and step of an 836M-parameter GPT
    python benchmarks/gpu.py ranks       # 2 ranks on the one device over Gloo, 200 steps
    python benchmarks/gpu.py all --out benchmarks/results/gpu.json

Contestants are built side by side and timed in turn, round after round; figures are medians of
device times, with their spread. The host's time is that of one call with nothing queued before.
Memory is measured with each contestant alone on the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel

from demo_model import GPT, GPTConfig
from shardstep import ZeroRedundancyOptimizer

AdamW = torch.optim.AdamW
OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
REPLAYED: dict[str, Any] = {**OPTIONS, "capturable": True}
"""Options with which shardstep replays the local step as a CUDA graph."""
GPT_836M = GPTConfig(
    vocab_size=13824, block_size=512, n_layer=28, n_head=16, n_embd=1536, tied=False
)
GPT_SMALL = GPTConfig(vocab_size=512, block_size=64, n_layer=4, n_head=4, n_embd=256, tied=True)

Step = Callable[[], Any]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes, in the unit given."""
    return {
        "median": round(median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def timed(step: Step, repeats: int) -> float:
    """Milliseconds of device time per call."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        step()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repeats


def host_timed(step: Step) -> float:
    """Milliseconds until a call returns, with no work queued before it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def compare(
    makers: dict[str, Callable[[], Step]], rounds: int, repeats: int, baseline: str
) -> dict[str, Any]:
    """Time the contestants in turn, and measure each one's memory alone."""
    memory: dict[str, dict[str, int]] = {}
    for name, make in makers.items():
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step = make()
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        memory[name] = {
            "held_bytes": torch.cuda.memory_allocated() - before,
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
        }
        del step
    gc.collect()
    torch.cuda.empty_cache()
    steps = {name: make() for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    host_times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        order = list(steps)
        order = order[number % len(order) :] + order[: number % len(order)]
        for name in order:
            elapsed = timed(steps[name], repeats)
            if number:  # the first round warms up
                times[name].append(elapsed)
                host_times[name] += [host_timed(steps[name]) for _ in range(3)]
    return {
        name: {
            "ms": spread(times[name]),
            "host_ms": spread(host_times[name]),
            f"over_{baseline}": spread(
                [mine / base for mine, base in zip(times[name], times[baseline], strict=True)]
            ),
            **memory[name],
        }
        for name in steps
    }


def parameters() -> list[nn.Parameter]:
    """The parameters of the large GPT, with gradients, without the model."""
    with torch.device("meta"):
        shapes = [p.shape for p in GPT(GPT_836M).parameters()]
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def step_alone() -> dict[str, Any]:
    """`step()` with gradients in place, one rank."""
    makers: dict[str, Callable[[], Step]] = {
        "adamw": lambda: AdamW(parameters(), **OPTIONS).step,
        "torch-zero": lambda: TorchZero(parameters(), AdamW, **OPTIONS).step,
        "torch-zero-view": lambda: (
            TorchZero(parameters(), AdamW, parameters_as_bucket_view=True, **OPTIONS).step
        ),
        "zero1": lambda: ZeroRedundancyOptimizer(parameters(), AdamW, **OPTIONS).step,
        "zero1-view": lambda: (
            ZeroRedundancyOptimizer(
                parameters(), AdamW, parameters_as_bucket_view=True, **OPTIONS
            ).step
        ),
        "zero1-replayed": lambda: ZeroRedundancyOptimizer(parameters(), AdamW, **REPLAYED).step,
        "zero1-view-replayed": lambda: (
            ZeroRedundancyOptimizer(
                parameters(), AdamW, parameters_as_bucket_view=True, **REPLAYED
            ).step
        ),
    }
    return compare(makers, rounds=9, repeats=10, baseline="adamw")


def _iteration(wrap: Callable[[nn.Module], tuple[nn.Module, Any]]) -> Callable[[], Step]:
    def make() -> Step:
        torch.manual_seed(0)
        with torch.device("cuda"):
            made = GPT(GPT_836M)
        model, optimizer = wrap(made)
        tokens = torch.randint(GPT_836M.vocab_size, (8, 513), device="cuda")

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:])[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def iteration() -> dict[str, Any]:
    """Forward, backward and step, one rank."""

    def ddp(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
        wrapped = DistributedDataParallel(model, device_ids=[0], **options)
        return wrapped, AdamW(wrapped.parameters(), **OPTIONS)

    def zero2(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
        return model, ZeroRedundancyOptimizer(
            model.parameters(), AdamW, module=model, **{**OPTIONS, **options}
        )

    makers = {
        "ddp": _iteration(ddp),
        "ddp-view": _iteration(lambda m: ddp(m, gradient_as_bucket_view=True)),
        "zero2": _iteration(zero2),
        "zero2-replayed": _iteration(lambda m: zero2(m, capturable=True)),
    }
    return compare(makers, rounds=7, repeats=4, baseline="ddp")


def _rank(rank: int, world_size: int, folder: str, steps: int) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )

    def losses(device: str, overlap: bool, ddp: bool = False) -> dict[str, Any]:
        torch.manual_seed(0)
        model = GPT(GPT_SMALL).to(device)
        run: nn.Module = model
        if ddp:
            run = DistributedDataParallel(model)
            optimizer: Any = AdamW(run.parameters(), lr=1e-3)
        else:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), AdamW, module=model, overlap=overlap, lr=1e-3
            )
        found = []
        start = time.perf_counter()
        for step in range(steps):
            torch.manual_seed(1000 * step + rank)
            tokens = torch.randint(64, (4, 33)).to(device)
            loss = run(tokens[:, :-1], tokens[:, 1:])[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        values = torch.stack(found).cpu()
        return {"losses": values.tolist(), "seconds": time.perf_counter() - start}

    results = {
        "cuda, overlap": losses("cuda", True),
        "cuda, no overlap": losses("cuda", False),
        "cuda, DDP": losses("cuda", True, ddp=True),
        "cpu, overlap": losses("cpu", True),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def several_ranks(world_size: int = 2, steps: int = 200) -> dict[str, Any]:
    """Several ranks on one device, over Gloo: overlapped, not, DDP, and on the CPU."""
    # Runs are compared bit for bit: atomics in embedding backward add in any order otherwise.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_deterministic_rank, args=(world_size, folder, steps), nprocs=world_size)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]
    on, off, ddp, cpu = (
        [rank[name]["losses"] for rank in ranks]
        for name in ("cuda, overlap", "cuda, no overlap", "cuda, DDP", "cpu, overlap")
    )
    flat = [
        abs(a - b) / abs(b)
        for mine, theirs in zip(on, cpu, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    return {
        "world_size": world_size,
        "steps": steps,
        "overlapped equals not overlapped, bit for bit": on == off,
        "overlapped equals DDP, bit for bit": on == ddp,
        "largest relative difference from the CPU": max(flat),
        "first and last loss": [on[0][0], on[0][-1]],
        "seconds": {name: round(run["seconds"], 2) for name, run in ranks[0].items()},
    }


def _deterministic_rank(rank: int, world_size: int, folder: str, steps: int) -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    _rank(rank, world_size, folder, steps)


def questions(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The answers asked for, each as soon as it is there."""
    alone = name in ("step", "iteration", "all")
    if alone:
        with tempfile.NamedTemporaryFile() as store:
            dist.init_process_group(
                "nccl", init_method=f"file://{store.name}.store", rank=0, world_size=1
            )
            if name in ("step", "all"):
                yield "step", step_alone()
            if name in ("iteration", "all"):
                yield "iteration", iteration()
            dist.destroy_process_group()
    if name in ("ranks", "all"):
        yield "ranks", several_ranks()


def main() -> int:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", choices=["step", "iteration", "ranks", "all"])
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": sum(p.numel() for p in _count()),
    }
    for name, answer in questions(options.question):
        result[name] = answer
        print(json.dumps({name: answer}, indent=1), flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _count() -> list[nn.Parameter]:
    with torch.device("meta"):
        return list(GPT(GPT_836M).parameters())


if __name__ == "__main__":
    raise SystemExit(main())
