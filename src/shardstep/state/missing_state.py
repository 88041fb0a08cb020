"""Warn if a loaded state lacks trainable parameters: these would resume from zero."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from shardstep.params.names import shorten_list
from shardstep.state.view import ShardView


def warn_of_missing_state(shards: ShardView, present: Collection[int]) -> None:
    """Warn of trainable parameters that have no state although their optimizer keeps some.

    Other parameters of the group show that the optimizer keeps state. If none has any, a rank steps
    on a copy of its smallest piece of the group to find out.
    """
    plan = shards.plan
    trainable = [index for index, spec in enumerate(plan.specs) if spec.trainable]
    lacking = {index for index in trainable if index not in present}
    keeping = {plan.specs[index].group for index in present}
    smallest: dict[int, int] = {}
    held = shards.held
    for index in sorted(lacking & held.keys(), key=lambda index: (held[index].numel, index)):
        if plan.specs[index].group not in keeping:
            smallest.setdefault(plan.specs[index].group, index)
    if smallest:
        try:
            tried: Collection[int] = shards.local.rehearse(smallest.values())[0]
        except Exception:  # a step on zero gradients may fail in any way
            tried = smallest.values()
        keeping |= {plan.specs[index].group for index in tried}
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
