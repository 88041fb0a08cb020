"""The ordinary optimizer on this rank's pieces, kept in step with the groups the user sees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.mixture import CLASS_KEY
from shardstep.shard import Shard

_PER_PARAMETER = {"params", "param_names"}

Groups = list[dict[str, Any]]


class LocalOptimizer:
    """An unmodified optimizer class on the pieces of one rank.

    Args:
        exposed: the groups that the user sees, with all parameters; kept and written to.
        shard: this rank's pieces.
        make: constructs the optimizer from groups.

    Attributes:
        optim: the optimizer.
    """

    def __init__(self, exposed: Groups, shard: Shard, make: Callable[[Groups], Optimizer]) -> None:
        self._exposed = exposed
        self._shard = shard
        self.optim = make(self._groups(shard))
        if not isinstance(self.optim, Optimizer):
            raise ValueError(
                "optimizer_class has to make a torch.optim.Optimizer, but it made a "
                f"{type(self.optim).__name__}"
            )

    def _groups(self, shard: Shard) -> Groups:
        """The pieces of `shard` in the groups of their parameters, with those groups' options.

        A group of which this rank owns nothing stays, empty: groups are matched by position.
        """
        local = []
        start = 0
        for group in self._exposed:
            held = shard.in_group(range(start, start + len(group["params"])))
            mine = {**group, "params": [tensor for _, tensor in held]}
            if "param_names" in group:
                mine["param_names"] = [group["param_names"][index - start] for index, _ in held]
            local.append(mine)
            start += len(group["params"])
        return local

    def push_options(self) -> None:
        """Let what schedulers and users wrote to the exposed groups reach the optimizer."""
        for exposed, local in zip(self._exposed, self.optim.param_groups, strict=True):
            for key, value in exposed.items():
                if key not in _PER_PARAMETER and key != CLASS_KEY:
                    local[key] = value

    def publish_options(self) -> None:
        """Let what the optimizer keeps in its groups be seen, in the order it keeps it."""
        for exposed, local in zip(self._exposed, self.optim.param_groups, strict=True):
            own = {key: exposed[key] for key in _PER_PARAMETER & exposed.keys()}
            merged = {key: own.get(key, value) for key, value in local.items()}
            exposed.clear()
            exposed.update(merged)

    def states(self) -> dict[int, Any]:
        """The state of each piece that has some, by number of the parameter."""
        return {
            piece.param: self.optim.state[tensor]
            for piece, tensor in self._shard
            if tensor in self.optim.state
        }

    def loose_state(self) -> dict[Any, Any]:
        """State that belongs to no parameter."""
        return {k: v for k, v in self.optim.state.items() if not isinstance(k, torch.Tensor)}

    def adopt(self, shard: Shard, states: Mapping[int, Any]) -> None:
        """Step on other pieces from now on, with the state given for them.

        The exposed groups may have grown; the optimizer's grow along.
        """
        self._shard = shard
        self.optim.state = defaultdict(dict, self.loose_state())
        for piece, tensor in shard:
            if piece.param in states:
                self.optim.state[tensor] = states[piece.param]
        for number, group in enumerate(self._groups(shard)):
            if number < len(self.optim.param_groups):
                for key in _PER_PARAMETER & group.keys():
                    self.optim.param_groups[number][key] = group[key]
            else:
                self.optim.add_param_group(group)
        self.push_options()
        self.publish_options()


class LocalState(Mapping[torch.Tensor, Any]):
    """The state that this rank keeps, under the parameters that the user knows.

    Args:
        params: all parameters, in order.
        local: the optimizer on this rank's pieces.
    """

    def __init__(self, params: Sequence[torch.Tensor], local: LocalOptimizer) -> None:
        self._optim = local.optim
        self._held = {params[index]: state for index, state in local.states().items()}

    def __getitem__(self, param: torch.Tensor) -> Any:
        # As for any optimizer, a parameter without state has an empty one; it cannot be written to.
        return self._held.get(param, MappingProxyType({}))

    def __contains__(self, param: object) -> bool:
        return param in self._held

    def get(self, param: torch.Tensor, default: Any = None) -> Any:
        """The state of `param`, or `default` if this rank has none of it."""
        return self._held.get(param, default)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def clear(self) -> None:
        """Forget this rank's part of the state."""
        self._held.clear()
        self._optim.state.clear()
