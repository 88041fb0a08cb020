"""For users who keep DDP: its communication hooks, with the optimizer's step in them.

Three ways, each one line, and each takes the step within `loss.backward()`; `zero.step()` stays
callable and does nothing then:

- `hook_with_zero_step`: DDP reduces gradients as the given hook says; when it is done, the
  optimizer steps, and the gathers of the updated parameters run while the next forward does.
- `hook_with_zero_step_interleaved`: what a bucket of DDP's brings is stepped as soon as it is
  reduced, while DDP goes on with the others.
- `register`: gradients are reduced to their owners instead of to everybody, which saves a third of
  the traffic: 2Ψ instead of 3Ψ.

The optimizer's placement is its own and does not depend on DDP's buckets, so nothing has to wait
until DDP has settled on them: the first iteration steps like any other.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the classes
# themselves.

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardstep.comm.consensus import check_same_on_all_ranks
from shardstep.gradients.full import part_of
from shardstep.gradients.reducer import GradReducer, _Round, at_end_of_backward
from shardstep.gradients.sharded_grad import ShardedGrad
from shardstep.local.multi_class import optimizer_name, parts_of
from shardstep.optimizer import ZeroRedundancyOptimizer
from shardstep.params.inputs import describe_options

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""A DDP communication hook."""


def hook_with_zero_step(
    hook: CommHook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> CommHook:
    """A DDP communication hook that reduces with `hook` and steps `zero` at the end of backward.

    Called on every rank.

    Args:
        hook: any DDP communication hook, such as `allreduce_hook`.
        ddp: the DDP module; the hook that is returned is to be registered with it.
        zero: the optimizer, over the parameters of `ddp`, with `overlap_with_ddp=True`.
        shard_buckets: accepted for compatibility. Every bucket is divided among all ranks anyway.

    Raises:
        TypeError: if one of the two is something else.
        ValueError: if `zero` was not constructed for this, or has other parameters than `ddp`.
    """
    _check(ddp, zero)
    _check_wire(zero)
    zero._gather_ahead_of(ddp.module)

    def reduce_then_step(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        _check_join(ddp, zero)
        future = hook(state, bucket)
        if bucket.is_last():
            _step_after_ddp(zero)
        return future

    return reduce_then_step


def hook_with_zero_step_interleaved(
    hook: CommHook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> CommHook:
    """A DDP communication hook that steps each bucket as soon as it is reduced.

    Called on every rank.

    The optimizer class has to treat tensors one at a time, as all of `torch.optim` do that can be
    sharded; one that counts its steps anywhere else is refused. If `ddp` allows for unused
    parameters, with `find_unused_parameters` or `static_graph`, which of them are is known only at
    the end, and the step is taken there; likewise under `Join`.

    A parameter that backward still needs after its own gradient is there, such as one that the
    model also reads through `detach()`, makes autograd raise that it was modified in place: use
    `hook_with_zero_step` for such a model.

    Args:
        hook: any DDP communication hook, such as `allreduce_hook`.
        ddp: the DDP module; the hook that is returned is to be registered with it.
        zero: the optimizer, over the parameters of `ddp`, with `overlap_with_ddp=True`.
        shard_buckets: accepted for compatibility. Every bucket is divided among all ranks anyway.

    Raises:
        TypeError: if one of the two is something else.
        ValueError: if `zero` was not constructed for this, or has other parameters than `ddp`.
    """
    _check(ddp, zero)
    _check_wire(zero)
    _check_dense(ddp)
    zero._gather_ahead_of(ddp.module)
    stepper = _BucketStepper(zero)

    def reduce_and_step(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        _check_join(ddp, zero)
        future = hook(state, bucket)
        # Ranks without data need the gradients of what they own, and which parameters are unused
        # everywhere is found out last.
        if ddp._join_config.enable or ddp.find_unused_parameters or ddp.static_graph:
            if bucket.is_last():
                _step_after_ddp(zero)
        else:
            stepper.add(bucket, future)
        return future

    return reduce_and_step


def register(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
    """Have `ddp` reduce each gradient to its owner alone, and step at the end of backward.

    Called on every rank.

    `param.grad` holds no numbers afterwards, as with `module=`: `zero.full_grad` has them. To
    change gradients before the step, such as to clip them, is not possible in this way: it has been
    taken when backward returns. Clear them with `zero.zero_grad()` before the next backward.

    Args:
        ddp: the DDP module; it must not have a communication hook yet.
        zero: the optimizer, over the parameters of `ddp`, with `overlap_with_ddp=True`.

    Raises:
        TypeError: if one of the two is something else.
        ValueError: if `zero` was not constructed for this, or has other parameters than `ddp`.
    """
    _check(ddp, zero)
    _check_dense(ddp)
    if _ranks(zero.process_group) != _ranks(ddp.process_group):
        raise ValueError(
            "gradients are reduced within the optimizer's process group alone, so it has to consist"
            f" of the ranks of the DDP module's, {_ranks(ddp.process_group)}, not of "
            f"{_ranks(zero.process_group)}"
        )
    zero._reduce_to_owners(ddp.module, OfferedGradients)
    index_of = _numbers(zero)

    def offer(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        _check_join(ddp, zero)
        if ddp._join_config.enable and not ddp._divide_by_initial_world_size:
            raise RuntimeError(
                "gradients that are reduced to their owners are divided by the number of all ranks;"
                " leave out Join's divide_by_initial_world_size=False"
            )
        gradients = zero._gradients
        assert isinstance(gradients, OfferedGradients)
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradients.offer(index_of[param], grad)
        if bucket.is_last():
            _step_after_ddp(zero)
        return _done(bucket.buffer())

    ddp.register_comm_hook(None, offer)


def _check(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
    # A compiled module passes on what it is asked for.
    within = getattr(ddp, "_orig_mod", ddp)
    if not (
        isinstance(within, DistributedDataParallel) and isinstance(zero, ZeroRedundancyOptimizer)
    ):
        raise TypeError(
            "ddp has to be a DistributedDataParallel and zero a ZeroRedundancyOptimizer of this "
            f"library, not a {type(ddp).__name__} and a {type(zero).__name__}; without DDP, "
            "construct the optimizer with module="
        )
    if not zero._overlap_with_ddp:
        raise ValueError(
            "this hook steps the optimizer inside backward, so the optimizer has to be constructed "
            "with overlap_with_ddp=True"
        )
    if not set(_ranks(zero.process_group)) <= set(_ranks(ddp.process_group)):
        raise ValueError(
            f"the optimizer's process group, of ranks {_ranks(zero.process_group)}, reaches beyond "
            f"the DDP module's, of ranks {_ranks(ddp.process_group)}, so its ranks would step on "
            "different gradients; construct both with the same process_group"
        )
    names = {param: name for name, param in ddp.module.named_parameters()}
    held = {param for group in zero.param_groups for param in group["params"]}
    for number, param in enumerate(p for g in zero.param_groups for p in g["params"]):
        if param not in names:
            raise ValueError(
                f"parameter {number} of the optimizer is not a parameter of the DDP module; "
                "construct the optimizer with ddp.parameters()"
            )
    for param, name in names.items():
        if param.requires_grad and param not in held:
            raise ValueError(
                f"parameter {name!r} of the DDP module trains but was not given to the optimizer; "
                "construct the optimizer with ddp.parameters()"
            )
        if param.requires_grad and name in ddp.parameters_to_ignore:
            raise ValueError(
                f"parameter {name!r} of the DDP module trains but DDP was told to leave it out of "
                "its buckets, so no hook would see its gradient; freeze it or let DDP have it"
            )


def _check_wire(zero: ZeroRedundancyOptimizer) -> None:
    if zero._precision.reduce_dtype is not None:
        raise ValueError(
            f"reduce_dtype={zero._precision.reduce_dtype} has no effect here: the communication "
            "hook that is wrapped says in which dtype gradients travel; use register(ddp, zero)"
        )


def _check_dense(ddp: DistributedDataParallel) -> None:
    for name, part in ddp.module.named_modules():
        if getattr(part, "sparse", False) and isinstance(
            part, (torch.nn.Embedding, torch.nn.EmbeddingBag)
        ):
            raise ValueError(
                f"module {name!r} makes sparse gradients, which cannot be taken out of DDP's "
                'buckets; use hook_with_zero_step and layout="whole", or sparse=False'
            )


def _check_join(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
    """Make sure that ranks without data will shadow the step. Called on every rank."""
    if ddp._join_config.enable and not (
        zero._join_config.enable and ddp._join_config.is_first_joinable
    ):
        raise RuntimeError(
            "ranks that run out of data have to take part in DDP's reductions first and in the "
            "optimizer's step then: use Join([ddp, zero])"
        )


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def _numbers(zero: ZeroRedundancyOptimizer) -> dict[torch.Tensor, int]:
    params = (param for group in zero.param_groups for param in group["params"])
    return {param: index for index, param in enumerate(params)}


def _done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    devices = [result.device] if result.device.type != "cpu" else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
    future.set_result(result)
    return future


def _step_after_ddp(zero: ZeroRedundancyOptimizer) -> None:
    """Step at the end of this backward pass, after DDP has put its results into `param.grad`.

    DDP asks for its own call back after its last bucket's hook: so ours asks again, from within.
    A joined rank runs DDP's hooks outside of any backward pass; it steps in its join hook instead.
    """

    def then() -> None:
        at_end_of_backward(zero._step_in_backward)

    zero._step_owed = not at_end_of_backward(then)


@dataclass(slots=True)
class _Reduced:
    """A bucket on its way: its parameters, where each lies in it, and the reduction."""

    params: list[int]
    offsets: list[int]
    future: torch.futures.Future[torch.Tensor]


class _BucketStepper:
    """Steps DDP's buckets in their order, each once it is reduced.

    Whether a bucket is reduced by the time another comes is a matter of timing and may differ
    between ranks; the order of what is done is not.
    """

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero
        self._index_of: dict[torch.Tensor, int] = {}
        self._waiting: deque[_Reduced] = deque()
        self._begun = False
        self._missing: list[set[int]] = []
        self._counting = False

    def add(self, bucket: GradBucket, future: torch.futures.Future[torch.Tensor]) -> None:
        """Take a bucket that is being reduced, and step those that are. Called on every rank."""
        if bucket.is_last():
            at_end_of_backward(self._finish)
        if len(self._index_of) != len(self._zero._params):
            self._index_of = _numbers(self._zero)
        start = bucket.buffer().storage_offset()
        self._waiting.append(
            _Reduced(
                [self._index_of[param] for param in bucket.parameters()],
                [int(grad.storage_offset() - start) for grad in bucket.gradients()],
                future,
            )
        )
        while self._waiting and self._waiting[0].future.done():
            self._step_next()

    def _step_next(self) -> None:
        if not self._begun:
            self._begin()
        reduced = self._waiting.popleft()
        value = reduced.future.wait()
        result = value[0] if isinstance(value, Sequence) else value
        grads = {}
        for index, offset in zip(reduced.params, reduced.offsets, strict=True):
            spec = self._zero.plan.specs[index]
            grads[index] = result.as_strided(
                spec.shape, spec.stride, result.storage_offset() + offset
            )
        self._step(grads)

    def _begin(self) -> None:
        self._begun = True
        self._zero._prepare_step()
        self._missing = [
            {slot.param for slot in bucket.slots} for bucket in self._zero.plan.training_buckets
        ]
        self._counting = False

    def _step(self, grads: Mapping[int, torch.Tensor]) -> None:
        """Step on these gradients alone, and gather what is complete. Called on every rank."""
        zero = self._zero
        for piece, tensor in zero._shard:
            if piece.param in grads:
                param = zero._params[piece.param]
                tensor.grad = part_of(grads[piece.param], piece, param, tensor.dtype)
        before = _counts(zero.optim)
        zero._local.step()
        self._counting = self._counting or _counts(zero.optim) != before
        for _, tensor in zero._shard:
            tensor.grad = None
        zero._shard.settle(zero._local.let_go, grads)
        complete = []
        for number, missing in enumerate(self._missing):
            if missing and not missing.difference(grads):
                complete.append(number)
            missing.difference_update(grads)
        # Backward is not over: whoever still needs an old value has to fail, on every rank, and not
        # find a new one.
        torch.autograd.graph.increment_version([zero._params[index] for index in grads])
        zero._gather.launch(complete)

    def _finish(self) -> None:
        while self._waiting:
            self._step_next()
        self._begun = False
        zero = self._zero
        zero._stepped = True
        zero._shard.end()
        zero._gather.launch([number for number, missing in enumerate(self._missing) if missing])
        zero._local.publish_options()
        if not zero._stepped_in_backward:
            # Where a rank owns nothing, there may be nothing to see.
            check_same_on_all_ranks(
                zero._comm, "stepping one bucket at a time", self._refuse_to_count
            )
        zero._stepped_in_backward = True
        self._refuse_to_count()

    def _refuse_to_count(self) -> tuple[bool, list[str]]:
        if self._counting:
            raise RuntimeError(
                f"{optimizer_name(self._zero.optim)} counts its steps, so it cannot step one "
                "bucket at a time; use hook_with_zero_step"
            )
        return True, []


def _counts(optim: Optimizer) -> list[str]:
    """What an optimizer keeps beside the state of its tensors and may count steps in."""
    numbers = [
        {key: v for key, v in vars(part).items() if type(v) in (int, float)}
        for part in parts_of(optim)
    ]
    loose = {key: v for key, v in optim.state.items() if not isinstance(key, torch.Tensor)}
    return [*describe_options(optim.param_groups), repr(numbers), repr(loose)]


class OfferedGradients(GradReducer):
    """Gradients come out of DDP's buckets, not `param.grad`, and every backward makes a step."""

    _offered: dict[int, torch.Tensor]

    def _watch(self) -> None:
        self._offered = {}

    def offer(self, index: int, grad: torch.Tensor) -> None:
        """Take one parameter's gradient; it has to stay as it is until the end of backward."""
        # DDP fills in zeros for a parameter that had no part in this pass, and for all of them on
        # a rank without data, whose stand-ins are left over.
        local = self._params[index].grad
        if local is not None and not isinstance(local, ShardedGrad):
            self._offered[index] = grad
        self._arrived(index)

    def _held(self) -> bool:
        """Never: each backward starts anew."""
        return False

    def _kept(self, params: Sequence[int]) -> set[int]:
        return set()

    def _take(self, index: int) -> torch.Tensor | None:
        self._start_over(index)
        return self._offered.pop(index, None)

    def _stand_in(self, index: int) -> None:
        """Not yet: DDP is still going to write to `param.grad`."""

    def _end_with_backward(self, current: _Round) -> None:
        """Nothing: the step does it, at the end of the pass in which DDP's last bucket came.

        Passes within it, such as those of reentrant activation checkpointing, end earlier.
        """

    def collect(self) -> None:
        """Finish the reductions, and put the stand-ins where DDP has left its own share."""
        if self._round is not None:
            for index in self._trained:
                self._params[index].grad = self._standing[index]
        super().collect()

    def hold_back(self) -> None:
        """Not this optimizer's business here."""
        raise RuntimeError("it is DDP's to say when gradients are only added up: use ddp.no_sync()")

    def zero(self, set_to_none: bool) -> None:
        """Forget the gradients. Called on every rank."""
        if not set_to_none:
            self.zero_some(self._trained)
        super().zero(set_to_none)

    def zero_some(self, params: Sequence[int]) -> None:
        """Not possible: DDP would take zeros for a gradient to add to."""
        raise ValueError(
            "gradients that DDP has reduced to their owners can be cleared, but not set to zero: "
            "call zero_grad() without set_to_none=False"
        )
