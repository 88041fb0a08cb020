"""Finds what an optimizer keeps of its parameters where nobody can give it to another rank.

State under `optimizer.state` goes with its parameter when ranks divide their work anew, after a
parameter was frozen, say. What a class keeps in attributes of its own, under parameters or in their
order, or in an optimizer inside of it, would stay behind, and so would a view of a parameter's
memory go on being written to where the parameter no longer is. Numbers would change, silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves


def find_unmovable_state(optim: Optimizer) -> str | None:
    """Where `optim` keeps something of its parameters beside its state, in words; None if nowhere.

    Args:
        optim: the optimizer; of the objects in its attributes, containers and optimizers are
            looked into.
    """
    params = [param for group in optim.param_groups for param in group["params"]]
    names = {id(param) for param in params}
    orders = [params, *(group["params"] for group in optim.param_groups)]
    shapes = [[param.shape for param in order] for order in orders if order]
    for name, value in _attributes(optim):
        if isinstance(value, Mapping):
            if any(id(key) in names or (type(key) is int and key in names) for key in value):
                return f"attribute {name!r}"
        elif isinstance(value, (list, tuple)) and all(isinstance(v, torch.Tensor) for v in value):
            own = all(id(item) not in names for item in value)
            if own and [item.shape for item in value] in shapes:
                return f"attribute {name!r}"
    return find_kept_view(optim)


def find_kept_view(optim: Optimizer) -> str | None:
    """Where `optim` keeps a view of a parameter's memory, in words; None if nowhere."""
    params = [param for group in optim.param_groups for param in group["params"] if param.numel()]
    # By where it starts: in a bucket, what starts elsewhere is another parameter.
    memory = {param.data_ptr() for param in params}
    names = {id(param) for param in params}
    kept = [("the state", optim.state), *_attributes(optim)]
    for name, value in kept:
        for leaf in tree_leaves(dict(value) if isinstance(value, Mapping) else value):
            plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided
            if plain and id(leaf) not in names and leaf.numel() and leaf.data_ptr() in memory:
                return f"a view of a parameter in {name if value is optim.state else repr(name)}"
    return None


def _attributes(optim: Optimizer) -> Iterator[tuple[str, Any]]:
    """What an optimizer has in attributes, those of optimizers inside of it included."""
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
        elif isinstance(value, Sequence) and not isinstance(value, str):
            inside = [each for each in value if isinstance(each, Optimizer)]
            waiting += [(f"{name}[{number}]", each) for number, each in enumerate(inside)]
            yield name, value
        else:
            yield name, value
