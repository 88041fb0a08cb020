"""The benchmark of NCCL, over Gloo on the CPU, and its reading of traces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.timeline import draw, kernels, share_beside, verdict

LAUNCHER = Path(__file__).parents[2] / "benchmarks" / "nccl.py"


@pytest.mark.slow
def test_contestants_take_turns_and_one_that_fails_is_named(tmp_path: Path) -> None:
    out, drawn = tmp_path / "out.json", tmp_path / "out.png"
    options = "--device cpu --rounds 1 --steps 1 --optimizer muon --contestants ddp,fairscale,zero2"
    command = [sys.executable, str(LAUNCHER), *options.split(), "--json", str(out)]
    done = subprocess.run(
        [*command, "--picture", str(drawn)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stderr
    (run,) = json.loads(out.read_text())["runs"]
    assert list(run["failed"]) == ["fairscale"]
    assert "fairscale is not installed" in run["failed"]["fairscale"]
    assert run["contestants"]["zero2"]["loss_distance_to_ddp"] == 0
    assert run["contestants"]["zero2"]["planned_bytes"] > 0
    assert "fairscale failed" in done.stdout
    assert drawn.exists()


def _event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_kernels_belong_to_the_phase_that_launched_them(tmp_path: Path) -> None:
    events = [
        _event("user_annotation", f"iteration::{phase}", 10 * i, 9)
        for i, phase in enumerate(["forward", "backward", "step", "forward"])
    ]
    ran = [  # launched at, name, stream, start and duration on the GPU
        (1, "gemm", 7, 100, 10),
        (11, "gemm", 7, 110, 10),
        (12, "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 20, 115, 10),
        (21, "adam", 7, 125, 5),
        (22, "ncclDevKernel_AllGather_RING_LL", 24, 128, 4),
        (31, "gemm", 7, 130, 5),
        (50, "gemm", 7, 200, 10),  # outside of all iterations
    ]
    for number, (launched, name, stream, start, duration) in enumerate(ran):
        events.append(_event("cuda_runtime", "launch", launched, 1, correlation=number))
        events.append(_event("kernel", name, start, duration, correlation=number, stream=stream))
    found = kernels(events)
    expected = ["forward", "backward", "reduce-scatter", "step", "all-gather", "forward"]
    assert [kernel.kind for kernel in found] == expected
    assert share_beside(found, "reduce-scatter", "backward") == (10, 0.5)
    assert share_beside(found, "all-gather", "forward") == (4, 0.5)
    assert "50.0% of it beside kernels of backward" in verdict(found)
    assert "50.0% of it beside kernels of forward, 100.0% beside any" in verdict(found)
    assert draw(found, tmp_path / "step.png")
