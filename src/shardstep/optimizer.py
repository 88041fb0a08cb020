"""`ZeroRedundancyOptimizer`: plan, buffers, communication and an ordinary optimizer, composed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from shardstep.apply import apply_to_shares
from shardstep.comm import Comm, connect, refuse_stray_rank
from shardstep.comm.broadcast import broadcast
from shardstep.comm.consensus import check_same_on_all_ranks, run_on_all_ranks
from shardstep.gather.overlapped import ImmediateGather, OverlappedGather, ParamGather
from shardstep.gradients.full import FullGradients, GradientSource
from shardstep.gradients.reducer import GradReducer, refuse_watched
from shardstep.layouts.choose import Layouts
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.local.local_optimizer import LocalOptimizer, LocalState
from shardstep.local.multi_class import (
    CLASS_KEY,
    MultiClass,
    extras,
    names_a_class,
    no_defaults,
    optimizer_name,
)
from shardstep.local.train_eval import MODES, has_train_eval
from shardstep.local.unmovable_state import find_kept_view, find_unmovable_state
from shardstep.modes.join import (
    _ZeROJoinHook,
    announced,
    options_of,
    provide_gradients,
    take_options,
)
from shardstep.modes.module import (
    ModuleTie,
    broadcast_start,
    check_membership,
    describe_buffers,
)
from shardstep.params.dtensor import describe_part, refuse_dtensors
from shardstep.params.inputs import (
    ParamsArgument,
    check_class,
    describe,
    describe_options,
    is_trainable,
    parameters,
)
from shardstep.params.masters import Masters, StepCopies, StepTensors
from shardstep.params.names import names_in
from shardstep.params.shard import Shard
from shardstep.params.stochastic_rounding import StochasticRounding
from shardstep.params.storage import BucketViews, OwnStorage, ParamStorage
from shardstep.plan import Interval, ParamSpec, Piece, ShardPlan, share
from shardstep.precision import MixedPrecision, resolve, warn_of_16_bits, widened
from shardstep.report import Report, make_report
from shardstep.state.exchange import move_state
from shardstep.state.missing_state import warn_of_missing_state
from shardstep.state.named_dict import numbered
from shardstep.state.replan import follow_plan
from shardstep.state.torch_dict import (
    described_in,
    load_share,
    masters_in,
    pack_groups,
)
from shardstep.state.tree import Leaf
from shardstep.state.view import ShardView

logger = logging.getLogger(__name__)

StateDict = dict[str, Any]


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Wraps an optimizer class so that N ranks keep one copy of its state between them.

    Each rank's local optimizer, an unmodified `optimizer_class`, updates about 1/N of the
    elements and keeps state for those alone; `step()` then gathers the updated parameters
    everywhere. Gradients are expected to be equal on all ranks when `step()` is called, as
    `DistributedDataParallel` makes them; or, given the `module`, the optimizer sees to that itself
    and replaces DDP. The numbers are those of the unsharded optimizer.

    Constructed on every rank of the process group. Without an initialised process group it runs as
    one rank, unless `torchrun` has started several.

    Args:
        params: parameters, `(name, parameter)` pairs or parameter groups, as for any optimizer.
            All ranks have to give the same, in the same order; if they do not, all ranks raise.
            A group may name a class of its own under `"optimizer_class"`; its options go to that.
        optimizer_class: the class of the local optimizer.
        process_group: the ranks that share the state; the default group if None.
        parameters_as_bucket_view: if True, trainable parameters are moved into flat buckets
            (`param.data` becomes a view) and are gathered without being copied; if False, they
            stay where they are, and two bucket-sized buffers are used to send them.
        overlap_with_ddp: if True, the step is taken inside DDP's backward: hand the optimizer to
            one of `hook_with_zero_step`, `hook_with_zero_step_interleaved` and `register`.
            Parameters live in buckets then, and `step()` does nothing.
        module: the module that the parameters belong to, not wrapped in DDP. If given, this is
            ZeRO-2: the optimizer starts all ranks from rank 0's parameters, reduces gradients to
            their owners while backward runs and gathers parameters while the next forward runs.
            Parameters live in buckets then.
        layout: `"sliced"` cuts parameters anywhere, `"whole"` never cuts one; `"auto"` finds out,
            group by group, which of them leaves the class's numbers as they are, and refuses if
            neither does. What is asked for is checked.
        precision: how 16-bit parameters are stepped on, and in which dtype gradients travel. If
            None, they get fp32 masters with `module`; without it, they are updated in 16 bits, as
            by `optimizer_class` itself, and rank 0 warns once of what that loses.
        bucket_bytes: a bucket is closed once it holds this much; None for a sixteenth of the model,
            but between 1 and 25 MiB.
        overlap: with `module`, whether communication runs during backward and forward; the numbers
            are the same without.
        broadcast_buffers: with `module`, whether its buffers follow rank 0's, as DDP's do.
        **defaults: options for `optimizer_class`.

    Attributes:
        optim: the local optimizer, on this rank's pieces.
        process_group: the process group, or None when it runs as one rank without one.
        rank: this rank within the process group.
        global_rank: this rank within the default group.
        world_size: number of ranks in the process group.

    Raises:
        TypeError: if an argument is of another kind than is said above.
        ValueError: on every rank, if what was given cannot be sharded, or differs between ranks.
        RuntimeError: if construction failed on another rank; if there is no process group where
            `torchrun` has started several ranks.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> opt.step()
        >>> opt.zero_grad()
    """

    optim: Optimizer

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        module: torch.nn.Module | None = None,
        layout: str = "auto",
        precision: MixedPrecision | None = None,
        bucket_bytes: int | None = None,
        overlap: bool = True,
        broadcast_buffers: bool = True,
        **defaults: Any,
    ) -> None:
        self.initialized = False
        refuse_stray_rank()
        given = ParamsArgument(params)
        self._comm: Comm = connect(process_group, given.tensors)
        self.process_group = self._comm.group
        self.world_size = self._comm.world_size
        self.rank = self._comm.group_rank
        self.global_rank = dist.get_rank() if self.process_group is not None else 0
        self._apart = module is not None or overlap_with_ddp
        self.parameters_as_bucket_view = parameters_as_bucket_view or self._apart
        self._overlap_with_ddp = overlap_with_ddp
        self._bucket_bytes = bucket_bytes
        self._module = module
        self._overlap = overlap
        self._tie: ModuleTie | None = None
        # What gathers run ahead of, and who reduces gradients to their owners: with `module`, or
        # once a DDP module is tied to this.
        self._ahead_of = module if overlap else None
        self._reducer: type[GradReducer] | None = GradReducer if module else None
        # Whether a step was ever taken inside of backward, and, on a rank without data, whether the
        # ranks that have some are taking one.
        self._stepped_in_backward = False
        # Whether a step was ever taken, here or before what was loaded was saved: state that is
        # empty then is all there is to it.
        self._stepped = False
        self._step_owed = False
        self._shadowing = False
        self._consolidated: StateDict | None = None
        # Which parameters have, or had, a wider tensor to be stepped on: one that is frozen keeps
        # its master, as it keeps its state.
        self._widened: set[int] = set()
        # Which parameters ever trained or were given state: more than the class makes for new ones.
        self._begun: set[int] = set()
        self._warned = precision is not None or self.rank != 0
        self._layout = layout

        def local(groups: list[dict[str, Any]]) -> Optimizer:
            if names_a_class(groups):
                return MultiClass(groups, optimizer_class, **defaults)
            return optimizer_class(groups, **defaults)

        def make_local() -> None:
            self._local = LocalOptimizer(
                self.param_groups,
                self._shard,
                local,
                self._layouts.groups_to_fill,
                self._dtype_here,
            )
            self.optim = self._local.optim

        def make() -> tuple[ShardPlan, list[str]]:
            if overlap_with_ddp and module is not None:
                raise ValueError("module= replaces DDP: leave out overlap_with_ddp=True")
            check_class(optimizer_class)
            self._precision = resolve(precision, self._apart, module is not None)
            recipe = OptimizerRecipe(optimizer_class, defaults)
            self._layouts = Layouts(layout, recipe, self.world_size, self._precision)
            self._rounding = StochasticRounding(self._precision.seed)
            # The local optimizer knows the class's defaults, in the class's order; they are taken
            # over from it below.
            Optimizer.__init__(self, given.items(), {})
            if module is not None:
                check_membership(module, parameters(self.param_groups))
                refuse_watched(module.named_parameters())
            plan, lines = self._plan_now()
            self._shard = self._shard_of(plan)
            make_local()
            if not self._shard.pieces:
                self._local.try_idle()
            where = find_kept_view(self.optim) if self.parameters_as_bucket_view else None
            if where is not None:
                raise ValueError(
                    f"{optimizer_name(self.optim)} keeps {where}, and parameters are about to move "
                    "into buckets; leave out parameters_as_bucket_view=True, module= and "
                    "overlap_with_ddp=True, or have the class make its views when they are needed"
                )
            head = [
                f"optimizer class {optimizer_name(self.optim)}",
                f"overlap_with_ddp={overlap_with_ddp}, module={module is not None}, "
                f"broadcast_buffers={broadcast_buffers}",
                f"{self._precision}",
            ]
            if module is not None:
                lines += describe_buffers(module)
            return plan, head + describe_options(self.optim.param_groups) + lines

        def begin_again() -> None:
            # What a class notes down of the parameters when it is made is to be of rank 0's.
            self._shard.take_masters(None)
            del self._local, self.optim  # not the state of both at once
            make_local()

        plan = check_same_on_all_ranks(self._comm, "constructing ZeroRedundancyOptimizer", make)
        Joinable.__init__(self)
        self._gather_comm = self._comm
        if module is not None:
            # Gathers of one step and reductions of the next overlap: neither may queue behind the
            # other. And neither may meet what another optimizer sends in the same group: a
            # backward pass through two modules reduces in an order that may differ between ranks.
            self._gather_comm = self._comm.new_connection()
            self._comm = self._comm.new_connection()
            broadcast_start(self._comm, module)
            run_on_all_ranks(self._comm, "constructing ZeroRedundancyOptimizer", begin_again)
            # Last: a module that was tied to nothing in the end would not run any more.
            self._tie = ModuleTie(
                module,
                self._comm,
                broadcast_buffers,
                self._before_forward,
                self._expect_backward,
                lambda: self._announce("buffers", list),
            )
        # Schedulers look in `defaults` for what the optimizer knows, such as "betas".
        self.defaults = self.optim.defaults
        self._adopt(plan, self._shard)
        self._local.publish_options()
        self.initialized = True

    # ---------------------------------------------------------------- the plan and its changes

    @property
    def plan(self) -> ShardPlan:
        """Which rank owns which elements."""
        return self._plan

    def _plan_now(self) -> tuple[ShardPlan, list[str]]:
        """A plan for the parameters as they are now, and the words in which ranks compare it."""
        specs = self._specs_now()
        plan = ShardPlan.make(specs, self.world_size, bucket_bytes=self._bucket_bytes)
        head = [f"layout={self._layout!r}, bucket_bytes={self._bucket_bytes}"]
        tail = [*self._layouts.lines(), f"plan {plan.fingerprint}"]
        for param, spec in zip(parameters(self.param_groups), specs, strict=True):
            head += describe_part(param, spec.name)
        return plan, [*head, *map(str, specs), "no more parameters", *tail]

    def _specs_now(self) -> list[ParamSpec]:
        specs = describe(self.param_groups, names_in(self._module) if self._module else {})
        self._refuse_dtensors(parameters(self.param_groups), specs)
        return self._layouts.apply(self.param_groups, specs)

    def _refuse_dtensors(self, params: Sequence[torch.Tensor], specs: Sequence[ParamSpec]) -> None:
        """Raise for a DTensor with what is for plain tensors only."""
        named = [(spec.name, param) for spec, param in zip(specs, params, strict=True)]
        if self._apart:
            refuse_dtensors(
                named,
                "module= and overlap_with_ddp=True reduce the gradients of plain tensors only; "
                "leave them out and synchronise gradients over the process group before step()",
            )
        if self._precision.stochastic_rounding:
            refuse_dtensors(
                named,
                "stochastic_rounding draws by the place of an element in its tensor, so different "
                "parts would draw the same; use masters, MixedPrecision()",
            )

    def _shard_of(self, plan: ShardPlan) -> Shard:
        self._widened |= widened(plan.specs, self._precision)
        dtypes = {
            index: dtype
            for index, spec in enumerate(plan.specs)
            if (dtype := self._dtype_here(index, spec.dtype)) != spec.dtype
        }

        def widen(pieces: Sequence[Piece], params: Sequence[torch.Tensor]) -> StepTensors:
            narrow = [piece for piece in pieces if piece.param in dtypes]
            if self._precision.stochastic_rounding:
                return StepCopies(narrow, params, dtypes, self._rounding)
            return Masters(narrow, params, dtypes)

        return Shard(plan, parameters(self.param_groups), self.rank, self._apart, widen)

    def _dtype_here(self, index: int, dtype: torch.dtype) -> torch.dtype:
        """In which dtype the parameter with this number, which is of `dtype`, is stepped on."""
        return self._precision.step_dtype(dtype) if index in self._widened else dtype

    def _adopt(self, plan: ShardPlan, shard: Shard) -> None:
        """Make `plan` the one in force."""
        self._plan = plan
        self._shard = shard
        self._params = parameters(self.param_groups)
        self._trainable = [spec.trainable for spec in plan.specs]
        self._begun |= {index for index, trains in enumerate(self._trainable) if trains}
        if not self._warned and self._module is None:
            self._warned = warn_of_16_bits(plan.specs, optimizer_name(self.optim))
        home = BucketViews if self.parameters_as_bucket_view else OwnStorage
        self._storage: ParamStorage = home(plan, self._params, self.rank)
        self._settle_in()
        self._gather = self._make_gather()
        self._gradients = self._make_gradients()
        if dist.is_available() and get_debug_level() != DebugLevel.OFF:
            own = share(plan, self.rank)
            logger.info(
                "rank %s owns %s of %s trainable elements in %s buckets (layout %s)",
                self.global_rank,
                own.numel,
                sum(spec.numel for spec in plan.specs if spec.trainable),
                len(plan.training_buckets),
                plan.layout,
            )

    def _make_gather(self) -> ParamGather:
        if self._ahead_of is None:
            return ImmediateGather(self._gather_comm, self._plan, self._storage)
        return OverlappedGather(
            self._gather_comm, self._plan, self._storage, self._params, self._ahead_of
        )

    def _make_gradients(self) -> GradientSource:
        if self._reducer is None:
            return FullGradients(self._plan, self._params, self._shard, self._precision)
        return self._reducer(
            self._comm,
            self._plan,
            self._params,
            self._shard,
            self._overlap,
            self._announce,
            self._precision,
        )

    def _settle_in(self) -> None:
        """Take the parameters in where they are now."""
        self._storage.attach()
        self._shard.repoint()

    def _follow(self, stepping: bool = False) -> None:
        """Notice what was done to the parameters since the last step, and adapt to it.

        Data that only moved is this rank's own affair. Freezing, unfreezing, or a new dtype or
        device change the plan, and like all else that concerns the model are to be done alike on
        every rank. Ranks that changed different things raise; a rank that changed nothing does not
        know, and waits until the timeout of the process group.

        Args:
            stepping: whether this is for a step, and not for a forward pass to come.
        """
        if self._unchanged():
            return
        specs = self._specs_now()
        if self._gradients.held():
            # Freezing and unfreezing between backward and step wait until the gradients, which lie
            # where the plan in force has put them, are cleared.
            specs = [
                replace(spec, trainable=before)
                if param.grad is None and (stepping or not param.requires_grad)
                else spec
                for spec, before, param in zip(specs, self._trainable, self._params, strict=True)
            ]
        if tuple(specs) == self._plan.specs:
            self._settle_in()
        else:
            self._replan("following a change of the parameters", self._plan_now)

    def _follow_without_gradients(self) -> None:
        """Adapt to parameters of another form before gradients are asked for, if there are none.

        Called on every rank. To find that nobody has gradients takes a round of reductions, in
        which they are to be of the form that parameters have. What is merely frozen by now can wait
        until that is over, and has to: a rank that has no gradients does not know whether others
        do. Under `Join`, ranks without data adapt when they shadow the step.
        """
        if self._module is None or self._join_config.enable or self._shadowing:
            return
        with torch._C.DisableTorchFunctionSubclass():
            waits = self._gradients.held() or self._storage.intact()
        if not waits:
            self._gather.land()
            self._follow()

    def _unchanged(self) -> bool:
        """Whether the parameters are as and where the plan in force has them."""
        # Parameters in flight are asked without waking them.
        with torch._C.DisableTorchFunctionSubclass():
            same_trainable = self._trainable == list(map(is_trainable, self._params))
            return same_trainable and self._storage.intact()

    def _replan(self, what: str, make: Callable[[], tuple[ShardPlan, list[str]]]) -> None:
        """Adopt another plan and move the state to its new owners. Called on every rank.

        Raises:
            RuntimeError: on every rank, if there are gradients on some that the next step would
                miss, or the optimizer keeps something of its parameters where it cannot be moved
                from.
        """

        def keep_and_make() -> tuple[ShardPlan, list[str]]:
            # Not before the ranks meet: what was held back may be there on some of them only.
            self._refuse_to_lose_gradients(what)
            self._refuse_to_lose_state(what)
            plan, lines = make()
            self._refuse_other_shapes(plan.specs)
            if next(plan.pieces(self.rank), None) is None:
                self._local.try_idle()
            return plan, lines

        plan = check_same_on_all_ranks(self._comm, what, keep_and_make)
        before = self._plan
        params = parameters(self.param_groups)
        if self._module is not None:
            # Those that were added start as all others did.
            broadcast(self._comm, params[len(before.specs) :], source=0)

        def move(states: Mapping[int, Any]) -> dict[int, Any]:
            return follow_plan(
                self._comm,
                before,
                plan,
                states,
                device=lambda index, leaf: _beside(params[index], leaf),
            )

        states = move(self._local.states())
        self._switch(plan, states, move(self._masters()) if self._widened else {})

    def _refuse_to_lose_gradients(self, what: str) -> None:
        if self._gradients.held():
            raise RuntimeError(
                f"rank {self.rank}: {what} would lose the gradients that are there for the next "
                "step; do it before backward, or call zero_grad() first"
            )

    def _refuse_to_lose_state(self, what: str) -> None:
        moves = self.world_size > 1 or self.parameters_as_bucket_view
        where = find_unmovable_state(self.optim) if moves else None
        if where is not None:
            raise RuntimeError(
                f"rank {self.rank}: {what} would lose what {optimizer_name(self.optim)} keeps of "
                f"its parameters beside its state ({where}); do it before the optimizer is "
                "constructed, or construct another one"
            )

    def _refuse_other_shapes(self, specs: Sequence[ParamSpec]) -> None:
        """Raise for a parameter that has state, and was given data of another shape."""
        states = self._local.states()
        for index, (before, now) in enumerate(zip(self._plan.specs, specs, strict=False)):
            if before.shape != now.shape and (states.get(index) or index in self._widened):
                raise RuntimeError(
                    f"rank {self.rank}: parameter {now.name!r} was given data of shape {now.shape} "
                    f"in place of {before.shape}, which its state or master does not fit; "
                    "construct another optimizer"
                )

    def _switch(
        self, plan: ShardPlan, states: Mapping[int, Any], masters: Mapping[int, torch.Tensor]
    ) -> None:
        """Step on the pieces of `plan` from now on, with what is given for them. Nothing is sent.

        Args:
            plan: the plan to be in force.
            states: the state of this rank's pieces of it.
            masters: the masters of those that have one already.
        """
        held_back = not self._gradients.synchronising
        self._gather.detach()
        self._gradients.detach()
        now_frozen = (
            index
            for index, (old, new) in enumerate(zip(self._plan.specs, plan.specs, strict=False))
            if old.trainable and not new.trainable
        )
        self._storage.detach(now_frozen)
        new = set(range(len(self._plan.specs))) - self._begun - self._widened
        shard = self._shard_of(plan)
        shard.take_masters(masters)
        self._adopt(plan, shard)
        if held_back:
            self._gradients.hold_back()
        self._local.adopt(shard, states)
        # State that the class made for a parameter that was frozen then has as few bits as that.
        if new & self._widened:
            self._local.begin(new & self._widened)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as for any optimizer, and place them.

        Called on every rank, with the same group. With `module`, they start from rank 0's values.

        Args:
            param_group: the parameters under `"params"`, and options of their own.

        Raises:
            ValueError: on every rank, if they cannot be added; nothing has changed then.
            RuntimeError: on every rank, if there are gradients that the next step would miss.
        """
        if not self.initialized:
            super().add_param_group(param_group)
            return
        groups = list(self.param_groups)

        def make() -> tuple[ShardPlan, list[str]]:
            if CLASS_KEY in param_group and not isinstance(self.optim, MultiClass):
                raise ValueError(
                    f"this optimizer was constructed with one class for all groups, so a group "
                    f"with {CLASS_KEY!r} cannot be added; name the class of a group from the start"
                )
            with no_defaults(self):
                super(ZeroRedundancyOptimizer, self).add_param_group(param_group)
            plan, lines = self._plan_now()
            if self._module is not None:
                named = zip(plan.specs, parameters(self.param_groups), strict=True)
                refuse_watched((s.name, p) for s, p in islice(named, len(self._params), None))
            self._local.try_group(self.param_groups[-1])
            return plan, describe_options(self.param_groups[-1:]) + lines

        try:
            self._replan("add_param_group", make)
        except Exception:
            self.param_groups[:] = groups
            self._layouts.truncate(len(groups))
            raise

    # ------------------------------------------------------------------------------- the step

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Update this rank's share of the parameters, and gather the rest.

        Called on every rank.

        Args:
            closure: computes the loss anew and returns it; passed on if given.
            **kwargs: passed on to the local optimizer's `step`.

        Returns:
            What the local optimizer's `step` returns.
        """
        if self._overlap_with_ddp:
            self._check_idle_step(closure)
            return None
        return self._step_now(closure, **kwargs)

    def _step_now(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """The step itself, without the hooks that users registered for it."""
        if not self._shadowing:
            self._notify()
        self._prepare_step()
        loss = self._local_step(closure, **kwargs)
        self._sync_params()
        return loss

    def _prepare_step(self) -> None:
        """Have parameters, plan and options as they are to be stepped on. Called on every rank."""
        self._gather.land()
        self._follow(stepping=True)
        self._shard.begin()
        self._local.push_options()

    def _notify(self) -> None:
        """Under `Join`, let ranks without data take part in the step. Called on every rank."""
        if self._module is not None:
            self._follow_without_gradients()
            # What reductions are still to be announced is announced before the step is.
            self._gradients.collect()
            self._announce("step", lambda: [options_of(self.param_groups)])
            return
        Join.notify_join_context(self)
        if self._join_config.enable and self._reducer is None:
            provide_gradients(self._comm, self._plan, self.param_groups, joined=False)

    def _local_step(
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Update this rank's pieces, and nothing else."""
        self._gradients.collect()
        if closure is not None:
            given = closure

            evaluations = 0

            def evaluate() -> float:
                nonlocal evaluations
                evaluations += 1
                if evaluations > 1 and self.world_size > 1:
                    # Between the two, each rank has moved its own pieces only.
                    raise RuntimeError(
                        f"{optimizer_name(self.optim)} evaluates its closure more than once in a "
                        "step, which a divided optimizer cannot do; use it unsharded"
                    )
                if evaluations > 1:
                    self._settle()  # the model is to see what was made of the masters so far
                loss = given()
                self._gradients.collect()
                return loss

            kwargs["closure"] = evaluate
        loss: float | None = self._local.step(**kwargs)
        self._stepped = True
        self._gradients.release()
        self._settle()
        self._shard.end()
        self._local.publish_options()
        return loss

    def _settle(self) -> None:
        """Let this rank's pieces of the parameters be what the local optimizer made of them."""
        if self._shard.settle(self._local.let_go):
            self._settle_in()

    def _sync_params(self) -> None:
        """Gather what the other ranks updated. Called on every rank."""
        self._bump_versions()
        self._gather.launch()
        if self._tie is not None:
            self._tie.sync_buffers()

    def _bump_versions(self) -> None:
        # A backward pass through a graph that was built on the old values has to fail, as it does
        # after any optimizer's step: autograd has to see that the parameters were written to.
        with torch._C.DisableTorchFunctionSubclass():
            changed = [param for param in self._params if param.grad is not None]
        torch.autograd.graph.increment_version(changed)

    def apply(self, act: Callable[[Optimizer], object]) -> None:
        """Have every rank's local optimizer do something to its share, and gather the outcome.

        For what a class does to parameters outside of `step()`. Where the class has `train()` and
        `eval()`, as schedule-free ones do, this optimizer has them too, by way of this. Called on
        every rank, with the same `act`, which must not look beyond what the layout keeps together:
        the element or the tensor, and sees no gradients. Parameters that do not train are gathered
        if it changes them.

        Args:
            act: called with the local optimizer, whose parameters are this rank's pieces.

        Raises:
            RuntimeError: on every rank, if it failed on another one. What it had done until then is
                gathered none the less: parameters are equal on all ranks.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(4))
            >>> opt = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.1)
            >>> opt.apply(lambda local: [p.data.zero_() for p in local.param_groups[0]["params"]])
            >>> weight.sum().item()
            0.0
        """
        apply_to_shares(self, act)

    if not TYPE_CHECKING:  # or the checker would take any name for one that is there

        def __getattr__(self, name: str) -> Any:
            """`train` and `eval`, if any class here has them."""
            if name in MODES and "optim" in self.__dict__ and has_train_eval(self.optim):
                return lambda *args, **kwargs: self.apply(
                    lambda _: self._local.set_mode(name, *args, **kwargs)
                )
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it is one of several, and tied "
            "to its parameters; construct another one and load this one's state dict"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters. Called on every rank.

        Args:
            set_to_none: whether `param.grad` becomes None, or zero.
        """
        if self._module is not None and not set_to_none:
            self._announce("zero", list)
        # Parameters in flight are not waited for to have their gradients cleared.
        with torch._C.DisableTorchFunctionSubclass():
            self._gradients.zero(set_to_none)
            super().zero_grad(set_to_none)
        if self._module is not None and not self._unchanged():
            self._gather.land()
            self._follow()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip the gradients of all parameters by their common norm.

        Called on every rank. It is `torch.nn.utils.clip_grad_norm_` for gradients that may lie
        divided among the ranks; every element is counted once.

        Args:
            max_norm, norm_type, error_if_nonfinite, foreach: as for torch's.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            RuntimeError: with `overlap_with_ddp=True`, where the step was taken before this call.
        """
        self._refuse_if_stepped("clip_grad_norm_()")
        self._follow_without_gradients()
        return self._gradients.clip_norm(
            float(max_norm), float(norm_type), error_if_nonfinite, foreach
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """While this lasts, backward only adds gradients up on each rank.

        They are sent with the next backward pass outside of it, or with the step. For use with
        `module`; entered on every rank.
        """
        within_another = not self._gradients.synchronising
        self._gradients.hold_back()
        try:
            yield
        finally:
            # Another object may look after them by now, if a parameter was frozen in between.
            if not within_another:
                self._gradients.send_again()

    # -------------------------------------------------------------- the step in DDP's backward

    def _gather_ahead_of(self, module: torch.nn.Module) -> None:
        """Let gathers run on while `module` runs its next forward. Called on every rank."""
        self._gather.detach()
        self._gather_comm = self._comm.new_connection()
        self._ahead_of = module
        self._gather = self._make_gather()

    def _reduce_to_owners(self, module: torch.nn.Module, reducer: type[GradReducer]) -> None:
        """Let gradients be reduced by `reducer`. Called on every rank."""
        self._gather_ahead_of(module)
        self._comm = self._comm.new_connection()
        self._reducer = reducer
        self._gradients = self._make_gradients()

    def _step_in_backward(self) -> None:
        self._stepped_in_backward = True
        self._step_now()

    def _refuse_if_stepped(self, what: str) -> None:
        if self._overlap_with_ddp:
            raise RuntimeError(
                f"{what} comes too late with overlap_with_ddp=True: the step was taken inside "
                "backward, on the gradients as they were; use module= instead"
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by `GradScaler.step`: this optimizer does not unscale gradients itself."""
        self._refuse_if_stepped("GradScaler")
        return False

    def _check_idle_step(self, closure: object) -> None:
        if closure is not None:
            raise ValueError(
                "with overlap_with_ddp=True the step is taken inside backward, so step() cannot "
                "evaluate a closure"
            )
        if self._ahead_of is None:
            raise RuntimeError(
                "with overlap_with_ddp=True the step is taken inside DDP's backward, but no DDP "
                "module was tied to this optimizer: call shardstep.register(ddp, optimizer), or "
                "register hook_with_zero_step(...) with it"
            )
        if not self._stepped_in_backward and any(param.grad is not None for param in self._params):
            raise RuntimeError(
                "with overlap_with_ddp=True the step is taken inside DDP's backward, but none was: "
                "register the hook with ddp.register_comm_hook(...)"
            )

    # ------------------------------------------------------------------------------ the module

    def _before_forward(self) -> bool:
        assert isinstance(self._gradients, GradReducer)
        self._gradients.begin_forward()
        within_backward = torch._C._current_graph_task_id() != -1
        if not within_backward and not self._unchanged():
            self._gather.land()
            self._follow()
        return self._gradients.synchronising

    def _expect_backward(self) -> None:
        assert isinstance(self._gradients, GradReducer)
        self._gradients.expect_backward()

    def full_grad(self, parameter: torch.Tensor | str) -> torch.Tensor | None:
        """The whole gradient of one parameter, as the optimizer would use it; None if it has none.

        Called on every rank, with the same parameter.

        Args:
            parameter: the parameter or its name.
        """
        self._follow_without_gradients()
        return self._gradients.full(self._index(parameter))

    def full_state(self, parameter: torch.Tensor | str) -> dict[str, Any]:
        """The whole optimizer state of one parameter, on every rank; empty if it has none.

        Called on every rank, with the same parameter.

        Args:
            parameter: the parameter or its name.
        """
        index = self._index(parameter)
        return dict(self._whole(index, self._local.states()) or {})

    def full_master(self, parameter: torch.Tensor | str) -> torch.Tensor | None:
        """The whole master of one parameter, on every rank; None if it has none.

        Called on every rank, with the same parameter.

        Args:
            parameter: the parameter or its name.
        """
        master: torch.Tensor | None = self._whole(self._index(parameter), self._masters())
        return master

    def _whole(self, index: int, held: Mapping[int, Any]) -> Any:
        """What the ranks hold of one parameter, put together on every rank; None if nothing."""
        everything = {index: Interval(0, self._plan.specs[index].numel)}
        moved = move_state(
            self._comm,
            self._plan.specs,
            held=[self._plan.intervals(rank) for rank in range(self.world_size)],
            wanted=[everything] * self.world_size,
            states={i: state for i, state in held.items() if i == index},
            device=lambda i, leaf: _beside(self._params[i], leaf),
        )
        return moved.get(index)

    def _index(self, parameter: torch.Tensor | str) -> int:
        for index, (param, spec) in enumerate(zip(self._params, self._plan.specs, strict=True)):
            if param is parameter or spec.name == parameter:
                return index
        shown = repr(parameter) if isinstance(parameter, str) else "the given tensor"
        raise ValueError(
            f"rank {self.rank}: {shown} is not a parameter of this optimizer, whose first one is "
            f"called {self._plan.specs[0].name!r}; names are those of module= or of the (name, "
            "parameter) pairs that it was given"
        )

    def report(self) -> Report:
        """What this rank holds and sends, which layout each group has, and why; print it.

        It is this rank's own: nothing is communicated.
        """
        return make_report(
            self.rank,
            self._plan,
            self._layouts.explain(self.param_groups),
            self.optim.state.values(),
            self._shard.wide_nbytes,
            self._gradients.nbytes,
            self._precision if self._reducer is not None else None,
        )

    def detach(self) -> None:
        """Undo all that was done to parameters and module; this optimizer is of no more use.

        Called on every rank. Parameters are up to date and in storage of their own, without
        gradients; hooks are gone.
        """
        self._gather.detach()
        self._gradients.detach()
        self._storage.detach(i for i, trainable in enumerate(self._trainable) if trainable)
        if self._tie is not None:
            self._tie.detach()

    # ------------------------------------------------------------------------------ the state

    @property  # type: ignore[override]
    def state(self) -> LocalState:
        """This rank's part of the state, by parameter; a view that can be read and cleared."""
        return LocalState(self._params, self._local)

    @state.setter
    def state(self, value: Mapping[torch.Tensor, Any]) -> None:
        # The base class's own mapping is not used: the state is the local optimizer's.
        if self.initialized:
            if value:
                raise TypeError("the state is divided among ranks; set it with load_state_dict()")
            self.state.clear()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Put the whole state together on one rank, in its CPU memory.

        Called on every rank. Afterwards `state_dict()` may be called on rank `to`.

        Args:
            to: the rank, within the process group, that receives the state.

        Raises:
            ValueError: on every rank, if there is no such rank, or ranks say different ones.
            RuntimeError: on every rank, if there is state that cannot be sent.
        """

        def make() -> tuple[int, list[str]]:
            if not 0 <= to < self.world_size:
                raise ValueError(f"to={to} is not a rank of this group of {self.world_size} ranks")
            return to, [f"to={to}"]

        check_same_on_all_ranks(self._comm, "consolidate_state_dict", make)
        specs = self._plan.specs
        everything = {index: Interval(0, spec.numel) for index, spec in enumerate(specs)}

        def move(states: Mapping[int, Any]) -> dict[int, Any]:
            moved = move_state(
                self._comm,
                specs,
                held=[self._plan.intervals(rank) for rank in range(self.world_size)],
                wanted=[everything if rank == to else {} for rank in range(self.world_size)],
                states=states,
                device=lambda index, leaf: torch.device("cpu"),
            )
            return dict(sorted(moved.items()))

        states = move(self._local.states())
        masters = move(self._masters()) if self._widened else {}
        self._consolidated = None
        if self.rank == to:
            self._local.push_options()
            self._local.publish_options()
            self._consolidated = {
                "state": {**states, **copy.deepcopy(self._local.global_state())},
                "param_groups": pack_groups(self.param_groups),
                **copy.deepcopy(extras(self.optim)),
            }
            if masters:
                self._consolidated["masters"] = masters
            if self._precision.stochastic_rounding:
                self._consolidated["rounding_step"] = self._rounding.step

    def state_dict(self) -> StateDict:
        """The state as `consolidate_state_dict` last put it together on this rank.

        It is what the unsharded optimizer's `state_dict()` would be, with tensors on the CPU, and
        loads into a plain `torch.optim` optimizer. Masters, if there are any, are beside that under
        `"masters"`, by number of the parameter and in its shape. For
        `torch.distributed.checkpoint`, which saves each rank's part, wrap the optimizer in
        `shardstep.checkpoint.Sharded`.

        Raises:
            RuntimeError: if the state was not consolidated on this rank.
        """
        return self._run_state_dict_hooks(self._consolidated_here)

    @property
    def shards(self) -> ShardView:
        """This rank's share of the state, as checkpoints see it."""
        return ShardView(self)

    def _run_load_hooks(self, state_dict: StateDict, load: Callable[[StateDict], None]) -> None:
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        load(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _run_state_dict_hooks(self, make: Callable[[], StateDict]) -> StateDict:
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = make()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def _consolidated_here(self) -> StateDict:
        if self.world_size == 1:
            self.consolidate_state_dict()
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self.rank} holds only its share of the optimizer state; to get all of it "
                f"here, call consolidate_state_dict(to={self.rank}) on all {self.world_size} ranks "
                f"of the process group first, and then state_dict() on rank {self.rank}; for "
                "torch.distributed.checkpoint, pass shardstep.checkpoint.Sharded(optimizer)"
            )
        return {
            **{key: copy.copy(value) for key, value in self._consolidated.items()},
            "param_groups": [dict(group) for group in self._consolidated["param_groups"]],
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take this rank's share out of a full state dict.

        Called on every rank; nothing is sent.

        The dict may come from here, at any world size and layout, from the plain `torch.optim`
        class, or from FSDP2 and DDP with names for the parameters, nested or flat, as
        `get_optimizer_state_dict` gives it in full; names are matched to names. It is not changed,
        and nothing keeps hold of its tensors. Masters are taken from it if it has any, and made of
        the parameters otherwise. A dict that lacks the state of parameters that train is warned of.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            ValueError: if it does not fit this optimizer's parameters; nothing is loaded then.
        """
        self._run_load_hooks(state_dict, self._load_full)

    def _load_full(self, state_dict: StateDict) -> None:
        names = [spec.name for spec in self._plan.specs]
        state_dict = dict(numbered(state_dict, self.param_groups, names))
        self._widen(described_in(state_dict, self.param_groups))
        masters = masters_in(state_dict, self.param_groups, self._plan, self.rank)
        present = load_share(
            state_dict,
            groups=self.param_groups,
            plan=self._plan,
            group_rank=self.rank,
            local=self.optim,
        )
        self._set_masters(masters)
        self._rounding.step = state_dict.get("rounding_step", self._rounding.step)
        self._local.publish_options()
        warn_of_missing_state(self._local.rehearse, self._plan, self.rank, present)

    def _widen(self, params: Iterable[int]) -> None:
        """Let these, which are about to be given state, have masters if they ever may.

        Those that train have them. State of one that was frozen from the start is that of its
        master too, and must not be cast to 16 bits. Who owns what stays as it is, and nothing is
        sent: a rank may load alone.
        """
        specs = self._plan.specs
        given = set(params)
        self._begun |= given
        more = {
            index
            for index in given
            if self._precision.step_dtype(specs[index].dtype) != specs[index].dtype
        }
        if not more <= self._widened:
            self._refuse_to_lose_gradients("loading state of frozen parameters")
            self._widened |= more
            self._switch(self._plan, self._local.states(), self._masters())

    def _masters(self) -> dict[int, torch.Tensor]:
        """This rank's masters, by number of the parameter; empty if there are none.

        Flat for a piece that is part of a parameter, in the parameter's shape for an entire one.
        They are the ones in use, not copies, and in step with the parameters.
        """
        self._gather.land()
        return self._shard.masters()

    def _set_masters(self, masters: Mapping[int, torch.Tensor]) -> None:
        """Take these, in the form that `_masters()` gives; make others from the parameters.

        Where a parameter does not hold the rounding of its master when the next step is taken, the
        parameter is right and the master is made anew.
        """
        self._gather.land()
        self._shard.take_masters(None)
        self._shard.take_masters(masters)

    # ------------------------------------------------------------------------- uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank that ran out of data does while the others go on; takes no options.

        Without `module`, list the joinable that synchronises gradients first, as in
        `Join([ddp_model, optimizer])`. With `module`, list the optimizer first.
        """
        refuse_dtensors(
            zip((spec.name for spec in self._plan.specs), self._params, strict=True),
            "ranks that have run out of data cannot be given gradients of parts; give all ranks as "
            "many batches",
        )
        return _ZeROJoinHook(self._shadow_step if self._module is None else self._shadow)

    def _shadow_step(self) -> None:
        """Take the step that ranks with data take. Called on every rank that has none."""
        if self._overlap_with_ddp and not self._step_owed:
            return  # they only add up, under DDP's no_sync
        self._step_owed = False
        if self._reducer is None:
            provide_gradients(self._comm, self._plan, self.param_groups, joined=True)
        self._shadowing = True
        try:
            if self._overlap_with_ddp:
                self._step_in_backward()
            else:
                self.step()
        finally:
            self._shadowing = False

    def _shadow_announced_step(self, options: list[dict[str, Any]]) -> None:
        take_options(self.param_groups, options)
        self.step()

    def _announce(self, kind: str, arguments: Callable[[], list[Any]]) -> None:
        """Under `Join`, tell ranks without data what is about to happen. Called on every rank."""
        if self._module is None or self._shadowing or not self._join_config.enable:
            return
        if not self._join_config.is_first_joinable:
            raise RuntimeError(
                "an optimizer with module= has to be the first in Join([...]): what it does is "
                "what the other ranks have to shadow"
            )
        Join.notify_join_context(self)
        assert isinstance(self._gradients, GradReducer)
        assert self._tie is not None
        # Nobody is told when gradients are cleared; all act on those that were not.
        act = [kind, self._gradients.kept(), arguments()]
        _, self._tie.source = announced(self._comm, act)

    def _shadow(self) -> None:
        """Do what the ranks that have data are doing. Called on every rank that has none."""
        assert isinstance(self._gradients, GradReducer)
        assert self._tie is not None
        # Buffers follow a rank that still has data to update them with.
        (kind, kept, arguments), self._tie.source = announced(self._comm, None)
        self._gradients.keep(kept)
        acts: dict[str, Callable[..., object]] = {
            "round": self._gradients.shadow_round,
            "clip": self._gradients.shadow_clip,
            "unscale": self._gradients.shadow_unscale,
            "zero": lambda: self.zero_grad(set_to_none=False),
            "buffers": self._tie.sync_buffers,
            "step": self._shadow_announced_step,
        }
        self._shadowing = True
        try:
            acts[kind](*arguments)
        finally:
            self._shadowing = False

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._params[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self.process_group


def _beside(param: torch.Tensor, leaf: Leaf) -> torch.device:
    """State lies where its parameter does, unless it was kept on the CPU."""
    return torch.device("cpu") if leaf.on_cpu else param.device
