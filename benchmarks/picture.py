"""Draw a benchmark's result: time per step with its spread, and bytes sent or memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TITLES = {
    "ddp": "DDP",
    "ddp-view": "DDP, bucket views",
    "torch-zero": "torch ZeRO",
    "torch-zero-view": "torch ZeRO, bucket views",
    "fsdp2": "FSDP2",
    "zero1": "shardstep drop-in",
    "zero2": "shardstep module=",
    "hook": "shardstep hook",
    "hook-interleaved": "shardstep interleaved hook",
    "register": "shardstep register",
}
"""Contestants as the documentation calls them."""

_OURS, _OTHERS, _BASELINE = "#2f6fb2", "#b9bec6", "#6b7280"


def draw(result: dict[str, Any], path: Path) -> bool:
    """Write a PNG to `path`; return False where matplotlib is not installed."""
    rows = result["contestants"]
    sent = {name: row["sent_psi"] for name, row in rows.items()}
    return _draw(rows, sent, "sent per rank and step, in Ψ", _title(result), path)


def draw_runs(result: dict[str, Any], path: Path) -> bool:
    """Write a PNG of the NCCL benchmark's runs; return False where matplotlib is not installed."""
    rows = {
        (name, run["workload"]["world_size"]): row
        for run in result["runs"]
        for name, row in run["contestants"].items()
    }
    peaks = {name: row["peak_bytes"] / 2**30 for name, row in rows.items()}
    workload = result["runs"][0]["workload"]
    machine = f"{result['machine']['gpu']}" if workload["num_gpus"] else "CPU, Gloo"
    if result["mps"]:
        machine += ", shared by all ranks with MPS"
    title = (
        f"{workload['model']}, {workload['precision']}, "
        f"{'Muon and AdamW' if workload['muon'] else 'AdamW'}"
        f"{', compiled' if workload['compiled'] else ''}; {machine}; {result['date'][:10]}"
    )
    return bool(rows) and _draw(rows, peaks, "peak memory of a rank, GiB", title, path)


def _draw(
    rows: dict[Any, Any], sizes: dict[Any, float], size_label: str, title: str, path: Path
) -> bool:
    """Draw the time of each row as a bar with its spread, and a bar for its size."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    names = list(rows)
    figure = Figure(figsize=(10, 0.9 + 0.42 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])

    times = [row["ms_per_step"] for row in rows.values()]
    colors = [_color(name) for name in names]
    labels = [_label(name) for name in names]
    medians = [time["median"] for time in times]
    below = [time["median"] - time["min"] for time in times]
    above = [time["max"] - time["median"] for time in times]
    left.barh(labels, medians, color=colors, height=0.65)
    left.errorbar(
        medians, labels, xerr=[below, above], fmt="none", ecolor="black", capsize=3, linewidth=1
    )
    left.set_xlim(0, 1.22 * max(time["max"] for time in times))
    for i, name in enumerate(names):
        ratio = rows[name]["ratio_to_ddp"]
        note = f" {medians[i]:.{0 if medians[i] > 100 else 1}f}"
        note += "" if ratio is None else f"  ({ratio:.2f}×)"
        left.text(times[i]["max"], i, note, va="center", fontsize=8)
    left.set_xlabel("ms per step: median, min to max; (× DDP)")

    right.barh(labels, [sizes[name] for name in names], color=colors, height=0.65)
    for i, name in enumerate(names):
        right.text(sizes[name], i, f" {sizes[name]:.2f}", va="center", fontsize=8)
    right.set_xlim(0, 1.2 * max(sizes.values()) or 1)
    right.set_xlabel(size_label)

    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    # Metadata would name the versions of the drawing library; the JSON beside says what matters.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return True


def _label(name: str | tuple[str, int]) -> str:
    if isinstance(name, tuple):
        return f"{_label(name[0])}, {name[1]} ranks"
    return TITLES.get(name, name)


def _color(name: str | tuple[str, int]) -> str:
    contestant = name[0] if isinstance(name, tuple) else name
    if contestant.startswith(("zero", "hook", "register")):
        return _OURS
    return _BASELINE if contestant == "ddp" else _OTHERS


def _title(result: dict[str, Any]) -> str:
    options, model = result["options"], result["model"]
    if options.get("local"):
        kind = f"{options['hosts']} single-threaded ranks on one machine"
    else:
        kind = f"{options['hosts']} hosts, one single-threaded rank each"
    rate = "links not limited" if options["rate"] == "none" else f"{options['rate']} links"
    return (
        f"{kind}, {rate}, Gloo; "
        f"{model['num_parameters'] / 1e6:.1f}M-parameter GPT; {result['date']}"
    )
