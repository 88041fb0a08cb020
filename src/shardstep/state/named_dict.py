"""Convert state dicts between parameter names, as FSDP2 and DDP write them, and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_leaves_with_path

from shardstep.params.groups import group_ranges, rename_params
from shardstep.params.names import shorten_list, strip_wrapper_prefixes

Groups = Sequence[Mapping[str, Any]]


def numbered(
    state_dict: Mapping[str, Any], groups: Groups, names: Sequence[str]
) -> Mapping[str, Any]:
    """Return a full state dict with numbers, in the order of this optimizer's parameters.

    A dict with numbers is matched by position, unless its `param_names` are this optimizer's in
    another order. A dict with names may be nested or flat, as `get_optimizer_state_dict` gives it.
    `names` has the names of the parameters in `groups`, in order.
    """
    if "param_groups" in state_dict:
        saved_groups = state_dict["param_groups"]
        if not any(isinstance(name, str) for group in saved_groups for name in group["params"]):
            given = [name for group in saved_groups for name in group.get("param_names", ())]
            theirs, own = strip_wrapper_prefixes(given), strip_wrapper_prefixes(names)
            if theirs == own or sorted(theirs) != sorted(own):
                return _match_positions(state_dict, groups)
            state_dict = by_name(state_dict, given)
    else:
        state_dict = _nested(state_dict, names, groups)
    saved_groups = state_dict["param_groups"]
    saved = [name for group in saved_groups for name in group["params"]]
    renamed = rename_params(state_dict, dict(zip(saved, _indices(saved, names), strict=True)))
    left = list(renamed["param_groups"])
    packed = []
    for number, indices in enumerate(group_ranges(groups)):
        match = next((i for i, group in enumerate(left) if {*group["params"]} == {*indices}), None)
        if match is None:
            raise ValueError(
                f"the loaded state dict has no parameter group with exactly the parameters of "
                f"group {number} here ({shorten_list(names[i] for i in indices)}); construct the "
                "optimizer with the same groups as the saved one"
            )
        options = {k: v for k, v in left.pop(match).items() if k not in ("params", "param_names")}
        packed.append({**options, "params": list(indices)})
    state: dict[Any, Any] = {}
    for key, value in renamed["state"].items():
        of_param = key in range(len(names))
        for item in tree_leaves(value) if of_param else ():
            if isinstance(item, torch.Tensor) and hasattr(item, "full_tensor"):
                raise ValueError(
                    f"the state of parameter {names[key]!r} is a {type(item).__name__}, of which "
                    "each rank has a part; get it with StateDictOptions(full_state_dict=True), or "
                    "save and load it with torch.distributed.checkpoint"
                )
        # A parameter that was saved before any step may have None for each tensor.
        if not of_param or any(item is not None for item in tree_leaves(value)):
            state[key] = value
    return {**renamed, "state": state, "param_groups": packed}


def by_name(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a consolidated dict with names for numbers, as `get_optimizer_state_dict` does.

    Args:
        state_dict: the value of `state_dict()` after `consolidate_state_dict()`.
        names: the parameters' names, in the optimizer's order.

    Raises:
        ValueError: if there are not as many names as parameters, or a name occurs twice.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> opt = torch.optim.SGD(model.parameters(), momentum=0.9)
        >>> named = by_name(opt.state_dict(), [name for name, _ in model.named_parameters()])
        >>> named["param_groups"][0]["params"]
        ['weight', 'bias']
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    if len(numbers) != len(names) or len(set(names)) != len(names):
        raise ValueError(
            f"expected {len(numbers)} different names, one per parameter, but got {len(names)} "
            f"names, {len(set(names))} of them different"
        )
    return rename_params(state_dict, dict(zip(numbers, names, strict=True)))


def _match_positions(state_dict: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    """Return the dict with the parameter at the same position for each saved identifier."""
    saved = state_dict["param_groups"]
    ours, theirs = ([len(group["params"]) for group in each] for each in (groups, saved))
    if ours != theirs:
        raise ValueError(
            f"the loaded state dict has parameter groups of lengths {theirs}, but this optimizer "
            f"has groups of lengths {ours}; construct it with the same groups as the saved one"
        )
    identifiers = [identifier for group in saved for identifier in group["params"]]
    return rename_params(state_dict, {each: index for index, each in enumerate(identifiers)})


def _indices(saved: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the position in `names` of each saved name, or raise if the two sets differ."""
    theirs, ours = strip_wrapper_prefixes(saved), strip_wrapper_prefixes(names)
    if all(name == f"param {number}" for number, name in enumerate(ours)) and theirs != ours:
        raise ValueError(
            f"the loaded state dict knows its parameters by name ({shorten_list(saved)}), but this "
            "optimizer was given parameters without names; construct it from "
            "model.named_parameters() or with module=model"
        )
    index_of = {name: index for index, name in enumerate(ours)}
    unknown = [name for name, own in zip(saved, theirs, strict=True) if own not in index_of]
    known = set(theirs)
    missing = [name for name, own in zip(names, ours, strict=True) if own not in known]
    if unknown or missing:
        raise ValueError(
            "the loaded state dict has other parameters than this optimizer: "
            + "; ".join(
                f"{what} {len(which)} ({shorten_list(which)})"
                for what, which in (("it lacks", missing), ("this optimizer has no", unknown))
                if which
            )
        )
    if len(known) != len(theirs) or len(index_of) != len(ours):
        raise ValueError("the loaded state dict, or this optimizer, has a parameter's name twice")
    return [index_of[name] for name in theirs]


def _nested(flat: Mapping[str, Any], names: Sequence[str], groups: Groups) -> dict[str, Any]:
    """Return the nested form of a dict with keys `state.NAME.KEY` and `param_groups.NAME.KEY`."""
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith("param_groups."):
            name, _, option = key.removeprefix("param_groups.").rpartition(".")
            options.setdefault(name, {})[option] = value
    if not options:
        raise ValueError(
            "this is not the state dict of an optimizer: it has neither 'param_groups' nor "
            f"'param_groups.NAME.OPTION' among its keys ({shorten_list(flat)})"
        )
    saved = list(options)
    saved_at = dict(zip(_indices(saved, names), saved, strict=True))
    packed: list[dict[str, Any]] = []
    for indices, own in zip(group_ranges(groups), groups, strict=True):
        members = [saved_at[index] for index in indices]
        for name in members:
            if not _same_options(options[name], options[members[0]]):
                raise ValueError(
                    f"parameters {members[0]!r} and {name!r} are in one group here, but were saved "
                    "with different options; construct the optimizer with the same groups"
                )
        packed.append({**(options[members[0]] if members else own), "params": members})
    state: dict[str, Any] = {}
    for key, value in flat.items():
        if key.startswith("state."):
            name, path = _split(key.removeprefix("state."), options)
            inner = state.setdefault(name, {})
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = value
    return {"state": state, "param_groups": packed}


def _split(key: str, names: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Split `NAME.PATH` after the longest name that is known."""
    parts = key.split(".")
    for stop in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:stop])) in names:
            return name, parts[stop:]
    raise ValueError(
        f"the loaded state dict has state {key!r} of a parameter in none of its groups"
    )


def _same_options(one: Any, other: Any) -> bool:
    """Compare options; a list equals a tuple of the same items, and tensors compare by value."""
    ones, others = (dict(tree_leaves_with_path(each)) for each in (one, other))
    return ones.keys() == others.keys() and all(
        torch.equal(value, others[path])
        if isinstance(value, torch.Tensor) and isinstance(others[path], torch.Tensor)
        else bool(value == others[path])
        for path, value in ones.items()
    )
