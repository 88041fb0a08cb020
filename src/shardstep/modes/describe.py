"""Descriptions of an optimizer in its mode: the report, and the first lines of `repr`."""

from __future__ import annotations

from shardstep.layouts.state_size import tensor_nbytes
from shardstep.local.multi_class import optimizer_name
from shardstep.modes.base import Mode
from shardstep.report import Report, headline, make_report, show_nbytes


def report_of(mode: Mode) -> Report:
    """Return what this rank holds and sends, and each group's layout."""
    return make_report(
        optimizer_name(mode.optim),
        mode.title,
        mode.comm.group_rank,
        mode.plan,
        mode.planner.settings.layouts.explain(mode.groups),
        mode.optim.state.values(),
        mode.pipeline.params.shard.wide.nbytes,
        mode.pipeline.gradients.nbytes,
        mode.precision if mode.reduces_gradients else None,
    )


def first_lines(mode: Mode) -> str:
    """Return two lines: class, ranks, mode and layout; the state of this rank."""
    head = headline(optimizer_name(mode.optim), mode.title, mode.plan)
    state = show_nbytes(tensor_nbytes([*mode.optim.state.values()]))
    return f"{head}\nrank {mode.comm.group_rank} holds {state} of optimizer state"
