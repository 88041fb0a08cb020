"""Draw the README's picture: the memory of a rank for three models, by `shardstep plan`.

python benchmarks/memory_picture.py
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

RANKS = 8
MODELS = {
    "gpt2-124m": "GPT-2 124M, fp32",
    "llama3-1b": "Llama 1B, bf16",
    "llama3-8b": "Llama 8B, bf16",
}
METHODS = {
    "ddp": "DDP",
    "torch_zero": "torch ZeRO",
    "drop_in": "shardstep drop-in",
    "module": "shardstep module=",
    "fsdp2": "FSDP2",
}
PARTS = {
    "parameters": ("#1f4e79", ""),
    "gradients": ("#5b9bd5", "///"),
    "masters": ("#f4b183", "..."),
    "state": ("#c55a11", "xxx"),
    "buffers": ("#d9d9d9", ""),
}
FOLDER = Path(__file__).parent / "results"


def main() -> None:
    """Ask for the plans, and draw them."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, (model, title) in zip(panels, MODELS.items(), strict=True):
        command = ["shardstep", "plan", "--model", model, "--ranks", str(RANKS), "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        _draw(axes, json.loads(done.stdout)["plans"][0], title)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS), frameon=False)
    figure.suptitle(f"Memory per rank with AdamW on {RANKS} ranks, without activations")
    figure.savefig(FOLDER / "memory.png", dpi=130, metadata={"Software": None})


def _draw(axes: Any, plan: dict[str, Any], title: str) -> None:
    names = list(METHODS.values())
    left = [0.0] * len(names)
    for part, (colour, hatch) in PARTS.items():
        sizes = [plan[method][part] / 1e9 for method in METHODS]
        axes.barh(
            names, sizes, left=left, label=part, color=colour, hatch=hatch, edgecolor="white",
            linewidth=0.5,
        )  # fmt: skip
        left = [total + size for total, size in zip(left, sizes, strict=True)]
    for number, total in enumerate(left):
        axes.text(total, number, f" {total:.3g} GB", va="center", fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("GB on the fullest rank")
    axes.set_xlim(0, 1.28 * max(left))
    axes.invert_yaxis() if axes.get_subplotspec().is_first_col() else None
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
