"""The plain `torch.optim` state dict: putting one together, and taking a share out of one."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardstep.layouts.known_classes import ELEMENT_WISE
from shardstep.local.multi_class import MultiClass, of_one_class
from shardstep.params.dtensor import local_part
from shardstep.params.storage import flat
from shardstep.plan import Interval, ParamSpec, ShardPlan
from shardstep.state.tree import own_copy

Groups = Sequence[Mapping[str, Any]]

OURS = ("state", "param_groups", "masters", "rounding_step")

SCALARS = ("mu_product", "eta", "mu")
"""What torch's own NAdam and ASGD keep, like `step`, in a dtype that is not the parameter's."""


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
) -> set[int]:
    """Load into `local`, which holds `group_rank`'s pieces, its share of a full state dict.

    Args:
        state_dict: the full state dict, of this optimizer unsharded.
        groups: the parameter groups of all parameters.
        plan: the placement.
        group_rank: whose share to take.
        local: the optimizer on that rank's pieces, in the groups of their parameters.

    Returns:
        Which parameters the dict has state for.

    Raises:
        ValueError: if the dict does not fit; found on every rank alike, before anything is changed.
    """
    saved_groups = state_dict["param_groups"]
    index_of = _match(saved_groups, groups)
    if not isinstance(local, MultiClass):
        saved_groups = of_one_class(saved_groups, type(local))
    held = plan.intervals(group_rank)
    mine: dict[int, Any] = {}
    loose: dict[Any, Any] = {}
    present = set()
    for identifier, value in state_dict["state"].items():
        index = index_of.get(identifier)
        if index is None:
            loose[identifier] = copy.deepcopy(value)
            continue
        spec = plan.specs[index]
        if spec.layout == "sliced" or type(local) in ELEMENT_WISE:
            _check(value, spec)
        if value:
            present.add(index)
        if index in held:
            mine[index] = take(value, held[index], spec)
    packed = [
        {**group, "params": [index_of[identifier] for identifier in group["params"]]}
        for group in saved_groups
    ]
    beside = {k: copy.deepcopy(value) for k, value in state_dict.items() if k not in OURS}
    wide = {index_of.get(identifier) for identifier in state_dict.get("masters", ())}
    if "rounding_step" in state_dict:
        wide.update(held)
    install(local, sorted(held), mine, loose, packed, plan.specs, beside, wide)
    return present


def install(
    local: Optimizer,
    held: Sequence[int],
    states: Mapping[int, Any],
    loose: Mapping[Any, Any],
    groups: Groups,
    specs: Sequence[ParamSpec],
    beside: Mapping[str, Any],
    wide: Container[int | None],
) -> None:
    """Give the optimizer on some pieces their state, and the options of their groups.

    Args:
        local: the optimizer.
        held: the numbers of the parameters whose pieces it has, in order.
        states: state by number of the parameter.
        loose: state that belongs to no parameter.
        groups: the groups of all parameters, with their numbers.
        specs: all parameters.
        beside: what the class has put beside state and groups, for the class to read.
        wide: the parameters whose state is that of a tensor of a wider dtype, as it will be here.
    """
    # torch numbers the pieces of the local optimizer in the order of its groups.
    numbers = {index: number for number, index in enumerate(held)}
    state = {**loose, **{numbers[index]: value for index, value in states.items()}}
    local_groups = []
    for group in groups:
        kept = [position for position, index in enumerate(group["params"]) if index in numbers]
        share = {**group, "params": [numbers[group["params"][position]] for position in kept]}
        if "param_names" in group:
            share["param_names"] = [group["param_names"][position] for position in kept]
        local_groups.append(share)
    local.load_state_dict({**beside, "state": state, "param_groups": local_groups})
    for part in local.parts if isinstance(local, MultiClass) else [local]:
        if _casts_blindly(part):
            dtypes = [None if index in wide else specs[index].dtype for index in held]
            _restore_dtypes(local, part, state, dtypes)
        elif _casts(part):
            _restore_scalars(local, part, state)


def described_in(state_dict: Mapping[str, Any], groups: Groups) -> list[int]:
    """The numbers of the parameters that a full state dict has a state or a master for.

    Raises:
        ValueError: if it does not fit; found on every rank alike.
    """
    index_of = _match(state_dict["param_groups"], groups)
    found = {key for key, value in state_dict["state"].items() if value}
    found.update(state_dict.get("masters", {}))
    return sorted(index_of[key] for key in found if key in index_of)


def masters_in(
    state_dict: Mapping[str, Any], groups: Groups, plan: ShardPlan, group_rank: int
) -> dict[int, torch.Tensor]:
    """What a full state dict has of the masters of `group_rank`'s pieces, by parameter.

    Raises:
        ValueError: if it does not fit; found on every rank alike.
    """
    index_of = _match(state_dict["param_groups"], groups)
    held = plan.intervals(group_rank)
    share: dict[int, torch.Tensor] = {}
    for identifier, master in state_dict.get("masters", {}).items():
        index = index_of.get(identifier)
        if index is None:
            raise ValueError(f"there is a master for {identifier!r}, which is in no group")
        spec = plan.specs[index]
        if master.shape != spec.shape:
            raise ValueError(
                f"the master of parameter {spec.name!r} has shape {tuple(master.shape)}, but the "
                f"parameter has shape {spec.shape}; this state dict belongs to another model"
            )
        if index in held:
            share[index] = take(master, held[index], spec)
    return share


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
    for key, item in value.items():
        tensor = local_part(item)
        if isinstance(tensor, torch.Tensor) and is_traceable_wrapper_subclass(tensor):
            raise ValueError(
                f"state {key!r} of parameter {spec.name!r} is a {type(tensor).__name__}, which the "
                "optimizer here cannot use; this state dict belongs to another optimizer class"
            )
        if isinstance(tensor, torch.Tensor) and tensor.shape != spec.shape and tensor.numel() != 1:
            raise ValueError(
                f"state {key!r} of parameter {spec.name!r} has shape {tuple(tensor.shape)}, but "
                f"the parameter has shape {spec.shape}; this state dict belongs to another model"
            )


def take(value: Any, held: Interval, spec: ParamSpec) -> Any:
    """What belongs to the elements `held` of a whole parameter's state, in memory of its own."""
    if isinstance(value, torch.Tensor):
        value = local_part(value)
        if held.numel == spec.numel or value.shape != spec.shape:
            return own_copy(value)
        return flat(value, spec.stride)[held.slice].clone()
    if isinstance(value, Mapping):
        return {key: take(item, held, spec) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(take(item, held, spec) for item in value)
    if isinstance(value, deque):
        return deque((take(item, held, spec) for item in value), value.maxlen)
    return value


def _casts(local: Optimizer) -> bool:
    """Whether loading casts all state but `step` to the parameter's dtype: the base class does."""
    return type(local).load_state_dict is Optimizer.load_state_dict


def _casts_blindly(local: Optimizer) -> bool:
    """Whether loading casts all state to the parameter's dtype without the class wanting it.

    The moments of torch's own classes have the parameter's dtype anyway, but others keep fp32 ones
    for 16-bit parameters, or quantised ones, which the cast would ruin.
    """
    return _casts(local) and not type(local).__module__.startswith("torch.optim")


def _restore_scalars(local: Optimizer, part: Optimizer, saved: Mapping[Any, Any]) -> None:
    """Give scalars that have a dtype of their own that dtype back, with all of their bits."""
    own = {param for group in part.param_groups for param in group["params"]}
    params = [param for group in local.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        if number in saved and param in own:
            state = local.state[param]
            for key in SCALARS:
                if isinstance(saved[number].get(key), torch.Tensor):
                    state[key] = saved[number][key].to(state[key].device)


def _restore_dtypes(
    local: Optimizer,
    part: Optimizer,
    saved: Mapping[Any, Any],
    dtypes: Sequence[torch.dtype | None],
) -> None:
    own = {param for group in part.param_groups for param in group["params"]}
    params = [param for group in local.param_groups for param in group["params"]]
    for number, (param, dtype) in enumerate(zip(params, dtypes, strict=True)):
        if number in saved and param in own:
            # What was in step with a 16-bit parameter is to be in step with its master now. With a
            # master, what has 16 bits has them because the class wants it so.
            cast = dtype if param.dtype != dtype else None
            local.state[param] = _recast(local.state[param], saved[number], cast)


def _recast(loaded: Any, saved: Any, cast: torch.dtype | None) -> Any:
    """`loaded`, where it is, with the values and dtypes of `saved`, but for what was `cast`."""
    if isinstance(saved, torch.Tensor):
        as_loaded = loaded.dtype == saved.dtype or saved.dtype == cast
        return loaded if as_loaded else saved.to(loaded.device)
    if isinstance(saved, Mapping):
        return {key: _recast(loaded[key], item, cast) for key, item in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(_recast(a, b, cast) for a, b in zip(loaded, saved, strict=True))
    if isinstance(saved, deque):
        pairs = zip(loaded, saved, strict=True)
        return deque((_recast(a, b, cast) for a, b in pairs), saved.maxlen)
    # The base class takes a string for an iterable of characters, and loads something else.
    return saved


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
