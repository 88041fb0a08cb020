"""The base of all modes: makes a plan, builds its pipeline, replaces both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch
from typing_extensions import override

from shardstep.comm import Comm
from shardstep.comm.consensus import check_same_on_all_ranks
from shardstep.comm.join import JoinContext
from shardstep.gather import ImmediateGather, ParamGather
from shardstep.gradients import FullGradients, GradientSource
from shardstep.gradients.lockstep import Lockstep
from shardstep.layouts.choose import Layouts
from shardstep.local.local_optimizer import LocalOptimizer
from shardstep.local.multi_class import optimizer_name
from shardstep.modes.planner import Planned, Planner
from shardstep.params.inputs import describe_options, parameters
from shardstep.params.module import ModuleBuffers, ModuleWatch
from shardstep.params.names import names_in, unwrapped
from shardstep.params.sharded_params import ShardedParams
from shardstep.pipeline import Pipeline, Stepper
from shardstep.plan import ShardPlan
from shardstep.precision import warn_of_16_bits
from shardstep.state.replan import (
    move_states,
    refuse_lost_gradients,
    refuse_lost_state,
    refuse_other_shapes,
)

CONSTRUCTING = "constructing ZeroRedundancyOptimizer"
FOLLOWING = "following a change of the parameters"


class Mode(Stepper):
    """One way of using the optimizer: how gradients arrive and how parameters leave.

    A mode owns the pipeline of the plan in force. When the plan changes, it builds another pipeline
    and moves the state to it.

    Attributes:
        gather_comm: the ranks, on the connections that gathers use.
        known_module: the module that the parameters are known to belong to, outside of wrappers.
        watched: the module into which no other parameters may be put.
        groups: the parameter groups that the user sees.
        watch: sees parameters that are put into the known module.
        buffers: the buffers that are sent with each step.
    """

    groups: list[dict[str, Any]]
    known_module: torch.nn.Module | None

    title: str
    """The mode in the user's words."""

    module: torch.nn.Module | None = None
    """The module of `module=`."""

    bucket_views = True
    """True if parameters live in the buckets."""

    separate = True
    """True if entire parameters get a step tensor of their own."""

    reduces_gradients = False
    """True if this optimizer reduces gradients to their owners, and not DDP or the user."""

    zeroes_in_place = True
    """True if gradients can be set to zero, not only to None."""

    def __init__(self, comm: Comm, join: JoinContext, module: torch.nn.Module | None) -> None:
        self.comm = comm
        self.gather_comm = comm
        self.known_module = self.watched = None if module is None else unwrapped(module)
        self.watch = ModuleWatch(None)
        self.buffers = ModuleBuffers(comm, join, None)
        self.join = join
        self.begun: set[int] = set()
        self.lockstep = Lockstep(join)

    # ------------------------------------------------------------------------------ construction

    def plan_first(
        self,
        groups: list[dict[str, Any]],
        layouts: Layouts,
        bucket_bytes: int | None,
        warn: bool,
    ) -> Planned:
        """Check the parameters and plan their placement; nothing is done to them yet.

        If `warn`, warn of 16-bit parameters that are stepped on in 16 bits.
        """
        self.groups = groups
        self._warn = warn
        self.planner = Planner(
            layouts, bucket_bytes, groups, self.comm, self.names, self.bucket_views, self.separate
        )
        self.check()
        plan, lines = self.planner.plan()
        head = [f"optimizer class {layouts.recipe.name}", *self.describe()]
        policy = [f"{name}={value}" for name, value in asdict(layouts.precision).items()]
        return plan, [*head, *policy, *lines]

    def start(self, plan: ShardPlan) -> None:
        """Build the first pipeline. Called on every rank."""
        self.synchronise_start()
        params = self.planner.shard(plan)
        local = check_same_on_all_ranks(
            self.comm, CONSTRUCTING, lambda: self.planner.make_local(params)
        )
        self.connect()
        self.pipeline = self._build(params, local)
        local.publish_options()
        self.attach()
        self.watch = ModuleWatch(self.watched)

    def check(self) -> None:
        """Raise if the parameters do not suit this mode."""

    def describe(self) -> list[str]:
        """Return lines by which ranks compare their modes."""
        return [f"mode {self.title}"]

    def names(self) -> Mapping[int, str]:
        """Return names by identity of the parameter, for parameters that were given none."""
        return {} if self.known_module is None else names_in(self.known_module)

    @property
    @override
    def names_are_of_module(self) -> bool:
        return self.known_module is not None

    def synchronise_start(self) -> None:
        """Give all ranks the same starting values, if this mode does. Called on every rank."""

    def connect(self) -> None:
        """Open the connections that this mode needs. Called on every rank."""

    def attach(self) -> None:
        """Register hooks, once everything else is in place."""

    def make_gradients(self, params: ShardedParams) -> GradientSource:
        """Return the gradient source of a new pipeline."""
        return FullGradients(params, self.precision)

    def make_gather(self, params: ShardedParams) -> ParamGather:
        """Return the gather of a new pipeline."""
        return ImmediateGather(self.gather_comm, params.storage)

    # ---------------------------------------------------------------------- the plan in force

    def _build(self, params: ShardedParams, local: LocalOptimizer) -> Pipeline:
        self.begun.update(params.trained)
        if self._warn:
            self._warn = not warn_of_16_bits(params.plan.specs, optimizer_name(local.optim))
        params.attach()
        gather = self.make_gather(params)
        return Pipeline(params, self.make_gradients(params), local, gather, self.buffers)

    @override
    def adapt(self, stepping: bool) -> None:
        # Data that only moved is this rank's own affair, and may move back before the step.
        # Freezing, unfreezing, or another dtype or device change the plan, and must be done on
        # every rank. Ranks that changed different things raise. A rank that changed nothing does
        # not know, and makes another call.
        params = self.pipeline.params
        self.pipeline.gather.wait()
        if params.hand_edit() is not None:
            self.replan(FOLLOWING, self.planner.plan)  # raises on every rank
        specs = self.planner.specs()
        if self.pipeline.gradients.has_gradients():
            # The plan in force has placed these gradients: freezing and unfreezing between
            # backward and step wait until they are cleared.
            specs = [
                replace(spec, trainable=before)
                if param.grad is None and (stepping or not param.requires_grad)
                else spec
                for spec, before, param in zip(specs, params.trainable, params.params, strict=True)
            ]
        if tuple(specs) != self.plan.specs:
            self.replan(FOLLOWING, self.planner.plan)
        elif stepping:
            params.attach()

    def add_group(self, add: Callable[[], None]) -> None:
        """Call `add`, which appends a group, and place its parameters. Called on every rank.

        If that raises, it raises on every rank, and nothing has changed.
        """
        groups = list(self.groups)

        def make() -> Planned:
            add()
            plan, lines = self.planner.plan()
            named = zip((spec.name for spec in plan.specs), parameters(self.groups), strict=True)
            self.check_new(islice(named, len(self.params), None))
            self.pipeline.local.try_group(self.groups[-1])
            return plan, describe_options(self.groups[-1:]) + lines

        try:
            self.replan("add_param_group", make)
        except Exception:
            self.groups[:] = groups
            self.planner.layouts.truncate(len(groups))
            raise

    def check_new(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise if parameters that are about to be added do not suit this mode."""

    def replan(self, what: str, make: Callable[[], Planned]) -> None:
        """Adopt another plan, and move the state to its new owners. Called on every rank.

        Raises:
            RuntimeError: on every rank, if a rank has gradients that the next step would miss, or
                the optimizer keeps something of its parameters where it cannot be moved from.
        """
        rank, before, local = self.comm.group_rank, self.plan, self.pipeline.local

        def check_and_make() -> Planned:
            local.refuse_hand_edit()
            # Within the check: accumulated gradients may be there on some ranks only.
            refuse_lost_gradients(rank, what, self.pipeline.gradients.has_gradients())
            if self.comm.world_size > 1 or self.bucket_views:
                refuse_lost_state(rank, what, local.optim)
            plan, lines = make()
            stateful = {index for index, state in local.states().items() if state} | self.widened
            refuse_other_shapes(rank, before.specs, plan.specs, stateful)
            if next(plan.pieces(rank), None) is None:
                local.try_idle()
            return plan, lines

        plan = check_same_on_all_ranks(self.comm, what, check_and_make)
        params = parameters(self.groups)
        self.synchronise_new(params[len(before.specs) :])
        states = move_states(self.comm, before, plan, local.states(), params, self.groups)
        masters: dict[int, Any] = {}
        if self.widened:
            masters = move_states(self.comm, before, plan, self.masters(), params, self.groups)
        self._switch(plan, states, masters)

    def synchronise_new(self, params: Sequence[torch.Tensor]) -> None:
        """Give added parameters the same starting values, if this mode does."""

    def _switch(
        self, plan: ShardPlan, states: Mapping[int, Any], masters: Mapping[int, torch.Tensor]
    ) -> None:
        """Build the pipeline of `plan`; nothing is sent."""
        old = self.pipeline
        paused = old.gradients.paused
        frozen = [
            index
            for index, (before, after) in enumerate(zip(self.plan.specs, plan.specs, strict=False))
            if before.trainable and not after.trainable
        ]
        old.detach(frozen)
        new = set(range(len(self.plan.specs))) - self.begun - self.widened
        params = self.planner.shard(plan)
        params.shard.wide.set_values(masters)
        self.pipeline = self._build(params, old.local)
        if paused:
            self.pipeline.gradients.pause()
        old.local.adopt(params, states)
        # State that the class made for a frozen 16-bit parameter has 16 bits; it needs more now.
        if new & self.widened:
            old.local.begin(new & self.widened)

    @override
    def give_masters(self, params: Iterable[int]) -> None:
        # The state of a parameter that was frozen from the start is that of its master too, and
        # must not be cast to 16 bits. Nothing is sent: a rank may load alone.
        given = set(params)
        self.begun |= given
        specs, step_dtype = self.plan.specs, self.precision.step_dtype
        more = {index for index in given if step_dtype(specs[index].dtype) != specs[index].dtype}
        if not more <= self.widened:
            refuse_lost_gradients(
                self.comm.group_rank,
                "loading state of frozen parameters",
                self.pipeline.gradients.has_gradients(),
            )
            self.planner.widened |= more
            self._switch(self.plan, self.local.states(), self.masters())

    # ----------------------------------------------------------------------------------- the step

    def recover(self) -> None:
        """Give up the batch that failed on a rank. Called on every rank."""
        raise RuntimeError(
            "recover() needs module=: without it, DDP or your code reduces the gradients, and this "
            "optimizer cannot give such a reduction up"
        )

    def shadow(self, step: Callable[[], object], zero_grad: Callable[[bool], object]) -> None:
        """Shadow the ranks that have data. Called on every joined rank."""
        raise NotImplementedError

    def end_join(self) -> None:
        """Even out what ranks have. Called on every rank once all have joined."""

    def ready_gradients(self) -> GradientSource:
        """Return the gradient source, to read or change gradients. Called on every rank."""
        return self.pipeline.gradients

    def check_change(self, what: str) -> None:
        """Raise if gradients cannot be changed before the step in this mode."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank while this lasts."""
        nested = self.pipeline.gradients.paused
        self.pipeline.gradients.pause()
        try:
            yield
        finally:
            # The pipeline may be another one by now.
            if not nested:
                self.pipeline.gradients.resume()

    @property
    def inside_ddp(self) -> Any:
        """This mode, as DDP's hooks drive it."""
        raise ValueError(
            "this hook steps the optimizer inside backward, so the optimizer must be constructed "
            "with overlap_with_ddp=True"
        )

    def detach(self) -> None:
        """Restore plain parameters and remove all hooks. Called on every rank."""
        self.pipeline.detach(self.pipeline.params.trained)
