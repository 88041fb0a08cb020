"""Masters in files: each lies with the state of its parameter, as the first entry of it.

So whatever moves, cuts or lists the state does the same to them. In dicts, and in the optimizer,
they are beside the state: an optimizer that finds more than its own keys there could take it for
state that it has made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from shardstep.checkpoint.format import Stored, Tree
from shardstep.state.tree import Node

K = TypeVar("K")

MASTER = "shardstep.master"


def attach_masters(states: Mapping[K, Any], masters: Mapping[K, torch.Tensor]) -> dict[K, Any]:
    """State by parameter, with the master of each that has one."""
    mastered = {key: {MASTER: master, **states.get(key, {})} for key, master in masters.items()}
    return {**states, **mastered}


def split_masters(states: Mapping[K, Any]) -> tuple[dict[K, Any], dict[K, torch.Tensor]]:
    """State by parameter, and masters by parameter. A parameter with nothing else has no state."""
    masters = {key: state[MASTER] for key, state in states.items() if MASTER in state}
    alone = {
        key: {name: value for name, value in state.items() if name != MASTER}
        for key, state in states.items()
    }
    return {key: state for key, state in alone.items() if state or key not in masters}, masters


def master_of(state: Tree | None) -> Stored | None:
    """Where the master of a parameter is stored, if it has one."""
    has_one = state is not None and state.node[1] and state.node[1][0][0] == MASTER
    return state.stored.get(0) if has_one and state is not None else None


def own_entries(node: Node) -> list[Node]:
    """The entries of a parameter's state that are its optimizer's own."""
    return [item for key, item in node[1] if key != MASTER]
