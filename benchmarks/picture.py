"""Draw a result of the hosts benchmark: time per step with its spread, and bytes on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_OURS, _OTHERS, _BASELINE = "#2f6fb2", "#b9bec6", "#6b7280"


def draw(result: dict[str, Any], path: Path) -> bool:
    """Write a PNG to `path`; return False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = result["contestants"]
    names = list(rows)
    figure = Figure(figsize=(9, 0.9 + 0.42 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])

    times = [rows[name]["ms_per_step"] for name in names]
    colors = [_color(name) for name in names]
    medians = [time["median"] for time in times]
    below = [time["median"] - time["min"] for time in times]
    above = [time["max"] - time["median"] for time in times]
    left.barh(names, medians, color=colors, height=0.65)
    left.errorbar(
        medians, names, xerr=[below, above], fmt="none", ecolor="black", capsize=3, linewidth=1
    )
    left.set_xlim(0, 1.22 * max(time["max"] for time in times))
    for i, name in enumerate(names):
        ratio = rows[name]["ratio_to_ddp"]
        note = f" {medians[i]:.0f}" + ("" if ratio is None else f"  ({ratio:.2f}×)")
        left.text(times[i]["max"], i, note, va="center", fontsize=8)
    left.set_xlabel("ms per step: median, min to max over rounds")

    sent = [rows[name]["sent_psi"] for name in names]
    right.barh(names, sent, color=colors, height=0.65)
    for i, value in enumerate(sent):
        right.text(value, i, f" {value:.2f}", va="center", fontsize=8)
    right.set_xlim(0, 1.2 * max(sent))
    right.set_xlabel("sent per rank and step, in model sizes Ψ")

    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(result), fontsize=10)
    # Metadata would name the versions of the drawing library; the JSON beside says what matters.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return True


def _color(name: str) -> str:
    if name.startswith(("zero", "hook", "register")):
        return _OURS
    return _BASELINE if name == "ddp" else _OTHERS


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
