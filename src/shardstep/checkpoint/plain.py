"""The plain `torch.optim` state dict: putting one together, and taking a share out of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.buffers import flat
from shardstep.layouts import ELEMENT_WISE
from shardstep.mixture import Mixture
from shardstep.plan import Interval, ParamSpec, ShardPlan

Groups = Sequence[Mapping[str, Any]]


def pack_groups(groups: Groups) -> list[dict[str, Any]]:
    """Parameter groups with numbers in place of parameters, and tensors of their own."""
    packed = []
    start = 0
    for group in groups:
        options = {key: _own(value) for key, value in group.items() if key != "params"}
        stop = start + len(group["params"])
        packed.append({**options, "params": list(range(start, stop))})
        start = stop
    return packed


def load_share(
    state_dict: Mapping[str, Any],
    groups: Groups,
    plan: ShardPlan,
    group_rank: int,
    local: Optimizer,
) -> None:
    """Load into `local`, which holds `group_rank`'s pieces, its share of a full state dict.

    Args:
        state_dict: the full state dict, of this optimizer unsharded.
        groups: the parameter groups of all parameters.
        plan: the placement.
        group_rank: whose share to take.
        local: the optimizer on that rank's pieces, in the groups of their parameters.

    Raises:
        ValueError: if the dict does not fit; found on every rank alike, before anything is changed.
    """
    saved_groups = state_dict["param_groups"]
    index_of = _match(saved_groups, groups)
    held = plan.intervals(group_rank)
    # torch numbers the pieces of the local optimizer in the order of its groups.
    numbers = {index: number for number, index in enumerate(sorted(held))}
    state: dict[Any, Any] = {}
    for identifier, value in state_dict["state"].items():
        index = index_of.get(identifier)
        if index is None:
            state[identifier] = value
            continue
        spec = plan.specs[index]
        if spec.layout == "sliced" or type(local) in ELEMENT_WISE:
            _check(value, spec)
        if index in held:
            state[numbers[index]] = _take(value, held[index], spec)
    local_groups = []
    for group in saved_groups:
        mine = [index_of[identifier] for identifier in group["params"]]
        kept = [position for position, index in enumerate(mine) if index in held]
        share = {**group, "params": [numbers[mine[position]] for position in kept]}
        if "param_names" in group:
            share["param_names"] = [group["param_names"][position] for position in kept]
        local_groups.append(share)
    # What a class has put beside them is for the class to read.
    local.load_state_dict({**state_dict, "state": state, "param_groups": local_groups})
    for part in local.parts if isinstance(local, Mixture) else [local]:
        if _casts_blindly(part):
            _restore_dtypes(local, part, state)


def _match(saved: Groups, groups: Groups) -> dict[Any, int]:
    """Which parameter each identifier in the saved groups stands for: matched by position."""
    ours, theirs = ([len(group["params"]) for group in each] for each in (groups, saved))
    if ours != theirs:
        raise ValueError(
            f"the loaded state dict has parameter groups of lengths {theirs}, but this optimizer "
            f"has groups of lengths {ours}; construct it with the same groups as the saved one"
        )
    identifiers = [identifier for group in saved for identifier in group["params"]]
    return {identifier: index for index, identifier in enumerate(identifiers)}


def _check(value: Any, spec: ParamSpec) -> None:
    """An element-wise optimizer keeps values per element and numbers, nothing else."""
    for key, tensor in value.items():
        if isinstance(tensor, torch.Tensor) and tensor.shape != spec.shape and tensor.numel() != 1:
            raise ValueError(
                f"state {key!r} of parameter {spec.name!r} has shape {tuple(tensor.shape)}, but "
                f"the parameter has shape {spec.shape}; this state dict belongs to another model"
            )


def _take(value: Any, held: Interval, spec: ParamSpec) -> Any:
    """What belongs to the elements `held`, in memory of its own."""
    if isinstance(value, torch.Tensor):
        if held.numel == spec.numel or value.shape != spec.shape:
            return value.detach().clone()
        return flat(value, spec.stride)[held.slice].clone()
    if isinstance(value, Mapping):
        return {key: _take(item, held, spec) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take(item, held, spec) for item in value)
    if isinstance(value, deque):
        return deque((_take(item, held, spec) for item in value), value.maxlen)
    return value


def _casts_blindly(local: Optimizer) -> bool:
    """Whether loading casts all state to the parameter's dtype without the class wanting it.

    The base class does so. The state of torch's own classes has the parameter's dtype anyway, but
    others keep fp32 moments for 16-bit parameters, or quantised ones, which the cast would ruin.
    """
    ours = type(local).load_state_dict is Optimizer.load_state_dict
    return ours and not type(local).__module__.startswith("torch.optim")


def _restore_dtypes(local: Optimizer, part: Optimizer, saved: Mapping[Any, Any]) -> None:
    own = {param for group in part.param_groups for param in group["params"]}
    params = [param for group in local.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        if number in saved and param in own:
            local.state[param] = _recast(local.state[param], saved[number])


def _recast(loaded: Any, saved: Any) -> Any:
    """`loaded`, where it is, with the values and dtypes of `saved`."""
    if isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, Mapping):
        return {key: _recast(loaded[key], item) for key, item in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(_recast(a, b) for a, b in zip(loaded, saved, strict=True))
    if isinstance(saved, deque):
        pairs = zip(loaded, saved, strict=True)
        return deque((_recast(a, b) for a, b in pairs), saved.maxlen)
    # The base class takes a string for an iterable of characters, and loads something else.
    return saved


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
