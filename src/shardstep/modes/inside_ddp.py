"""`overlap_with_ddp=True`: the step is taken inside the backward pass of a DDP module."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from typing_extensions import override

from shardstep.comm import Comm, all_gather_json, naming
from shardstep.comm.consensus import run_on_all_ranks
from shardstep.comm.join import JoinContext
from shardstep.gather import OverlappedGather, ParamGather
from shardstep.gradients import DDPFeeder, GradientSource, GradReducer
from shardstep.gradients.base import piece_gradient
from shardstep.gradients.reducer import at_end_of_backward
from shardstep.local.multi_class import optimizer_name, parts_of
from shardstep.modes.base import Mode
from shardstep.modes.join import keep_gradients, provide_gradients, share_options
from shardstep.params.inputs import describe, describe_options
from shardstep.params.module import ModuleWatch
from shardstep.params.names import unwrapped
from shardstep.params.sharded_params import ShardedParams
from shardstep.pipeline import Closure, Pipeline


class InsideDDP(Mode):
    """The step runs inside DDP's backward; `step()` only runs the user's hooks on it.

    Until a hook ties it to a DDP module, gathers do not overlap and nothing steps.

    Attributes:
        feeder: takes the gradients in DDP's buckets, if they are reduced here.
        stepper: steps one bucket at a time, if the hook does.
        awaits_rebuild: whether DDP has yet to rebuild its buckets, and copies `param.grad` then.
    """

    title = "inside DDP's backward"
    stepper: BucketStepper

    def __init__(self, comm: Comm, join: JoinContext, module: torch.nn.Module | None) -> None:
        super().__init__(comm, join, module)
        self._module: torch.nn.Module | None = None
        self._strides: list[tuple[int, ...]] = []
        self.feeder = DDPFeeder()
        self.awaits_rebuild = False
        self._stepped_in_backward = False
        self._detached = False
        # Whether the ranks that have data are taking a step; known on a joined rank.
        self._step_owed = False

    def tie_to_ddp(self, module: torch.nn.Module, reduce: bool) -> InsideDDP:
        """Let the step run inside the backward pass of a DDP module. Called on every rank.

        With `reduce`, reduce the gradients in DDP's buckets here.
        """
        self.pipeline.gather.detach()
        self.pipeline.gradients.detach()
        if reduce:
            self.comm, self.gather_comm = self.comm.new_pair()
        else:
            self.gather_comm = self.comm.new_connection()
        self.stepper = BucketStepper(self)
        self._module = module
        self._strides = [param.stride() for param in self.params]
        if self.known_module is None:
            self._name_after(module)
        self.reduces_gradients = reduce
        self.zeroes_in_place = not reduce
        params = self.pipeline.params
        gradients, gather = self.make_gradients(params), self.make_gather(params)
        self.pipeline = replace(self.pipeline, gradients=gradients, gather=gather)
        return self

    def _name_after(self, module: torch.nn.Module) -> None:
        """Give parameters that came in a list the names that they have in `module`."""
        self.known_module = unwrapped(module)
        self.watch = ModuleWatch(self.known_module)
        named = zip(self.plan.specs, describe(self.groups, self.names()), strict=True)
        specs = tuple(replace(spec, name=found.name) for spec, found in named)
        self.pipeline.params.plan = replace(self.plan, specs=specs)

    @override
    def make_gradients(self, params: ShardedParams) -> GradientSource:
        if not self.reduces_gradients:
            return super().make_gradients(params)
        self.feeder = DDPFeeder()
        return GradReducer(
            self.comm, params, self.feeder, self.precision, True, None, self.lockstep
        )

    @override
    def make_gather(self, params: ShardedParams) -> ParamGather:
        if self._module is None:
            return super().make_gather(params)
        return OverlappedGather(self.gather_comm, params, self._module)

    # ----------------------------------------------------------------------------------- the step

    def before_forward(self, *args: Any) -> None:
        """Raise if the last step failed on another rank, before DDP waits for that rank.

        Or if the optimizer was detached, or a parameter was put into the module that would never be
        stepped, or one has another memory format than in DDP's buckets.
        """
        self.pipeline.gather.wait_for_errors()
        if torch.is_grad_enabled():
            if self._detached:  # DDP cannot give up its hook
                raise RuntimeError(
                    f"rank {self.comm.group_rank}: the optimizer that steps inside this DDP module "
                    "was detached; wrap the module in DistributedDataParallel again"
                )
            self.watch.check(self.params)
            self._check_strides()

    def _check_strides(self) -> None:
        # DDP writes gradients into its buckets with the strides that parameters had when it made
        # them, and reads them with the strides of now.
        with torch._C.DisableTorchFunctionSubclass():  # do not wait for parameters in flight
            strides = [param.stride() for param in self.params]
        for spec, old, new in zip(self.plan.specs, self._strides, strides, strict=False):
            if old != new:
                raise ValueError(
                    f"rank {self.comm.group_rank}: parameter {spec.name!r} got another memory "
                    "format inside DDP, which would mix up the elements of its gradient; change "
                    "it before DistributedDataParallel(...)"
                )

    def taking_bucket(self) -> AbstractContextManager[None]:
        """Mark what is sent meanwhile as shadowed, if this rank has run out of data.

        DDP hands a joined rank its buckets outside of any backward pass, and before the join hook
        of this optimizer runs. The note of the round leaves with the last bucket.
        """
        return self.join.shadow() if torch._C._current_graph_task_id() == -1 else nullcontext()

    def step_after_ddp(self) -> None:
        """Step at the end of this backward pass, after DDP has written to `param.grad`.

        DDP queues its own callback after the hook of its last bucket, so ours is queued from within
        a first one. A joined rank runs DDP's hooks outside of any backward pass; it steps in its
        join hook instead.
        """

        def queue_behind_ddp() -> None:
            at_end_of_backward(self._step_now)

        self._step_owed = not at_end_of_backward(queue_behind_ddp)

    def _step_now(self) -> None:
        self._stepped_in_backward = True
        super().step()
        if self.reduces_gradients:
            self.local.let_go_of_gradients()
            if self.awaits_rebuild and self.join.enabled and not self.join.shadowing:
                # If this rank joins next, DDP rebuilds its buckets before any hook of ours runs.
                self.feeder.drop_placeholders()

    @override
    def before_step(self) -> None:
        if self.join.enabled and not self.join.shadowing:
            self.join.notify()
            self._provide(joined=False)
        if self.reduces_gradients:
            self.pipeline.gradients.collect()  # notes travel with every round
        else:
            self.lockstep.exchange(self.comm, self.pipeline.params)

    def _provide(self, joined: bool) -> None:
        """Send joined ranks the options of the groups, and gradients unless they are reduced."""
        if self.reduces_gradients:
            share_options(self.comm, self.groups, joined)
        else:
            provide_gradients(self.comm, self.plan, self.groups, joined)

    @override
    def shadow(self, step: Callable[[], object], zero_grad: Callable[[bool], object]) -> None:
        if not self._step_owed:
            return  # the others only accumulate, under DDP's no_sync
        self._step_owed = False
        reduced = self.reduces_gradients  # then param.grad does not have the rank's own gradients
        with self.join.shadow(), nullcontext() if reduced else keep_gradients(self.params):
            self._provide(joined=True)
            self._step_now()
        self.hide_placeholders()  # DDP may rebuild its buckets before the next one

    @override
    def end_join(self) -> None:
        self.show_placeholders()
        if self.reduces_gradients:
            # The last rank with data may have cleared gradients after its last step.
            kept = all_gather_json(self.comm, [param.grad is not None for param in self.params])
            for index, param in enumerate(self.params):
                if not all(each[index] for each in kept):
                    param.grad = None

    def hide_placeholders(self, *args: Any) -> None:
        """Take the placeholders out of `param.grad`, which DDP copies when it rebuilds buckets."""
        if self.reduces_gradients:
            self.feeder.hide_placeholders()

    def show_placeholders(self, *args: Any) -> None:
        """Put hidden placeholders back."""
        self.feeder.show_placeholders()

    @override
    def step(self, closure: Closure | None = None, **kwargs: Any) -> None:
        """Check that the step was taken inside backward."""
        if closure is not None:
            raise ValueError(
                "with overlap_with_ddp=True the step is taken inside backward, so step() cannot "
                "evaluate a closure"
            )
        if self._module is None:
            raise RuntimeError(
                "with overlap_with_ddp=True the step is taken inside DDP's backward, but no DDP "
                "module was tied to this optimizer: call shardstep.register(ddp, optimizer), or "
                "register hook_with_zero_step(...) with it"
            )
        if not self._stepped_in_backward and any(p.grad is not None for p in self.params):
            raise RuntimeError(
                "with overlap_with_ddp=True the step is taken inside DDP's backward, but none was: "
                "register the hook with ddp.register_comm_hook(...)"
            )

    @property
    @override
    def inside_ddp(self) -> InsideDDP:
        return self

    @override
    def detach(self) -> None:
        super().detach()
        self._detached = True

    @override
    def check_change(self, what: str) -> None:
        raise RuntimeError(
            f"{what} comes too late with overlap_with_ddp=True: the step was taken inside "
            "backward, on the gradients as they were; use module= instead"
        )

    def end_interleaved(self, counts_steps: bool, error: Exception | None) -> None:
        """Refuse a class that counts its own steps; count this one. Called on every rank."""

        def check() -> None:
            if counts_steps:
                raise RuntimeError(
                    f"{optimizer_name(self.optim)} counts its steps, so it cannot step one bucket "
                    "at a time; use hook_with_zero_step"
                )

        if not self._stepped_in_backward:
            # A rank that owns nothing may not see it.
            run_on_all_ranks(self.comm, "stepping one bucket at a time", check)
        self._stepped_in_backward = True
        check()
        # Not earlier: ranks find their first bucket reduced at different times.
        self.lockstep.exchange(self.comm, self.pipeline.params)
        self.local.refuse_hand_edit()  # a single rank exchanges no notes

        def count() -> None:
            self.lockstep.steps += 1
            if error is not None:
                self.lockstep.raised += 1
                raise error

        # An error that came before DDP's own callback would leave DDP in the middle of backward.
        if not at_end_of_backward(count):
            count()


@dataclass(slots=True)
class _Reduction:
    """A DDP bucket that is being reduced: its parameters, their offsets in it, and the result."""

    params: list[int]
    offsets: list[int]
    future: torch.futures.Future[torch.Tensor]


@contextmanager
def _bucket_gradients(pipeline: Pipeline, grads: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Give the pieces of one DDP bucket their gradients."""
    params = pipeline.params
    for piece, tensor in params.shard:
        if piece.param in grads:
            stride = params.params[piece.param].stride()
            tensor.grad = piece_gradient(grads[piece.param], piece, stride, tensor.dtype)
    try:
        yield
    finally:
        pipeline.local.let_go_of_gradients()
        for _, tensor in params.shard:
            tensor.grad = None


class BucketStepper:
    """Steps DDP's buckets in order, each once it is reduced.

    Timing decides when a bucket is found to be reduced, and may differ between ranks. The order of
    updates and gathers does not.
    """

    def __init__(self, mode: InsideDDP) -> None:
        self.mode = mode
        self._index_of: dict[torch.Tensor, int] = {}
        self._waiting: deque[_Reduction] = deque()
        self._step: ExitStack | None = None
        self._counts_steps = False
        self._edited = False
        self._error: Exception | None = None
        # Parameters of each of our buckets that are yet to be updated.
        self._missing: list[set[int]] = []

    def add(self, bucket: GradBucket, future: torch.futures.Future[torch.Tensor]) -> None:
        """Take a bucket that is being reduced, and step those that are. Called on every rank."""
        if bucket.is_last():
            at_end_of_backward(self._finish)
        if len(self._index_of) != len(self.mode.params):
            self._index_of = {param: index for index, param in enumerate(self.mode.params)}
        start = bucket.buffer().storage_offset()
        self._waiting.append(
            _Reduction(
                [self._index_of[param] for param in bucket.parameters()],
                [int(grad.storage_offset() - start) for grad in bucket.gradients()],
                future,
            )
        )
        while self._waiting and self._waiting[0].future.done():
            self._step_next()

    def _step_next(self) -> None:
        """Step on the gradients of one bucket, and gather our buckets that are complete."""
        mode = self.mode
        if self._step is None:
            self._begin()
        reduction = self._waiting.popleft()
        with naming(f"rank {mode.comm.group_rank}: waiting for DDP's hook"):
            value = reduction.future.wait()
        result = value[0] if isinstance(value, Sequence) else value
        grads = {}
        for index, offset in zip(reduction.params, reduction.offsets, strict=True):
            spec = mode.plan.specs[index]
            start = result.storage_offset() + offset
            grads[index] = result.as_strided(spec.shape, spec.stride, start)
        pipeline = mode.pipeline
        before = _step_counters(mode.optim)
        try:
            if not self._edited:
                gradients = _bucket_gradients(pipeline, grads)
                pipeline.update(gradients, pipeline.local.step, grads)
        except Exception as error:
            # Not raised inside DDP's hook: the other ranks wait for its later buckets.
            self._error = self._error or error
        self._counts_steps = self._counts_steps or _step_counters(mode.optim) != before
        complete = []
        for number, missing in enumerate(self._missing):
            if missing and not missing.difference(grads):
                complete.append(number)
            missing.difference_update(grads)
        # Backward is not over. An operation that still needs an old value has to fail, on every
        # rank, and not find a new one.
        pipeline.mark_changed(grads)
        pipeline.gather.launch(complete)

    def _begin(self) -> None:
        # Groups that were edited by hand are refused at the end: until then the other ranks wait
        # for this one's buckets.
        self._edited = self.mode.pipeline.params.hand_edit() is not None
        step = ExitStack()
        if self._edited:
            self.mode.pipeline.gather.wait()
        else:
            self.mode.follow(stepping=True)
            step.enter_context(self.mode.pipeline.stepping())
            self.mode.local.push_options()  # `_step_counters` looks at them
        self._step = step  # not earlier: any of these may raise
        self._counts_steps = False
        self._missing = [
            {slot.param for slot in bucket.slots} for bucket in self.mode.plan.training_buckets
        ]

    def _finish(self) -> None:
        while self._waiting:
            self._step_next()
        assert self._step is not None  # a bucket was stepped on just now
        self._step.close()
        self._step = None
        error, self._error = self._error, None
        rest = [number for number, missing in enumerate(self._missing) if missing]
        self.mode.pipeline.gather.end_step(error, rest)
        self.mode.end_interleaved(self._counts_steps, error)


def _step_counters(optim: Optimizer) -> list[str]:
    """Return all values outside the state of tensors in which an optimizer may count steps.

    Of a tensor on an accelerator it is the number of writes, except those through `.data`: the host
    would have to wait for its values.
    """

    def noted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        here = value.device.type == "cpu" or value.is_inference()
        return value.tolist() if here else (id(value), value._version)

    numbers = [
        {key: v for key, v in vars(part).items() if type(v) in (int, float)}
        for part in parts_of(optim)
    ]
    loose = {key: v for key, v in optim.state.items() if not isinstance(key, torch.Tensor)}
    values = tree_map(noted, [numbers, loose])
    return [*describe_options(optim.param_groups, noted), repr(values)]
