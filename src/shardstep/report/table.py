"""The demo's outcome as a table."""

from __future__ import annotations

from rich import box
from rich.table import Table

from shardstep.demo.record import DemoRecord


def demo_table(record: DemoRecord) -> Table:
    """Lay out both runs side by side.

    Args:
        record: What the demo measured.

    Returns:
        A table for a rich console.
    """
    config = record.config
    plain, sharded = record.unsharded, record.sharded
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"GPT with {record.num_parameters:,} parameters, {config.ranks} ranks, "
        f"{config.steps} steps, torch {record.torch_version}",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("DDP +\nAdamW", justify="right")
    table.add_column("DDP +\nZeroRedundancyOptimizer", justify="right")
    table.add_column("\nratio", justify="right")

    table.add_row("final loss", f"{plain.final_loss:.6f}", f"{sharded.final_loss:.6f}", "")
    for rank, (a, b) in enumerate(zip(plain.ranks, sharded.ranks, strict=True)):
        table.add_row(f"optimizer state, rank {rank}", *_sizes(a.state_nbytes, b.state_nbytes))
    table.add_row(
        "sent per rank and step", *_sizes(plain.sent_nbytes_per_step, sharded.sent_nbytes_per_step)
    )
    table.add_row(
        "time per step (median)",
        f"{plain.ms_per_step:.1f} ms",
        f"{sharded.ms_per_step:.1f} ms",
        f"{sharded.ms_per_step / plain.ms_per_step:.2f}",
    )
    return table


def verdict_line(record: DemoRecord) -> str:
    """Say in one line whether the two runs computed the same numbers.

    Args:
        record: What the demo measured.

    Returns:
        The line, with rich's markup.
    """
    colour = "green" if record.equal else "red"
    return (
        f"Losses of all {record.config.steps} steps and final parameters: "
        f"[bold {colour}]{record.verdict}[/]"
    )


def _sizes(plain: float | None, sharded: float | None) -> tuple[str, str, str]:
    if plain is None or sharded is None:
        return ("unknown", "unknown", "")
    ratio = f"{sharded / plain:.2f}" if plain else ""
    return (f"{plain / 1e6:.3f} MB", f"{sharded / 1e6:.3f} MB", ratio)
