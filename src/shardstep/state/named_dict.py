"""State dicts that know parameters by name, as FSDP2 and DDP write them, to and from numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardstep.params.names import shorten_list, strip_wrapper_prefixes

Groups = Sequence[Mapping[str, Any]]


def numbered(
    state_dict: Mapping[str, Any], groups: Groups, names: Sequence[str]
) -> Mapping[str, Any]:
    """The same dict with numbers, in the order of this optimizer's parameters and groups.

    One that has numbers is returned as it is, unless it has names beside them that say that it is
    about the same parameters in another order.

    Args:
        state_dict: an optimizer's full state dict. Names in place of numbers may be nested or flat,
            as `get_optimizer_state_dict` gives them.
        groups: the parameter groups of this optimizer.
        names: its parameters' names, group after group.

    Raises:
        ValueError: if it is about other parameters, or has only a part of them.
    """
    if "param_groups" in state_dict:
        saved_groups = state_dict["param_groups"]
        if not any(isinstance(name, str) for group in saved_groups for name in group["params"]):
            beside = [name for group in saved_groups for name in group.get("param_names", ())]
            theirs, own = strip_wrapper_prefixes(beside), strip_wrapper_prefixes(names)
            if theirs == own or sorted(theirs) != sorted(own):
                return state_dict
            state_dict = by_name(state_dict, beside)
    ours = _names_in_groups(groups, names)
    if "param_groups" not in state_dict:
        state_dict = _nested(state_dict, ours, groups)
    saved_groups = state_dict["param_groups"]
    saved = [name for group in saved_groups for name in group["params"]]
    index_of = dict(zip(saved, _indices(saved, names), strict=True))
    left = [(group, {index_of[name] for name in group["params"]}) for group in saved_groups]
    packed = []
    start = 0
    for number, group in enumerate(ours):
        indices = list(range(start, start + len(group)))
        start += len(group)
        match = next((each for each in left if each[1] == set(indices)), None)
        if match is None:
            raise ValueError(
                f"the loaded state dict has no parameter group of just the parameters of group "
                f"{number} here ({shorten_list(group)}); construct the optimizer with the same "
                "groups as the saved one"
            )
        left.remove(match)
        options = {k: v for k, v in match[0].items() if k not in ("params", "param_names")}
        packed.append({**options, "params": indices})
    state: dict[Any, Any] = {}
    for name, value in state_dict["state"].items():
        if name in index_of:
            _refuse_parts(value, name)
            if not _nothing(value):
                state[index_of[name]] = value
        else:
            state[name] = value
    renumbered = {**state_dict, "state": state, "param_groups": packed}
    if "masters" in state_dict:
        renumbered["masters"] = {
            index_of.get(name, name): master for name, master in state_dict["masters"].items()
        }
    return renumbered


def by_name(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A consolidated dict with names in place of numbers, as `get_optimizer_state_dict` gives it.

    Args:
        state_dict: what `state_dict()` returned after `consolidate_state_dict()`.
        names: the parameters' names, in the optimizer's order.

    Raises:
        ValueError: if there are not as many names as parameters, or one is there twice.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> opt = torch.optim.SGD(model.parameters(), momentum=0.9)
        >>> named = by_name(opt.state_dict(), [name for name, _ in model.named_parameters()])
        >>> named["param_groups"][0]["params"]
        ['weight', 'bias']
    """
    groups = state_dict["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if len(numbers) != len(names) or len(set(names)) != len(names):
        raise ValueError(
            f"{len(numbers)} parameters need as many names, each its own, but {len(names)} names "
            f"were given, {len(set(names))} of them different"
        )
    name_of = dict(zip(numbers, names, strict=True))
    masters = state_dict.get("masters", {})
    return {
        **state_dict,
        **({"masters": {name_of[key]: value for key, value in masters.items()}} if masters else {}),
        "state": {name_of.get(key, key): value for key, value in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [name_of[number] for number in group["params"]]} for group in groups
        ],
    }


def _names_in_groups(groups: Groups, names: Sequence[str]) -> list[list[str]]:
    ours = []
    start = 0
    for group in groups:
        ours.append(list(names[start : start + len(group["params"])]))
        start += len(group["params"])
    return ours


def _indices(saved: Sequence[str], names: Sequence[str]) -> list[int]:
    """Which of the parameters `names` each saved name means.

    Raises:
        ValueError: if the two are not about the same parameters.
    """
    theirs, ours = strip_wrapper_prefixes(saved), strip_wrapper_prefixes(names)
    if all(name == f"param {number}" for number, name in enumerate(ours)) and theirs != ours:
        raise ValueError(
            f"the loaded state dict knows its parameters by name ({shorten_list(saved)}), but this "
            "optimizer was given parameters without names; construct it from "
            "model.named_parameters() or with module=model"
        )
    index_of = {name: index for index, name in enumerate(ours)}
    unknown = [name for name, own in zip(saved, theirs, strict=True) if own not in index_of]
    said = set(theirs)
    missing = [name for name, own in zip(names, ours, strict=True) if own not in said]
    if unknown or missing:
        raise ValueError(
            "the loaded state dict is about other parameters than this optimizer: "
            + "; ".join(
                f"{what} {len(which)} ({shorten_list(which)})"
                for what, which in (("it lacks", missing), ("unknown here are", unknown))
                if which
            )
        )
    if len(said) != len(theirs) or len(index_of) != len(ours):
        raise ValueError("the loaded state dict, or this optimizer, has a parameter's name twice")
    return [index_of[name] for name in theirs]


def _nested(
    flat: Mapping[str, Any], ours: Sequence[Sequence[str]], groups: Groups
) -> dict[str, Any]:
    """The nested form of a dict that was flattened to `state.NAME.KEY`, `param_groups.NAME.KEY`."""
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
    index_of = dict(
        zip(_indices(saved, [name for group in ours for name in group]), saved, strict=True)
    )
    packed: list[dict[str, Any]] = []
    start = 0
    for group, own in zip(ours, groups, strict=True):
        members = [index_of[index] for index in range(start, start + len(group))]
        start += len(group)
        if not members:
            packed.append({**own, "params": []})
            continue
        for name in members:
            if not _alike(options[name], options[members[0]]):
                raise ValueError(
                    f"parameters {members[0]!r} and {name!r} are in one group here, but were saved "
                    "with different options; construct the optimizer with the same groups"
                )
        packed.append({**options[members[0]], "params": members})
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
    parts = key.split(".")
    for stop in range(len(parts) - 1, 0, -1):
        if (name := ".".join(parts[:stop])) in names:
            return name, parts[stop:]
    raise ValueError(
        f"the loaded state dict has state {key!r} of a parameter in none of its groups"
    )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _refuse_parts(value: Any, name: str) -> None:
    """A dict of shards cannot be loaded from: other ranks have the rest of each tensor."""
    if isinstance(value, torch.Tensor) and hasattr(value, "full_tensor"):
        raise ValueError(
            f"the state of parameter {name!r} is a {type(value).__name__}, of which each rank has "
            "a part; get it with StateDictOptions(full_state_dict=True), or save and load it with "
            "torch.distributed.checkpoint"
        )
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, (Mapping, list, tuple)):
        for item in inner:
            _refuse_parts(item, name)


def _nothing(value: Any) -> bool:
    """Whether there is no value in it at all: a state that was saved before it was made."""
    if isinstance(value, Mapping):
        return all(map(_nothing, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_nothing, value))
    return value is None
