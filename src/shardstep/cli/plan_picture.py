"""The picture of `shardstep plan`: memory per rank by method, and the owner of every element."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from shardstep.cli.plan import METHODS, unit_of
from shardstep.plan import ShardPlan

STYLES = {
    "parameters": ("#1f4e79", ""),
    "gradients": ("#5b9bd5", "///"),
    "masters": ("#f4b183", "..."),
    "state": ("#c55a11", "xxx"),
    "buffers": ("#d9d9d9", ""),
}
"""Colour and hatch of each kind of memory: readable in grey too."""

MAX_ROWS = 16


def draw(result: dict[str, Any], plan: ShardPlan, path: Path) -> None:
    """Write a PNG. The owners are those of `plan`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = result["plans"]
    figure = Figure(figsize=(11, 2.2 + 1.15 * len(rows) + 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    memory, owners = figure.subplots(2, 1, height_ratios=[1.15 * len(rows) + 1, 3.2])
    _draw_memory(memory, rows, *unit_of(result))
    _draw_owners(owners, plan)
    figure.suptitle(
        f"{result['model']}: {result['num_parameters']:,} parameters, {result['optimizer']}, "
        f"{result['precision']}",
        fontsize=12,
    )
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _draw_memory(axes: Any, rows: list[dict[str, Any]], unit: str, size: float) -> None:
    places, labels = [], []
    held = {kind for kind in STYLES for row in rows for key in METHODS if row[key][kind]}
    styles = {kind: style for kind, style in STYLES.items() if kind in held}
    for number, row in enumerate(rows):
        for inner, (key, (title, _)) in enumerate(METHODS.items()):
            place = number * (len(METHODS) + 1) + inner
            places.append(place)
            labels.append(f"{_count(row['ranks'])}   {title}" if inner == 0 else title)
            start = 0.0
            for kind, (color, hatch) in styles.items():
                width = row[key][kind] / size
                style = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
                axes.barh(place, width, left=start, label=kind if place == 0 else None, **style)
                start += width
            axes.text(start, place, f" {start:,.2f}", va="center", fontsize=7)
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(row[key]["peak"] for row in rows for key in METHODS) / size)
    axes.set_xlabel(f"{unit} on the fullest rank, without activations")
    axes.set_title("Memory per rank", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=len(styles), fontsize=8, frameon=False
    )


def _draw_owners(axes: Any, plan: ShardPlan) -> None:
    """Draw one row per rank: the elements it owns, at their positions in the model."""
    starts = [0, *accumulate(spec.numel for spec in plan.specs)]
    shown = range(min(plan.world_size, MAX_ROWS))
    for rank in shown:
        spans = [
            (starts[param] + interval.start, interval.numel)
            for param, interval in plan.intervals(rank).items()
        ]
        color = "#1f4e79" if rank % 2 == 0 else "#5b9bd5"
        axes.broken_barh([(a / 1e6, n / 1e6) for a, n in spans], (rank - 0.4, 0.8), color=color)
    axes.set_xlim(0, starts[-1] / 1e6)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_yticks([*shown], [f"rank {rank}" for rank in shown], fontsize=7)
    axes.set_xlabel("position in the model, million elements")
    first = f"the first {MAX_ROWS} of " if plan.world_size > MAX_ROWS else ""
    axes.set_title(
        f"Elements that each rank updates: {first}{_count(plan.world_size)}, layout {plan.layout}",
        fontsize=10,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)


def _count(ranks: int) -> str:
    return f"{ranks:,} rank{'' if ranks == 1 else 's'}"
