"""Detection of per-parameter state outside `optimizer.state`, which cannot be moved.

State under `optimizer.state` follows its parameter when the plan changes, after a freeze for
example. State in other attributes, or in an inner optimizer, would stay behind. A kept view of a
parameter would write to memory that the parameter has left. Both would change numbers silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves


def find_unmovable_state(optim: Optimizer) -> str | None:
    """Return where `optim` keeps per-parameter state outside `optim.state`, or None."""
    params = [param for group in optim.param_groups for param in group["params"]]
    ids = {id(param) for param in params}
    orders = [params, *(group["params"] for group in optim.param_groups)]
    shapes = [[param.shape for param in order] for order in orders if order]
    for name, value in _attributes(optim):
        if isinstance(value, Mapping):
            if any(id(key) in ids or (type(key) is int and key in ids) for key in value):
                return f"attribute {name!r}"
        elif isinstance(value, (list, tuple)) and all(isinstance(v, torch.Tensor) for v in value):
            other_tensors = all(id(item) not in ids for item in value)
            if other_tensors and [item.shape for item in value] in shapes:
                return f"attribute {name!r}"
    return find_kept_view(optim)


def find_kept_view(optim: Optimizer) -> str | None:
    """Return where `optim` keeps a view of a parameter's memory, or None."""
    params = [param for group in optim.param_groups for param in group["params"] if param.numel()]
    # Only the start is compared: in a bucket, other addresses belong to other parameters.
    starts = {param.data_ptr() for param in params}
    ids = {id(param) for param in params}
    for name, value in [("the state", optim.state), *_attributes(optim)]:
        for leaf in tree_leaves(dict(value) if isinstance(value, Mapping) else value):
            plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided
            if plain and id(leaf) not in ids and leaf.numel() and leaf.data_ptr() in starts:
                return f"a view of a parameter in {name if value is optim.state else repr(name)}"
    return None


def _attributes(optim: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the attributes of `optim` and of its inner optimizers."""
    known = (optim.state, optim.param_groups, optim.defaults)
    waiting: list[tuple[str, Any]] = list(vars(optim).items())
    seen = {id(optim)}
    while waiting:
        name, value = waiting.pop()
        if any(value is each for each in known) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Optimizer):
            waiting += [(f"{name}.{inner}", each) for inner, each in vars(value).items()]
            continue
        if isinstance(value, Sequence) and not isinstance(value, str):
            inside = [each for each in value if isinstance(each, Optimizer)]
            waiting += [(f"{name}[{number}]", each) for number, each in enumerate(inside)]
        yield name, value
