"""Plans the placement of the parameters as they are now, and cuts them into pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]
from torch.optim import Optimizer

from shardstep.comm import Comm
from shardstep.layouts.choose import Layouts
from shardstep.local.local_optimizer import LocalOptimizer
from shardstep.local.multi_class import CLASS_KEY, MultiClass, optimizer_name
from shardstep.local.unmovable_state import find_kept_view
from shardstep.params.dtensor import describe_part, refuse_dtensors
from shardstep.params.inputs import describe, describe_options, parameters
from shardstep.params.sharded_params import ShardedParams
from shardstep.params.stochastic_rounding import StochasticRounding
from shardstep.plan import ParamSpec, ShardPlan, default_bucket_bytes

logger = logging.getLogger(__name__)

Planned = tuple[ShardPlan, list[str]]
"""A plan, and the lines by which ranks compare it."""


@dataclass(eq=False)
class Planner:
    """Makes plans, and the pieces and the local optimizer of a plan.

    Attributes:
        layouts: finds the layout of each group.
        bucket_bytes: the size of a bucket; None for the default of the backend.
        groups: the parameter groups that the user sees.
        comm: the ranks.
        names: returns names by identity, for parameters that were given none.
        bucket_views: whether parameters live in the buckets.
        separate: whether entire parameters get a step tensor of their own.
        widened: the parameters that are stepped on in a wider dtype, or were before they froze.
        rounding: the sequence of stochastic roundings.
    """

    layouts: Layouts
    bucket_bytes: int | None
    groups: list[dict[str, Any]]
    comm: Comm
    names: Callable[[], Mapping[int, str]]
    bucket_views: bool
    separate: bool
    widened: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rounding = StochasticRounding(self.layouts.precision.seed)

    def plan(self) -> Planned:
        """Plan for the parameters as they are now."""
        specs = self.specs()
        bucket_bytes = self.bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = default_bucket_bytes(specs, self.comm.min_bucket_bytes)
        plan = ShardPlan.make(specs, self.comm.world_size, bucket_bytes=bucket_bytes)
        head = [f"layout={self.layouts.asked!r}", f"bucket_bytes={self.bucket_bytes}"]
        for param, spec in zip(parameters(self.groups), specs, strict=True):
            head += describe_part(param, spec.name)
        tail = ["no more parameters", *self.layouts.lines(), f"plan {plan.fingerprint}"]
        return plan, [*head, *map(str, specs), *tail]

    def specs(self) -> list[ParamSpec]:
        """Describe the parameters as they are now, each with its layout."""
        specs = describe(self.groups, self.names())
        params = parameters(self.groups)
        named = [(spec.name, param) for spec, param in zip(specs, params, strict=True)]
        if self.separate:
            refuse_dtensors(
                named,
                "module= and overlap_with_ddp=True reduce the gradients of plain tensors only; "
                "leave them out and synchronise gradients over the process group before step()",
            )
        if self.layouts.precision.stochastic_rounding:
            refuse_dtensors(
                named,
                "stochastic_rounding draws by an element's place in its tensor, so different parts "
                "would draw the same; use masters, MixedPrecision()",
            )
        return self.layouts.apply(self.groups, specs)

    def shard(self, plan: ShardPlan) -> ShardedParams:
        """Cut the parameters into the pieces of `plan`; nothing is done to them yet."""
        wider = {
            index: dtype
            for index, spec in enumerate(plan.specs)
            if (dtype := self.layouts.precision.step_dtype(spec.dtype)) != spec.dtype
        }
        self.widened |= {index for index in wider if plan.specs[index].trainable}
        if dist.is_available() and get_debug_level() != DebugLevel.OFF:
            logger.info(
                "rank %s owns %s of %s trainable elements in %s buckets (layout %s)",
                self.comm.group_rank,
                plan.numel(self.comm.group_rank),
                sum(spec.numel for spec in plan.specs if spec.trainable),
                len(plan.training_buckets),
                plan.layout,
            )
        return ShardedParams(
            plan,
            self.groups,
            self.comm.group_rank,
            self.bucket_views,
            self.separate,
            {index: dtype for index, dtype in wider.items() if index in self.widened},
            self.rounding if self.layouts.precision.stochastic_rounding else None,
        )

    def make_local(self, params: ShardedParams) -> tuple[LocalOptimizer, list[str]]:
        """Make the local optimizer, and the lines by which ranks compare it."""
        local = LocalOptimizer(params, self._make_optimizer, self.layouts.groups_to_fill)
        if not params.shard.pieces:
            local.try_idle()
        where = find_kept_view(local.optim) if self.bucket_views else None
        if where is not None:
            raise ValueError(
                f"{optimizer_name(local.optim)} keeps {where}, and parameters are about to move "
                "into buckets; leave out parameters_as_bucket_view=True, module= and "
                "overlap_with_ddp=True, or let the class make its views when it needs them"
            )
        name = optimizer_name(local.optim)
        return local, [f"optimizer class {name}", *describe_options(local.optim.param_groups)]

    def _make_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        recipe = self.layouts.recipe
        if any(CLASS_KEY in group for group in groups):
            return MultiClass(groups, recipe.optimizer_class, **recipe.defaults)
        return recipe.optimizer_class(groups, **recipe.defaults)
