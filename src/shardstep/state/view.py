"""The one view that checkpoints have of an optimizer: `ZeroRedundancyOptimizer.shards`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from shardstep.comm import Comm
from shardstep.gradients.lockstep import Lockstep
from shardstep.local.local_optimizer import LocalOptimizer
from shardstep.plan import Holding, ShardPlan
from shardstep.precision import MixedPrecision

if TYPE_CHECKING:
    from shardstep.modes.planner import Planner
    from shardstep.pipeline import Pipeline


class ShardView:
    """One rank's share of a sharded optimizer: plan, parameters, state and masters."""

    comm: Comm
    planner: Planner
    pipeline: Pipeline
    lockstep: Lockstep
    """Compares the ranks' positions and options."""
    begun: set[int]
    """The parameters that ever trained or were given state."""

    @property
    def names_are_of_module(self) -> bool:
        """True if parameter names come from the module, without prefixes of DDP."""
        raise NotImplementedError

    @property
    def plan(self) -> ShardPlan:
        """The placement in force."""
        return self.pipeline.params.plan

    @property
    def held(self) -> Holding:
        """The elements that this rank owns, by parameter."""
        return self.plan.holdings[self.comm.group_rank]

    @property
    def params(self) -> Sequence[torch.Tensor]:
        """All parameters, in the plan's order."""
        return self.pipeline.params.params

    @property
    def local(self) -> LocalOptimizer:
        """The optimizer on this rank's pieces, with its state."""
        return self.pipeline.local

    @property
    def optim(self) -> Optimizer:
        """The instance of the user's class in `local`."""
        return self.pipeline.local.optim

    @property
    def precision(self) -> MixedPrecision:
        """The precision policy."""
        return self.planner.layouts.precision

    @property
    def widened(self) -> set[int]:
        """The parameters that are stepped on in a wider dtype, or were before they froze."""
        return self.planner.widened

    @property
    def rounding_step(self) -> int:
        """The number of the next stochastic rounding."""
        return self.planner.rounding.step

    @rounding_step.setter
    def rounding_step(self, value: int) -> None:
        self.planner.rounding.step = value

    def wait_for_params(self) -> None:
        """Wait until every gather in flight has arrived."""
        self.pipeline.gather.wait()

    def check_in_step(self) -> None:
        """Raise if the last step was not the same on all ranks. Called on every rank.

        An accelerator leaves that to the next step. State that is saved must not be wrong.
        """
        self.lockstep.compare_rest(self.comm)

    def sync_options(self) -> None:
        """Copy options from the exposed groups to the local optimizer, and back."""
        self.local.push_options()
        self.local.publish_options()

    def masters(self) -> dict[int, torch.Tensor]:
        """Return this rank's masters by parameter number, in use and not copied."""
        self.wait_for_params()
        return self.pipeline.params.shard.wide.values()

    def set_masters(self, masters: Mapping[int, torch.Tensor]) -> None:
        """Copy these into the masters; make the others from the parameters."""
        self.wait_for_params()
        self.pipeline.params.shard.wide.set_values(None)
        self.pipeline.params.shard.wide.set_values(masters)

    def give_masters(self, params: Iterable[int]) -> None:
        """Create masters for those of `params` that may have one and are about to get state."""
        raise NotImplementedError

    def index_of(self, parameter: torch.Tensor | str) -> int:
        """Return the number of a parameter, given itself or by name, or raise a ValueError."""
        for index, (param, spec) in enumerate(zip(self.params, self.plan.specs, strict=True)):
            if param is parameter or spec.name == parameter:
                return index
        shown = repr(parameter) if isinstance(parameter, str) else "the given tensor"
        raise ValueError(
            f"rank {self.comm.group_rank}: {shown} is not a parameter of this optimizer, whose "
            f"first one is called {self.plan.specs[0].name!r}; names are those of module= or of "
            "the (name, parameter) pairs that it was given"
        )
