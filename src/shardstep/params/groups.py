"""The numbers of parameters in parameter groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any


def group_ranges(groups: Sequence[Mapping[str, Any]]) -> list[range]:
    """Return the numbers of each group's parameters. Parameters are numbered across all groups.

    Example:
        >>> group_ranges([{"params": ["weight", "bias"]}, {"params": []}, {"params": ["head"]}])
        [range(0, 2), range(2, 2), range(2, 3)]
    """
    stops = accumulate((len(group["params"]) for group in groups), initial=0)
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
