"""Parameter groups: the numbers of their parameters, and edits by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch


def group_ranges(groups: Sequence[Mapping[str, Any]]) -> list[range]:
    """Return the numbers of each group's parameters. Parameters are numbered across all groups.

    Example:
        >>> group_ranges([{"params": ["weight", "bias"]}, {"params": []}, {"params": ["head"]}])
        [range(0, 2), range(2, 2), range(2, 3)]
    """
    stops = accumulate((len(group.get("params", ())) for group in groups), initial=0)
    return [range(start, stop) for start, stop in pairwise(stops)]


def rename_params(state_dict: Mapping[str, Any], new_ids: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a state dict with other identifiers for its parameters."""
    by_param = {key: state_dict[key] for key in ("state", "masters") if key in state_dict}
    return {
        **state_dict,
        **{key: {new_ids.get(k, k): v for k, v in each.items()} for key, each in by_param.items()},
        "param_groups": [
            {**group, "params": [new_ids[each] for each in group["params"]]}
            for group in state_dict["param_groups"]
        ],
    }


def describe_edit(
    lists: Sequence[Sequence[torch.Tensor]],
    lengths: Sequence[int],
    params: Sequence[torch.Tensor],
    names: Sequence[str],
) -> str:
    """Return the error for groups that have `lists` of parameters now.

    The plan was made for `params`, with these `names`, in groups of these `lengths`.
    """
    known, there = {id(param) for param in params}, {id(param) for held in lists for param in held}
    gone = [name for param, name in zip(params, names, strict=True) if id(param) not in there]
    if gone:
        edit = f"parameter {gone[0]!r} is no longer in it"
        fix = "freeze a parameter with requires_grad_(False) to leave it out of the step"
    elif there - known:
        number = next(n for n, held in enumerate(lists) if any(id(p) not in known for p in held))
        edit = f"group {number} has a parameter that is not the optimizer's"
        fix = "call add_param_group() on every rank"
    else:
        edit = f"it has groups of {[*map(len, lists)]} parameters, in place of {lengths}"
        if [*map(len, lists)] == lengths:
            edit = "its parameters are in another order"
        fix = "leave parameters where they are, or construct another optimizer"
    return f"param_groups was edited by hand: {edit}; {fix}"
