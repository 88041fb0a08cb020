"""What checkpoints see of an optimizer: its plan, its parameters and this rank's state.

`ZeroRedundancyOptimizer.shards` returns one. Checkpoints use nothing else of an optimizer but its
public attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from shardstep.comm import Comm
from shardstep.plan import ShardPlan
from shardstep.precision import MixedPrecision

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer


class ShardView:
    """One rank's share of a sharded optimizer.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def comm(self) -> Comm:
        """The ranks that share the state."""
        return self._optimizer._comm

    @property
    def plan(self) -> ShardPlan:
        """The placement in force."""
        return self._optimizer.plan

    @property
    def params(self) -> list[torch.Tensor]:
        """All parameters, in the plan's order."""
        return self._optimizer._params

    @property
    def optim(self) -> Optimizer:
        """The local optimizer."""
        return self._optimizer.optim

    @property
    def precision(self) -> MixedPrecision:
        """The precision policy in force."""
        return self._optimizer._precision

    @property
    def names_are_of_module(self) -> bool:
        """Whether parameter names come from `module=`, and so carry no DDP prefix."""
        return self._optimizer._module is not None

    @property
    def widened(self) -> Collection[int]:
        """The parameters that are stepped on in a wider dtype, or were."""
        return self._optimizer._widened

    @property
    def stepped(self) -> bool:
        """Whether a step was ever taken, here or before the loaded state was saved."""
        return self._optimizer._stepped

    @stepped.setter
    def stepped(self, value: bool) -> None:
        self._optimizer._stepped = value

    @property
    def rounding_step(self) -> int:
        """The number of the next stochastic rounding."""
        return self._optimizer._rounding.step

    @rounding_step.setter
    def rounding_step(self, value: int) -> None:
        self._optimizer._rounding.step = value

    def wait_for_params(self) -> None:
        """Wait until every gather in flight has arrived."""
        self._optimizer._gather.land()

    def states(self) -> dict[int, Any]:
        """Return this rank's state by parameter number, in use and not copied."""
        return self._optimizer._local.states()

    def global_state(self) -> dict[Any, Any]:
        """Return the state that belongs to no parameter."""
        return self._optimizer._local.global_state()

    def rehearse(self, params: Collection[int]) -> tuple[dict[int, Any], dict[Any, Any]]:
        """Return the state that a first step would make for `params`, and the global state."""
        return self._optimizer._local.rehearse(params)

    def sync_options(self) -> None:
        """Copy options from the exposed groups to the local optimizer, and back."""
        self._optimizer._local.push_options()
        self._optimizer._local.publish_options()

    def publish_options(self) -> None:
        """Copy options from the local optimizer to the exposed groups."""
        self._optimizer._local.publish_options()

    def masters(self) -> dict[int, torch.Tensor]:
        """Return this rank's masters by parameter number, in use and not copied."""
        return self._optimizer._masters()

    def set_masters(self, masters: Mapping[int, torch.Tensor]) -> None:
        """Copy these into the masters; make the others from the parameters."""
        self._optimizer._set_masters(masters)

    def give_masters(self, params: Iterable[int]) -> None:
        """Create masters for those of `params` that may have one and are about to get state."""
        self._optimizer._widen(params)

    def mark_begun(self, params: Iterable[int]) -> None:
        """Record that `params` have state, so that none of them counts as new."""
        self._optimizer._begun |= set(params)

    def run_state_dict_hooks(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return `make()`, passed through the user's state dict hooks."""
        return self._optimizer._run_state_dict_hooks(make)

    def run_load_hooks(
        self, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
    ) -> None:
        """Call `load` with `state_dict`, between the user's load hooks."""
        self._optimizer._run_load_hooks(state_dict, load)
