"""The full state dict of a sharded optimizer: consolidating it, loading it, asking for parts.

A full dict equals the unsharded optimizer's `state_dict()`. Masters, if there are any, are in it
under `"masters"`, by parameter number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.comm import Comm
from shardstep.comm.consensus import check_same_on_all_ranks
from shardstep.local.multi_class import extras
from shardstep.plan import ShardPlan
from shardstep.state.exchange import move_state
from shardstep.state.named_dict import numbered
from shardstep.state.torch_dict import pack_groups, share_of, warn_of_missing_state
from shardstep.state.view import ShardView

StateDict = dict[str, Any]
Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Consolidated:
    """The whole state on the CPU of one rank, and the version it is of."""

    states: Mapping[int, Any]
    masters: Mapping[int, Any]
    version: int


def consolidate(shards: ShardView, to: int | str) -> Consolidated | None:
    """Gather the whole state on group rank `to` or on `"all"`. Called on every rank.

    Returns None on ranks that do not get it.
    """
    comm, plan = shards.comm, shards.plan
    shards.check_in_step()

    def check() -> tuple[int | str, list[str]]:
        if to != "all" and to not in range(comm.world_size):
            raise ValueError(
                f"to={to} is not a rank of this group of {comm.world_size} ranks; pass one, or "
                "'all' for every rank"
            )
        shards.local.refuse_hand_edit()
        return to, [f"to={to}"]

    check_same_on_all_ranks(comm, "consolidate_state_dict", check)
    everything = {index: spec.whole for index, spec in enumerate(plan.specs)}
    wanted = [everything if to in (rank, "all") else {} for rank in range(comm.world_size)]
    states = move_state(comm, plan, wanted, shards.local.states(), None)
    masters = move_state(comm, plan, wanted, shards.masters(), None) if shards.widened else {}
    here = to in (comm.group_rank, "all")
    return Consolidated(states, masters, shards.local.version) if here else None


def full_state_dict(shards: ShardView, groups: Groups, held: Consolidated | None) -> StateDict:
    """Return the full state dict that this rank consolidated, or the empty one before any state.

    Raises:
        RuntimeError: if this rank has not consolidated the state, or it has changed since.
    """
    local = shards.local
    if held is not None and held.version == local.version:
        return _full_dict(shards, groups, held.states, held.masters)
    if local.fresh and not local.begins_with_state():
        return _full_dict(shards, groups, {}, {})
    if held is None:
        raise RuntimeError(_remedy(shards.comm, "holds only its share of the optimizer state"))
    what = "consolidated the optimizer state before it last changed, in a step or a load"
    raise RuntimeError(_remedy(shards.comm, what))


def _full_dict(
    shards: ShardView, groups: Groups, states: Mapping[int, Any], masters: Mapping[int, Any]
) -> StateDict:
    shards.sync_options()
    state_dict: StateDict = {
        "state": {**states, **copy.deepcopy(shards.local.global_state())},
        "param_groups": pack_groups(groups),
        **copy.deepcopy(extras(shards.optim)),
    }
    if shards.local.fresh:
        shards.local.groups_given = state_dict["param_groups"]
    if masters:
        state_dict["masters"] = dict(masters)
    if shards.precision.stochastic_rounding:
        state_dict["rounding_step"] = shards.rounding_step
    return state_dict


def _remedy(comm: Comm, what: str) -> str:
    rank = comm.group_rank
    return (
        f"rank {rank} {what}. Call consolidate_state_dict(to={rank}) on all {comm.world_size} "
        f"ranks of the process group, and then state_dict() on rank {rank}. If every rank needs "
        "the state, call consolidate_state_dict(to='all'). For torch.distributed.checkpoint, pass "
        "shardstep.checkpoint.Sharded(optimizer). In its get_state_dict(model, optimizer), write "
        "Sharded(optimizer).as_optimizer() in place of optimizer."
    )


def load_full(shards: ShardView, groups: Groups, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's share of a full state dict, with numbers or names. Nothing is sent.

    A dict that does not fit raises a ValueError on every rank, before anything is changed.
    """
    shards.local.refuse_hand_edit()
    names = [spec.name for spec in shards.plan.specs]
    full = numbered(state_dict, groups, names)
    share = share_of(full, shards)
    present = {index for index in range(len(names)) if full["state"].get(index)}
    shards.give_masters({*present, *full.get("masters", ())})
    share.install(shards)
    given = shards.local.groups_given
    # Accelerate loads a copy of the dict that it was given before the first step. The dict itself
    # comes from torch.distributed.checkpoint, which has read nothing into it.
    itself = given is None or given is state_dict.get("param_groups")
    quiet = shards.local.fresh and not itself
    share.finish(shards)
    if present or not quiet:
        warn_of_missing_state(shards, present)


def gather_whole(
    comm: Comm,
    plan: ShardPlan,
    index: int,
    held: Mapping[int, Any],
    params: Sequence[torch.Tensor],
) -> Any:
    """Gather the state of parameter `index` on every rank, on the devices of the parameters.

    Called on every rank. `held` is this rank's state by parameter number. Returns None if no rank
    has any state.
    """
    wanted = [{index: plan.specs[index].whole}] * comm.world_size
    own = {index: held[index]} if index in held else {}
    return move_state(comm, plan, wanted, own, params).get(index)


def run_state_dict_hooks(optimizer: Optimizer, make: Callable[[], StateDict]) -> StateDict:
    """Return `make()`, passed through the user's state dict hooks."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    state_dict = make()
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        state_dict = post_hook(optimizer, state_dict) or state_dict
    return state_dict


def run_load_hooks(
    optimizer: Optimizer, state_dict: StateDict, load: Callable[[StateDict], None]
) -> None:
    """Call `load` with a copy of `state_dict`, between the user's load hooks."""
    state_dict = state_dict.copy()
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    load(state_dict)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
