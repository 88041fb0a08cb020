"""Read a profiler's trace: how much communication ran while the GPU computed, and a step's picture.

Phases are the spans `iteration::forward`, `::backward` and `::step`. A kernel belongs to the phase
in which the host launched it, whenever it ran.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Interval = tuple[float, float]

_KINDS = {"ReduceScatter": "reduce-scatter", "AllGather": "all-gather", "AllReduce": "all-reduce"}
_STYLES = {
    "forward": ("#9ecae1", ""),
    "backward": ("#3182bd", ""),
    "step": ("#bdbdbd", ""),
    "reduce-scatter": ("#e6550d", "///"),
    "all-gather": ("#31a354", "..."),
    "other NCCL": ("#756bb1", "xxx"),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel on the GPU, in microseconds.

    Attributes:
        kind: of a collective, its name; of compute, the phase that launched it.
        iteration: the number of the iteration that launched it.
    """

    kind: str
    iteration: int
    stream: int
    start: float
    stop: float


def load(path: Path) -> list[Kernel]:
    """Return the kernels of a Chrome trace that iterations launched, in order of time."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return kernels(json.loads(text)["traceEvents"])


def kernels(events: Sequence[dict[str, Any]]) -> list[Kernel]:
    """Return the kernels among a trace's events that iterations launched, in order of time."""
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
    }
    phases = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix("iteration::"))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("iteration::")
    )
    found = []
    for event in events:
        if event.get("cat") != "kernel":
            continue
        # Those launched before the trace began, or unseen, count as launched when they ran.
        launched = launches.get(event["args"].get("correlation"), event["ts"])
        for number, (start, stop, phase) in enumerate(phases):
            if start <= launched <= stop:
                kind = _kind(event["name"]) or phase
                ended = event["ts"] + event["dur"]
                stream = event["args"]["stream"]
                found.append(Kernel(kind, number // 3, stream, event["ts"], ended))
                break
    return sorted(found, key=lambda kernel: kernel.start)


def _kind(name: str) -> str | None:
    if not name.lower().startswith("nccl"):
        return None
    return next((kind for part, kind in _KINDS.items() if part in name), "other NCCL")


def share_beside(found: Sequence[Kernel], kind: str, *phases: str) -> tuple[float, float]:
    """Return the time of a kind of kernel in microseconds, and the share beside compute."""
    mine = _union([(k.start, k.stop) for k in found if k.kind == kind])
    theirs = _union([(k.start, k.stop) for k in found if k.kind in phases])
    total = sum(stop - start for start, stop in mine)
    both = total + sum(stop - start for start, stop in theirs)
    shared = both - sum(stop - start for start, stop in _union([*mine, *theirs]))
    return total, shared / total if total else 0.0


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def verdict(found: Sequence[Kernel]) -> str:
    """Return how much of the communication ran at the same time as compute, in words."""
    if not found:
        return "the trace has no kernels: if MPS hides them from the profiler, pass --no-mps"
    last = max(kernel.iteration for kernel in found)
    # No forward follows the last iteration's gathers.
    found = [k for k in found if (k.kind, k.iteration) != ("all-gather", last)]
    lines = []
    for kind, phase in (("reduce-scatter", "backward"), ("all-gather", "forward")):
        total, share = share_beside(found, kind, phase)
        anything = share_beside(found, kind, "forward", "backward", "step")[1]
        count = sum(kernel.kind == kind for kernel in found)
        lines.append(
            f"{kind}: {count} kernels, {total / 1e3:.2f} ms; {share:.1%} of it beside kernels of "
            f"{phase}, {anything:.1%} beside any compute"
        )
    return "\n".join(lines)


def draw(found: Sequence[Kernel], path: Path) -> bool:
    """Draw an iteration in the middle; return False if matplotlib or kernels are missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not found:
        return False
    middle = found[-1].iteration // 2
    compute = [k for k in found if k.iteration == middle and k.kind in ("forward", "backward")]
    begin = compute[0].start
    end = max(k.stop for k in found if k.iteration == middle)
    shown = [k for k in found if k.stop > begin and k.start < end]
    streams = sorted({k.stream for k in shown})
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(streams)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for kind, (color, hatch) in _STYLES.items():
        label: str | None = kind
        for row, stream in enumerate(streams):
            bars = [
                (
                    max(k.start, begin) / 1e3 - begin / 1e3,
                    (min(k.stop, end) - max(k.start, begin)) / 1e3,
                )
                for k in shown
                if k.kind == kind and k.stream == stream
            ]
            if bars:
                axes.broken_barh(
                    bars, (row - 0.4, 0.8), facecolor=color, hatch=hatch, edgecolor="black",
                    linewidth=0.1, label=label,
                )  # fmt: skip
                label = None
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the first kernel of forward")
    axes.set_title("One iteration with module= on rank 0: kernels by stream")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(_STYLES), frameon=False)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return True
