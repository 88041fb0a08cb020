"""Draw a record of the demo: its loss curves, and the memory of a rank."""

from __future__ import annotations

from pathlib import Path

from demo.record import DemoRecord

_PARTS = {"parameters": ("#d6dae0", ""), "gradients": ("#9fb6d3", "//"), "state": ("#2f6fb2", "..")}
_LINES = [("#8a8f98", "-", 5.0), ("#d9822b", "--", 2.5), ("#1f4e8c", ":", 2.0)]


def draw(record: DemoRecord, path: Path) -> None:
    """Write a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure

    config = record.config
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(record.runs)
    steps = range(1, config.steps + 1)
    for name, (colour, style, width) in zip(names, _LINES, strict=True):
        left.plot(steps, record.losses(name), style, color=colour, linewidth=width, label=name)
    left.set_title("loss per step (equal curves cover each other)", fontsize=10)
    left.set_xlabel("step")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set_ylabel("cross-entropy, nats per byte, mean over ranks")
    left.legend(frameon=False, fontsize=8)

    parameters = 4 * record.num_parameters
    below = [0.0] * len(names)
    for part, (colour, hatch) in _PARTS.items():
        sizes = []
        for ranks in record.runs.values():
            most = {
                "parameters": parameters,
                "gradients": max(rank.gradient_nbytes for rank in ranks),
                "state": max(rank.state_nbytes for rank in ranks),
            }
            sizes.append(most[part] / 1e6)
        bars = right.bar(
            range(len(names)),
            sizes,
            bottom=below,
            width=0.7,
            color=colour,
            hatch=hatch,
            edgecolor="white",
        )
        right.bar_label(
            bars,
            [f"{part} {size:.1f}" for size in sizes],
            label_type="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
        below = [total + size for total, size in zip(below, sizes, strict=True)]
    for number, total in enumerate(below):
        right.text(number, total, f"{total:.1f} MB", ha="center", va="bottom", weight="bold")
    right.set_xticks(range(len(names)), names, fontsize=9)
    right.set_ylabel("MB on the fullest rank")
    right.set_title("memory per rank (gradients include messages in flight)", fontsize=10)
    right.set_ylim(0, 1.12 * max(below))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{record.title}, torch {record.torch_version}",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
