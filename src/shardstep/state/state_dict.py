"""The full state dict of a sharded optimizer: consolidating it, loading it, asking for parts.

A full dict is what the unsharded optimizer's `state_dict()` would be. Masters, if there are any,
are in it under `"masters"`, by parameter number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.comm import Comm
from shardstep.comm.consensus import check_same_on_all_ranks
from shardstep.local.multi_class import extras
from shardstep.plan import Interval, ShardPlan
from shardstep.state.exchange import move_state
from shardstep.state.missing_state import warn_of_missing_state
from shardstep.state.named_dict import numbered
from shardstep.state.torch_dict import described_in, load_share, masters_in, pack_groups
from shardstep.state.tree import Leaf
from shardstep.state.view import ShardView

StateDict = dict[str, Any]
Groups = Sequence[Mapping[str, Any]]


def consolidate(shards: ShardView, groups: Groups, to: int) -> StateDict | None:
    """Gather the whole state on one rank, in its CPU memory. Called on every rank.

    Args:
        shards: this rank's share.
        groups: the parameter groups that the user sees.
        to: the group rank that receives the state.

    Returns:
        The full state dict on rank `to`, None elsewhere.

    Raises:
        ValueError: on every rank, if there is no such rank, or ranks pass different ones.
        RuntimeError: on every rank, if there is state that cannot be sent.
    """
    comm, plan = shards.comm, shards.plan

    def check() -> tuple[int, list[str]]:
        if not 0 <= to < comm.world_size:
            raise ValueError(f"to={to} is not a rank of this group of {comm.world_size} ranks")
        return to, [f"to={to}"]

    check_same_on_all_ranks(comm, "consolidate_state_dict", check)
    everything = {index: Interval(0, spec.numel) for index, spec in enumerate(plan.specs)}

    def gather(states: Mapping[int, Any]) -> dict[int, Any]:
        moved = move_state(
            comm,
            plan.specs,
            held=[plan.intervals(rank) for rank in range(comm.world_size)],
            wanted=[everything if rank == to else {} for rank in range(comm.world_size)],
            states=states,
            device=lambda index, leaf: torch.device("cpu"),
        )
        return dict(sorted(moved.items()))

    states = gather(shards.states())
    masters = gather(shards.masters()) if shards.widened else {}
    if comm.group_rank != to:
        return None
    shards.sync_options()
    state_dict: StateDict = {
        "state": {**states, **copy.deepcopy(shards.global_state())},
        "param_groups": pack_groups(groups),
        **copy.deepcopy(extras(shards.optim)),
    }
    if masters:
        state_dict["masters"] = masters
    if shards.precision.stochastic_rounding:
        state_dict["rounding_step"] = shards.rounding_step
    return state_dict


def copy_consolidated(consolidated: StateDict | None, comm: Comm) -> StateDict:
    """Return a copy of a consolidated dict that the caller may change.

    Raises:
        RuntimeError: if there is none on this rank.
    """
    rank = comm.group_rank
    if consolidated is None:
        raise RuntimeError(
            f"rank {rank} holds only its share of the optimizer state; to get all of it here, call "
            f"consolidate_state_dict(to={rank}) on all {comm.world_size} ranks of the process "
            f"group first, and then state_dict() on rank {rank}; for torch.distributed.checkpoint, "
            "pass shardstep.checkpoint.Sharded(optimizer)"
        )
    copied = {key: copy.copy(value) for key, value in consolidated.items()}
    return {**copied, "param_groups": [dict(group) for group in consolidated["param_groups"]]}


def load_full(shards: ShardView, groups: Groups, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's share of a full state dict; nothing is sent.

    Args:
        shards: this rank's share.
        groups: the parameter groups that the user sees.
        state_dict: a full state dict, with parameter numbers or names.

    Raises:
        ValueError: if it does not fit; found on every rank, before anything is changed.
    """
    plan, rank = shards.plan, shards.comm.group_rank
    by_number = dict(numbered(state_dict, groups, [spec.name for spec in plan.specs]))
    shards.give_masters(described_in(by_number, groups))
    masters = masters_in(by_number, groups, plan, rank)
    present = load_share(by_number, groups=groups, plan=plan, group_rank=rank, local=shards.optim)
    shards.set_masters(masters)
    shards.rounding_step = by_number.get("rounding_step", shards.rounding_step)
    shards.publish_options()
    warn_of_missing_state(shards.rehearse, plan, rank, present)


def gather_whole(
    comm: Comm,
    plan: ShardPlan,
    index: int,
    held: Mapping[int, Any],
    params: Sequence[torch.Tensor],
) -> Any:
    """Gather the state of one parameter on every rank; None if no rank has any.

    Called on every rank.

    Args:
        comm: the ranks.
        plan: the placement.
        index: the number of the parameter.
        held: this rank's states by parameter number.
        params: all parameters; the state is put where its parameter is.
    """
    moved = move_state(
        comm,
        plan.specs,
        held=[plan.intervals(rank) for rank in range(comm.world_size)],
        wanted=[{index: Interval(0, plan.specs[index].numel)}] * comm.world_size,
        states={number: state for number, state in held.items() if number == index},
        device=lambda number, leaf: device_of(params[number], leaf),
    )
    return moved.get(index)


def device_of(param: torch.Tensor, leaf: Leaf) -> torch.device:
    """Return the parameter's device, or the CPU for state that was kept there."""
    return torch.device("cpu") if leaf.on_cpu else param.device


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
