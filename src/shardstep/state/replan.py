"""Moving state from one plan to another, and refusing changes that would lose something.

Elements are numbered as they lie in memory. If a parameter has changed its memory format, the
numbers of the two plans mean different elements. Its state is gathered whole then, and cut again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardstep.comm import Comm
from shardstep.local.multi_class import optimizer_name
from shardstep.local.unmovable_state import find_unmovable_state
from shardstep.plan import ParamSpec, ShardPlan
from shardstep.state.exchange import move_state
from shardstep.state.torch_dict import slice_state


def move_states(
    comm: Comm,
    before: ShardPlan,
    after: ShardPlan,
    states: Mapping[int, Any],
    params: Sequence[torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
) -> dict[int, Any]:
    """Return copies of the states of this rank's pieces under another plan. Called on every rank.

    `after` has the same parameters as `before`, or more. `states` is by parameter number, and goes
    to the devices of `params`. State that was on the CPU with its parameter goes with it, except
    for the number of steps, which the options in `groups` may keep there.
    """
    restrided = {
        param
        for param, (old, new) in enumerate(zip(before.specs, after.specs, strict=False))
        if old.stride != new.stride
    }
    wanted = [
        {**held, **{param: after.specs[param].whole for param in restrided & held.keys()}}
        for held in after.holdings
    ]
    moved = move_state(comm, before, wanted, states, params)
    for param in restrided & moved.keys():
        own = after.holdings[comm.group_rank][param]
        moved[param] = slice_state(moved[param], own, after.specs[param])
    for param, state in moved.items():
        if before.specs[param].device.startswith("cpu") and params[param].device.type != "cpu":
            moved[param] = _follow(state, params[param].device, groups[after.specs[param].group])
    return moved


def _follow(state: Any, device: torch.device, group: Mapping[str, Any]) -> Any:
    """Return state on an accelerator, as `torch.optim.Optimizer.load_state_dict` puts it there."""
    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), state)
    if isinstance(state, Mapping) and not (group.get("fused") or group.get("capturable")):
        moved.update((key, value) for key, value in state.items() if key == "step")
    return moved


def refuse_lost_gradients(group_rank: int, what: str, has_gradients: bool) -> None:
    """Raise if a change would drop gradients that the next step needs."""
    if has_gradients:
        raise RuntimeError(
            f"rank {group_rank}: {what} would lose gradients of the next step; "
            "do it before backward, or call zero_grad(set_to_none=True) first"
        )


def refuse_lost_state(group_rank: int, what: str, optim: Optimizer) -> None:
    """Raise if `optim` keeps per-parameter state that cannot be moved."""
    where = find_unmovable_state(optim)
    if where is not None:
        raise RuntimeError(
            f"rank {group_rank}: {what} would lose what {optimizer_name(optim)} keeps of its "
            f"parameters outside its state ({where}); do it before the optimizer is constructed, "
            "or construct another one"
        )


def refuse_other_shapes(
    group_rank: int,
    before: Sequence[ParamSpec],
    after: Sequence[ParamSpec],
    stateful: Collection[int],
) -> None:
    """Raise if a parameter with state or a master was given data of another shape."""
    for index, (old, new) in enumerate(zip(before, after, strict=False)):
        if old.shape != new.shape and index in stateful:
            raise RuntimeError(
                f"rank {group_rank}: parameter {new.name!r} was given data of shape {new.shape} in "
                f"place of {old.shape}, which its state or master does not fit; construct another "
                "optimizer"
            )
