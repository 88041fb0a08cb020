"""This rank's share of the optimizer, as checkpoints see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from shardstep.params.stochastic_rounding import StochasticRounding
from shardstep.pipeline import Pipeline
from shardstep.plan import ShardPlan
from shardstep.precision import MixedPrecision
from shardstep.state.view import ShardView

if TYPE_CHECKING:
    from shardstep.modes.base import Settings


class Shards(ShardView):
    """The part of a mode that checkpoints see: plan, parameters, state and masters.

    Attributes:
        pipeline: the step under the plan in force.
        rounding: the sequence of stochastic roundings.
        begun: the parameters that ever trained or were given state.
    """

    pipeline: Pipeline
    rounding: StochasticRounding
    settings: Settings
    begun: set[int]

    @property
    @override
    def plan(self) -> ShardPlan:
        return self.pipeline.params.plan

    @property
    @override
    def params(self) -> Sequence[torch.Tensor]:
        return self.pipeline.params.params

    @property
    @override
    def optim(self) -> Optimizer:
        return self.pipeline.local.optim

    @property
    @override
    def precision(self) -> MixedPrecision:
        return self.settings.precision

    @property
    @override
    def stepped(self) -> bool:
        return self.pipeline.local.stepped

    @stepped.setter
    def stepped(self, value: bool) -> None:
        self.pipeline.local.stepped = value

    @property
    @override
    def rounding_step(self) -> int:
        return self.rounding.step

    @rounding_step.setter
    def rounding_step(self, value: int) -> None:
        self.rounding.step = value

    @override
    def wait_for_params(self) -> None:
        self.pipeline.gather.wait()

    @override
    def states(self) -> dict[int, Any]:
        return self.pipeline.local.states()

    @override
    def global_state(self) -> dict[Any, Any]:
        return self.pipeline.local.global_state()

    @override
    def rehearse(self, params: Iterable[int]) -> tuple[dict[int, Any], dict[Any, Any]]:
        return self.pipeline.local.rehearse(set(params))

    @override
    def sync_options(self) -> None:
        self.pipeline.local.push_options()
        self.pipeline.local.publish_options()

    @override
    def publish_options(self) -> None:
        self.pipeline.local.publish_options()

    @override
    def masters(self) -> dict[int, torch.Tensor]:
        self.wait_for_params()
        return self.pipeline.params.shard.masters()

    @override
    def set_masters(self, masters: Mapping[int, torch.Tensor]) -> None:
        self.wait_for_params()
        self.pipeline.params.shard.set_masters(None)
        self.pipeline.params.shard.set_masters(masters)

    @override
    def mark_begun(self, params: Iterable[int]) -> None:
        self.begun |= set(params)
