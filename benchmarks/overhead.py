"""Host time per parameter: what the hooks and `step()` cost when there is nothing to wait for.

    python benchmarks/overhead.py --out benchmarks/results/overhead.json

A chain of 500 small linear layers (1,000 parameters) is trained in one process, plainly and with
`module=`, in turn. Communication is replaced by one that claims two ranks and returns at once, so
that the difference is what the library itself does: hooks, packing, stand-ins for gradients,
watching parameters in flight, options, bookkeeping.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import SoloComm, Work


class _Instant(SoloComm):
    """Claims a second rank, and finds everything there already."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload, payload]

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int], *operation: Any) -> Work:
        if buffer.dtype == torch.uint8:  # a note of the rank's position, equal on all ranks
            buffer[cuts[1] :] = buffer[: cuts[1]]
        return super().all_gather(buffer, cuts, *operation)

    def reduce_scatter(self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        return super().reduce_scatter(buffer[: out.numel()], cuts, out)

    def new_connection(self, backend: str | None = None) -> SoloComm:
        return _Instant()


def _model(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _iteration(model: nn.Module, optimizer: Any, width: int) -> Callable[[], None]:
    x = torch.ones(1, width)

    def iterate() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return iterate


def _seconds(call: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=500, help="linear layers; 2 parameters each")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = _model(options.layers, options.width)
    ours = _model(options.layers, options.width)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    with mock.patch("shardstep.optimizer.connect", return_value=_Instant()):
        sharded = ZeroRedundancyOptimizer(
            ours.parameters(), torch.optim.AdamW, module=ours, lr=1e-4, fused=True
        )
    contestants = {
        "plain": _iteration(plain, adamw, options.width),
        "zero2": _iteration(ours, sharded, options.width),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(options.rounds + 1):
        for name, iterate in contestants.items():
            seconds = _seconds(iterate, 5)
            if number:  # the first round warms up
                times[name].append(seconds)
    num_params = 2 * options.layers
    added = [
        1e6 * (zero2 - base) / num_params
        for zero2, base in zip(times["zero2"], times["plain"], strict=True)
    ]
    result = {
        "question": "microseconds of host time that module= adds per parameter and step",
        "parameters": num_params,
        "plain_ms": round(1e3 * median(times["plain"]), 3),
        "zero2_ms": round(1e3 * median(times["zero2"]), 3),
        "added_us_per_parameter": {
            "of_best": round(1e6 * (min(times["zero2"]) - min(times["plain"])) / num_params, 2),
            "median": round(median(added), 2),
            "min": round(min(added), 2),
            "max": round(max(added), 2),
        },
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
