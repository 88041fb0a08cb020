"""From the ranks' raw numbers to one row per contestant, and those rows as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, quantiles
from typing import Any

BASELINE = "ddp"

NOTE = """ms/step: the slowest rank, median of the rounds. sent Ψ: bytes that a rank sends
in a step, over those of all parameters. Δloss: the largest difference to DDP's."""


def summarise(ranks: Sequence[dict[str, Any]], num_steps: int) -> dict[str, dict[str, Any]]:
    """One row per contestant; the first round, a warm-up, is left out.

    A round's time is its slowest rank's; bytes are means over ranks; losses too.
    """
    psi_bytes = ranks[0]["parameter_bytes"]
    rows: dict[str, dict[str, Any]] = {}
    for name in ranks[0]["tracks"]:
        tracks = [rank["tracks"][name] for rank in ranks]
        slowest = [max(t) for t in zip(*(t["seconds"] for t in tracks), strict=True)]
        times = [1e3 * seconds / num_steps for seconds in slowest[1:]]
        sent = fmean(fmean(track["sent"][1:]) for track in tracks) / num_steps
        losses = [fmean(step) for step in zip(*(t["losses"] for t in tracks), strict=True)]
        rows[name] = {
            "ms_per_step": spread(times),
            "ms_per_step_by_round": [round(t, 3) for t in times],
            "sent_bytes_per_rank_and_step": round(sent),
            "sent_psi": round(sent / psi_bytes, 4),
            "state_bytes_per_rank": round(fmean(track["state_bytes"] for track in tracks)),
            "gradient_bytes_per_rank": _mean_or_none([track["gradient_bytes"] for track in tracks]),
            "final_loss": losses[-1],
            "losses": losses,
        }
    compare_with_baseline(rows)
    return rows


def compare_with_baseline(rows: dict[str, dict[str, Any]]) -> None:
    """Add to each row its ratios to the baseline, round by round, and how far its losses are."""
    base = rows.get(BASELINE)
    for row in rows.values():
        if base is None:
            row["ratio_to_ddp"] = row["ratio_to_ddp_by_round"] = row["loss_distance_to_ddp"] = None
            continue
        pairs = zip(row["ms_per_step_by_round"], base["ms_per_step_by_round"], strict=True)
        ratios = [ours / ddp for ours, ddp in pairs]
        row["ratio_to_ddp"] = round(median(ratios), 4)
        row["ratio_to_ddp_by_round"] = [round(ratio, 4) for ratio in ratios]
        row["loss_distance_to_ddp"] = max(
            abs(a - b) for a, b in zip(row["losses"], base["losses"], strict=True)
        )


def _mean_or_none(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(fmean(known)) if len(known) == len(values) else None


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles and extremes."""
    p25, middle, p75 = (
        quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    )
    named = {"median": middle, "min": min(values), "p25": p25, "p75": p75, "max": max(values)}
    return {name: round(value, 3) for name, value in named.items()}


def table(result: dict[str, Any]) -> str:
    """The rows as text, with what could not run below."""
    header = ["contestant", "ms/step", "min–max", "× DDP", "sent Ψ", "state MB", "grad MB"]
    lines = [[*header, "Δloss"]]
    for name, row in result["contestants"].items():
        time, ratio = row["ms_per_step"], row["ratio_to_ddp"]
        gradients, distance = row["gradient_bytes_per_rank"], row["loss_distance_to_ddp"]
        lines.append(
            [
                name,
                f"{time['median']:.0f}",
                f"{time['min']:.0f}–{time['max']:.0f}",
                "-" if ratio is None else f"{ratio:.3f}",
                f"{row['sent_psi']:.2f}",
                f"{row['state_bytes_per_rank'] / 1e6:.1f}",
                "-" if gradients is None else f"{gradients / 1e6:.1f}",
                "-" if distance is None else f"{distance:.1g}",
            ]
        )
    text = [f"{name}: unavailable ({why})" for name, why in result["unavailable"].items()]
    return "\n".join([aligned(lines), *text, NOTE])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return the cells in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
