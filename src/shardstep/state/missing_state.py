"""Warn if a loaded state lacks trainable parameters: these would resume from zero."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

from shardstep.params.names import shorten_list
from shardstep.plan import ShardPlan


def warn_of_missing_state(
    rehearse: Callable[[Collection[int]], tuple[dict[int, Any], dict[Any, Any]]],
    plan: ShardPlan,
    group_rank: int,
    present: Collection[int],
) -> None:
    """Warn of trainable parameters that have no state although their optimizer keeps some.

    Other parameters of the group show that the optimizer keeps state. If none has any, a rank steps
    on a copy of its smallest piece of the group to find out.

    Args:
        rehearse: returns the state that a first step would make for some parameters.
        plan: the placement.
        group_rank: this rank.
        present: the parameters that have state now.
    """
    trainable = [index for index, spec in enumerate(plan.specs) if spec.trainable]
    lacking = {index for index in trainable if index not in present}
    keeping = {plan.specs[index].group for index in present}
    smallest: dict[int, tuple[int, int]] = {}
    for index, held in plan.intervals(group_rank).items():
        group = plan.specs[index].group
        if index in lacking and group not in keeping:
            smallest[group] = min(smallest.get(group, (held.numel, index)), (held.numel, index))
    if smallest:
        tried = {index: group for group, (_, index) in smallest.items()}
        try:
            states, _ = rehearse(tried)
            keeping |= {tried[index] for index in states}
        except Exception:  # a step on zero gradients may fail in any way
            keeping |= set(tried.values())
    missed = [index for index in sorted(lacking) if plan.specs[index].group in keeping]
    if not missed:
        return
    if len(lacking) == len(trainable):
        message = "the loaded state is empty: this resumes from zero"
    else:
        names = shorten_list(plan.specs[index].name for index in missed)
        message = (
            f"the loaded state has nothing for {len(missed)} of {len(trainable)} trainable "
            f"parameters ({names}): these resume from zero"
        )
    warnings.warn(message, UserWarning, stacklevel=5)
