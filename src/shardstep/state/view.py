"""The one view that checkpoints have of an optimizer: `ZeroRedundancyOptimizer.shards`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from shardstep.comm import Comm
from shardstep.plan import ShardPlan
from shardstep.precision import MixedPrecision


class ShardView(Protocol):
    """One rank's share of a sharded optimizer.

    Attributes:
        comm: the ranks that share the state.
        names_are_of_module: whether names come from `module=`, and so carry no DDP prefix.
        widened: the parameters that are stepped on in a wider dtype, or were.
    """

    comm: Comm
    names_are_of_module: bool
    widened: set[int]

    @property
    def plan(self) -> ShardPlan:
        """The placement in force."""

    @property
    def params(self) -> Sequence[torch.Tensor]:
        """All parameters, in the plan's order."""

    @property
    def optim(self) -> Optimizer:
        """The local optimizer."""

    @property
    def precision(self) -> MixedPrecision:
        """The precision policy in force."""

    @property
    def stepped(self) -> bool:
        """Whether a step was ever taken, here or before the loaded state was saved."""

    @stepped.setter
    def stepped(self, value: bool) -> None: ...

    @property
    def rounding_step(self) -> int:
        """The number of the next stochastic rounding."""

    @rounding_step.setter
    def rounding_step(self, value: int) -> None: ...

    def wait_for_params(self) -> None:
        """Wait until every gather in flight has arrived."""

    def states(self) -> dict[int, Any]:
        """Return this rank's state by parameter number, in use and not copied."""

    def global_state(self) -> dict[Any, Any]:
        """Return the state that belongs to no parameter."""

    def rehearse(self, params: Iterable[int]) -> tuple[dict[int, Any], dict[Any, Any]]:
        """Return the state that a first step would make for `params`, and the global state."""

    def sync_options(self) -> None:
        """Copy options from the exposed groups to the local optimizer, and back."""

    def publish_options(self) -> None:
        """Copy options from the local optimizer to the exposed groups."""

    def masters(self) -> dict[int, torch.Tensor]:
        """Return this rank's masters by parameter number, in use and not copied."""

    def set_masters(self, masters: Mapping[int, torch.Tensor]) -> None:
        """Copy these into the masters; make the others from the parameters.

        A master that does not round to its parameter is replaced at the next step.
        """

    def give_masters(self, params: Iterable[int]) -> None:
        """Create masters for those of `params` that may have one and are about to get state."""

    def mark_begun(self, params: Iterable[int]) -> None:
        """Record that `params` have state, so that none of them counts as new."""
