"""State follows its parameters from one plan to another, and into another order in memory.

Elements are numbered as they lie in memory. Where a parameter has changed its memory format, the
numbers of the two plans mean different elements of it, and no interval of the one is an interval of
the other: its state is put together whole, and cut anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardstep.comm import Comm
from shardstep.plan import Holding, Interval, ShardPlan
from shardstep.state.exchange import Device, move_state
from shardstep.state.torch_dict import take


def follow_plan(
    comm: Comm,
    before: ShardPlan,
    after: ShardPlan,
    states: Mapping[int, Any],
    device: Device,
) -> dict[int, Any]:
    """Give every rank the state of what it owns under another plan.

    Called on every rank.

    Args:
        comm: the ranks.
        before: the plan that the state was kept under.
        after: the plan to come, of the same parameters or more.
        states: this rank's state by parameter, for those it has any for.
        device: where to put what arrives.

    Returns:
        The state of this rank's pieces under `after`, in memory of its own.

    Raises:
        RuntimeError: on every rank, if the state of some parameter cannot be put together.
    """
    turned = {
        param
        for param, (old, new) in enumerate(zip(before.specs, after.specs, strict=False))
        if old.stride != new.stride
    }

    def wanted(group_rank: int) -> Holding:
        return {
            param: Interval(0, after.specs[param].numel) if param in turned else interval
            for param, interval in after.intervals(group_rank).items()
        }

    moved = move_state(
        comm,
        (*before.specs, *after.specs[len(before.specs) :]),
        held=[before.intervals(rank) for rank in range(comm.world_size)],
        wanted=[wanted(rank) for rank in range(comm.world_size)],
        states=states,
        device=device,
    )
    mine = after.intervals(comm.group_rank)
    return {
        param: take(state, mine[param], after.specs[param]) if param in turned else state
        for param, state in moved.items()
    }
