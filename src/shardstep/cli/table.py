"""The demo's outcome as a table."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.table import Table

from shardstep.demo.record import DemoRecord, RunRecord
from shardstep.demo.run import MODULE


def demo_table(record: DemoRecord) -> Table:
    """Lay out the runs side by side.

    Args:
        record: What the demo measured.

    Returns:
        A table for a rich console.
    """
    config = record.config
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"GPT with {record.num_parameters:,} parameters, {config.ranks} ranks, "
        f"{config.steps} steps, torch {record.torch_version}",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("AdamW\nunder DDP", justify="right")
    for run in record.sharded:
        table.add_column(_way(run).replace(", ", ",\n"), justify="right")
        table.add_column("\nratio", justify="right")

    def row(name: str, measured: Callable[[RunRecord], float | None], form: str, unit: str) -> None:
        plain = measured(record.unsharded)
        cells = [_cell(plain, form, unit)]
        for run in record.sharded:
            value = measured(run)
            known = value is not None and plain
            cells += [_cell(value, form, unit), f"{value / plain:.2f}" if known else ""]  # type: ignore[operator]
        table.add_row(name, *cells)

    row("final loss, mean", lambda run: run.final_loss, ".6f", "")
    for rank in range(config.ranks):
        row(f"state, rank {rank}", lambda run, r=rank: run.ranks[r].state_nbytes / 1e6, ".3f", "MB")  # type: ignore[misc]
    row("sent per step", _sent_megabytes, ".3f", "MB")
    row("time per step", lambda run: run.ms_per_step, ".1f", "ms")
    return table


def verdict_lines(record: DemoRecord) -> list[str]:
    """Say for each sharded run whether it computed the numbers of the unsharded one.

    Args:
        record: What the demo measured.

    Returns:
        A line for each, with rich's markup.
    """
    lines = [f"Losses of all {record.config.steps} steps and final parameters, against DDP's:"]
    for run in record.sharded:
        # More than two gradients are not added in the order that DDP adds them in.
        other_order = run.name == MODULE and record.config.ranks > 2
        colour = "green" if record.equal(run) else "yellow" if other_order else "red"
        line = f"  {_way(run)}: [bold {colour}]{record.verdict(run)}[/]"
        if other_order and not record.equal(run):
            line += ", as sums of more than two numbers are that are added in another order"
        lines.append(line)
    return lines


def _way(run: RunRecord) -> str:
    return "sharded, module=" if run.name == MODULE else "sharded, under DDP"


def _sent_megabytes(run: RunRecord) -> float | None:
    sent = run.sent_nbytes_per_step
    return None if sent is None else sent / 1e6


def _cell(value: float | None, form: str, unit: str) -> str:
    return "unknown" if value is None else f"{value:{form}} {unit}".rstrip()
