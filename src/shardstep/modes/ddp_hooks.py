"""DDP communication hooks that step the optimizer inside `loss.backward()`.

Each takes one line; `zero.step()` stays callable, and only runs the user's hooks on it:

- `hook_with_zero_step`: DDP reduces gradients with the given hook. When it is done, the optimizer
  steps, and gathers overlap with the next forward.
- `hook_with_zero_step_interleaved`: each DDP bucket is stepped as soon as it is reduced, while DDP
  goes on with the others.
- `register`: gradients are reduced to their owners only, which saves a third of the traffic: 2Ψ
  instead of 3Ψ.

The optimizer's placement does not depend on DDP's buckets, so the first iteration steps like any
other.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the classes
# themselves.

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from shardstep.modes.base import Mode
from shardstep.modes.inside_ddp import InsideDDP
from shardstep.params.inputs import parameters
from shardstep.params.module import UncopiedHook, remove_hooks

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""A DDP communication hook."""


def hook_with_zero_step(
    hook: CommHook,
    ddp: DistributedDataParallel,
    zero: "ZeroRedundancyOptimizer",
    shard_buckets: bool = False,
) -> CommHook:
    """Make a DDP hook that reduces with `hook` and steps `zero` at the end of backward.

    Called on every rank.

    Args:
        hook: any DDP communication hook, such as `allreduce_hook`.
        ddp: the DDP module; register the returned hook with it.
        zero: the optimizer, over the parameters of `ddp`, with `overlap_with_ddp=True`.
        shard_buckets: accepted for compatibility. Every bucket is sharded across all ranks anyway.

    Raises:
        TypeError: if `ddp` or `zero` is something else.
        ValueError: if `zero` was not constructed for this, or has other parameters than `ddp`.
    """
    mode = _check(ddp, zero)
    _check_wire(zero)
    tie = _Tie(ddp, mode.tie_to_ddp(ddp.module, reduce=False))

    def reduce_then_step(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        _, inside = tie.ends()
        future = hook(state, bucket)
        if bucket.is_last():
            inside.step_after_ddp()
        return future

    return reduce_then_step


def hook_with_zero_step_interleaved(
    hook: CommHook,
    ddp: DistributedDataParallel,
    zero: "ZeroRedundancyOptimizer",
    shard_buckets: bool = False,
) -> CommHook:
    """Make a DDP hook that steps each bucket as soon as it is reduced.

    Called on every rank.

    The optimizer class has to treat tensors one at a time, as all of `torch.optim` do that can be
    sharded. A class that counts its steps elsewhere is refused. If `ddp` allows unused parameters,
    by `find_unused_parameters` or `static_graph`, they are known only at the end of backward, and
    the step is taken there; also under `Join`.

    A parameter that backward still needs after its own gradient is there, such as one that the
    model also reads through `detach()`, makes autograd raise that it was modified in place: use
    `hook_with_zero_step` for such a model, which has the same arguments and raises the same errors.
    """
    mode = _check(ddp, zero)
    _check_wire(zero)
    _check_dense(ddp)
    tie = _Tie(ddp, mode.tie_to_ddp(ddp.module, reduce=False))

    def reduce_and_step(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        model, inside = tie.ends()
        future = hook(state, bucket)
        # Joined ranks need the gradients of their pieces, and unused parameters are known last.
        if model._join_config.enable or model.find_unused_parameters or model.static_graph:
            if bucket.is_last():
                inside.step_after_ddp()
        else:
            inside.stepper.add(bucket, future)
        return future

    return reduce_and_step


def register(ddp: DistributedDataParallel, zero: "ZeroRedundancyOptimizer") -> None:
    """Make `ddp` reduce each gradient to its owner only, and step at the end of backward.

    Called on every rank.

    `param.grad` then holds a placeholder, as with `module=`: `zero.full_grad` returns the numbers.
    Gradients cannot be changed before the step, for example clipped: the step was taken when
    backward returns. Clear them with `zero.zero_grad()` before the next backward.

    Args:
        ddp: the DDP module; it must not have a communication hook yet.
        zero: the optimizer, over the parameters of `ddp`, with `overlap_with_ddp=True`.

    Raises:
        TypeError: if `ddp` or `zero` is something else.
        ValueError: if `zero` was not constructed for this, or has other parameters than `ddp`.
    """
    mode = _check(ddp, zero)
    _check_dense(ddp)
    if _ranks(zero.process_group) != _ranks(ddp.process_group):
        raise ValueError(
            "gradients are reduced within the optimizer's process group only, so it must have the "
            f"ranks of the DDP module's, {_ranks(ddp.process_group)}, not "
            f"{_ranks(zero.process_group)}"
        )
    index_of = {param: index for index, param in enumerate(parameters(zero.param_groups))}

    def offer(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        model, inside = tie.ends()
        if model._join_config.enable and not model._divide_by_initial_world_size:
            raise RuntimeError(
                "gradients that are reduced to their owners are divided by the number of all ranks;"
                " leave out Join's divide_by_initial_world_size=False"
            )
        buffer = bucket.buffer()
        with inside.taking_bucket():
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                # DDP keeps each gradient in its parameter's strides; the views it hands out are
                # contiguous whatever those are.
                grad = buffer.as_strided(param.shape, param.stride(), grad.storage_offset())
                inside.feeder.offer(index_of[param], grad)
        if bucket.is_last():
            inside.step_after_ddp()
        return _done(buffer)

    ddp.register_comm_hook(None, offer)  # first: if DDP refuses it, nothing is tied
    tie = _Tie(ddp, mode.tie_to_ddp(ddp.module, reduce=True))
    _hide_placeholders_from_rebuild(ddp, mode)


def _hide_placeholders_from_rebuild(ddp: DistributedDataParallel, inside: InsideDDP) -> None:
    """Hide the placeholders while DDP rebuilds its buckets, at the start of a forward pass.

    DDP copies each `param.grad` into the new buckets then, which a placeholder refuses. Without
    them DDP would not notice gradients that the user forgot to clear, so they are put back.
    """

    def stop(module: torch.nn.Module, args: Any) -> None:
        if ddp._has_rebuilt_buckets:
            inside.awaits_rebuild = False
            remove_hooks(handles)

    inside.awaits_rebuild = True
    handles = [
        ddp.register_forward_pre_hook(UncopiedHook(inside.hide_placeholders)),
        ddp.module.register_forward_pre_hook(UncopiedHook(stop), prepend=True),
        ddp.module.register_forward_pre_hook(UncopiedHook(inside.show_placeholders), prepend=True),
    ]


class _Tie:
    """A DDP module, and the mode that steps inside its backward pass, both held weakly.

    DDP holds its hook in C++, where the garbage collector cannot see it: a hook that held either
    would never let go of the model. So the module keeps `mode` alive.
    """

    def __init__(self, ddp: DistributedDataParallel, mode: InsideDDP) -> None:
        within = getattr(ddp, "_orig_mod", ddp)  # a compiled module may go earlier
        within.shardstep_stepper = _Kept(mode)
        within.register_forward_pre_hook(UncopiedHook(mode.before_forward))
        self._ddp: weakref.ref[DistributedDataParallel] = weakref.ref(within)
        self._mode = weakref.ref(mode)

    def ends(self) -> tuple[DistributedDataParallel, InsideDDP]:
        """Return both. Called on every rank, when DDP hands out a bucket.

        Raises:
            RuntimeError: if one is gone, or joined ranks would not shadow the step.
        """
        ddp, mode = self._ddp(), self._mode()
        if ddp is None or mode is None:
            raise RuntimeError("this hook was made for another DDP module, which is gone")
        join = ddp._join_config
        if join.enable and not (mode.join.config.enable and join.is_first_joinable):
            raise RuntimeError(
                "joined ranks have to shadow DDP's reductions first and the optimizer's step "
                "second: use Join([ddp, zero])"
            )
        return ddp, mode


class _Kept:
    """Keeps an object alive; a copy, also in a file, keeps none."""

    def __init__(self, kept: object = None) -> None:
        self._kept = kept

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Kept, ()


def _check(ddp: DistributedDataParallel, zero: "ZeroRedundancyOptimizer") -> InsideDDP:
    """Return the optimizer's mode. Raise unless the optimizer and the DDP module fit together."""
    # A compiled module has the attributes of the module inside.
    within = getattr(ddp, "_orig_mod", ddp)
    ours = isinstance(getattr(zero, "mode", None), Mode)
    if not (ours and isinstance(within, DistributedDataParallel)):
        raise TypeError(
            "ddp must be a DistributedDataParallel and zero a ZeroRedundancyOptimizer of this "
            f"library, not {type(ddp).__name__} and {type(zero).__name__}; without DDP, "
            "construct the optimizer with module="
        )
    mode: InsideDDP = zero.mode.inside_ddp
    if not set(_ranks(zero.process_group)) <= set(_ranks(ddp.process_group)):
        raise ValueError(
            f"the optimizer's process group, of ranks {_ranks(zero.process_group)}, reaches beyond "
            f"the DDP module's, of ranks {_ranks(ddp.process_group)}, so its ranks would step on "
            "different gradients; construct both with the same process_group"
        )
    names = {param: name for name, param in ddp.module.named_parameters()}
    held = dict.fromkeys(parameters(zero.param_groups))
    for number, param in enumerate(held):
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
                f"parameter {name!r} of the DDP module trains but is in DDP's parameters_to_ignore,"
                " so no hook would see its gradient; freeze it, or let DDP have it"
            )
    if within.skip_all_reduce_unused_params:
        raise ValueError(
            "the step is taken after the last bucket, which skip_all_reduce_unused_params=True may "
            "leave out; construct the DDP module without it"
        )
    return mode


def _check_wire(zero: "ZeroRedundancyOptimizer") -> None:
    """Raise if the precision policy asks for a wire dtype that the wrapped hook decides."""
    if zero.mode.precision.reduce_dtype is not None:
        raise ValueError(
            f"reduce_dtype={zero.mode.precision.reduce_dtype} has no effect here: the wrapped "
            "communication hook decides in which dtype gradients travel; use register(ddp, zero)"
        )


def _check_dense(ddp: DistributedDataParallel) -> None:
    """Raise if the module makes gradients that cannot be taken out of DDP's buckets."""
    for name, param in ddp.module.named_parameters():
        if param.requires_grad and param.is_complex():
            raise ValueError(
                f"parameter {name!r} is complex, and DDP hands out complex gradients as real views "
                "at other offsets; use hook_with_zero_step, or module= without DDP"
            )
    for name, part in ddp.module.named_modules():
        if getattr(part, "sparse", False) and isinstance(
            part, (torch.nn.Embedding, torch.nn.EmbeddingBag)
        ):
            raise ValueError(
                f"module {name!r} makes sparse gradients, which cannot be taken out of DDP's "
                'buckets; use hook_with_zero_step and layout="whole", or sparse=False'
            )


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def _done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    devices = [result.device] if result.device.type != "cpu" else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
    future.set_result(result)
    return future
