"""`ZeroRedundancyOptimizer`: arguments, documentation, delegation to a mode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from shardstep.comm import connect, refuse_stray_rank
from shardstep.comm.consensus import check_same_on_all_ranks
from shardstep.comm.join import JoinContext
from shardstep.layouts.choose import Layouts
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.local.local_optimizer import LocalState
from shardstep.local.multi_class import no_defaults, refuse_new_class
from shardstep.local.train_eval import MODES, has_train_eval
from shardstep.modes import DropIn, InsideDDP, Mode, ModuleMode
from shardstep.modes.apply import apply
from shardstep.modes.base import CONSTRUCTING
from shardstep.modes.front import ModeFront, clip_limit
from shardstep.modes.planner import Planned
from shardstep.params.inputs import ParamsArgument, check_arguments
from shardstep.precision import MixedPrecision, resolve
from shardstep.state.state_dict import (
    Consolidated,
    StateDict,
    consolidate,
    full_state_dict,
    load_full,
    run_load_hooks,
    run_state_dict_hooks,
)


class ZeroRedundancyOptimizer(ModeFront):
    """An optimizer of any class, sharded: N ranks keep one copy of its state between them.

    Each rank's local optimizer, an unmodified `optimizer_class`, updates about 1/N of the elements
    and keeps state for those only. `step()` then gathers the updated parameters on all ranks. The
    numbers are those of the unsharded optimizer. `step()` expects equal gradients on all ranks, as
    `DistributedDataParallel` makes them. Given the `module`, the optimizer reduces gradients itself
    and replaces DDP.

    Constructed on every rank of the process group. Without an initialised process group it runs as
    one rank, unless `torchrun` has started several.

    Args:
        params: parameters, `(name, parameter)` pairs or parameter groups, as for any optimizer.
            All ranks must pass the same, in the same order. A group may have its own class
            under `"optimizer_class"`, with its own options.
        optimizer_class: the class of the local optimizer.
        process_group: the ranks that share the state; the default group if None.
        parameters_as_bucket_view: if True, trainable parameters move into flat buckets
            (`param.data` becomes a view) and are gathered without a copy.
        overlap_with_ddp: if True, the step is taken inside DDP's backward: pass the optimizer to
            `hook_with_zero_step`, `hook_with_zero_step_interleaved` or `register`. Parameters
            live in buckets then, and `step()` only runs hooks.
        module: the module that the parameters belong to, not wrapped in DDP. If given, this is
            ZeRO-2: all ranks start from rank 0's parameters, gradients are reduced to their owners
            during backward, and parameters, in buckets, are gathered during the next forward.
        layout: `"sliced"` cuts parameters anywhere, `"whole"` never cuts one. `"auto"` finds, per
            group, the one that leaves the class's numbers unchanged, and refuses if neither does.
        precision: how 16-bit parameters are stepped on, and in which dtype gradients travel. If
            None, they get fp32 masters with `module`. Without it, they are updated in 16 bits, as
            by `optimizer_class` itself, and rank 0 warns once.
        bucket_bytes: a bucket is closed once it holds this much. None for a sixteenth of the
            model, but at least 1 MiB over Gloo, 8 MiB over NCCL, and at most 25 MiB.
        overlap: with `module`, whether communication overlaps with backward and forward; the
            numbers are the same without.
        broadcast_buffers: with `module`, whether its buffers go on following rank 0's, as DDP's do.
        recoverable: with `module`, whether `recover()` works on an accelerator, as it does on the
            CPU. The host then waits for all ranks' notes before each step.
        **defaults: options for `optimizer_class`.

    Attributes:
        process_group: the process group, or None when it runs as one rank without one.
        rank: this rank within the process group.
        global_rank: this rank within the default group.
        world_size: number of ranks in the process group.
        parameters_as_bucket_view: whether parameters live in buckets.

    Raises:
        TypeError: if an argument has another type than documented.
        ValueError: on every rank, if the parameters cannot be sharded, or differ between ranks.
        RuntimeError: if construction failed on another rank, or if there is no process group where
            `torchrun` has started several ranks.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> opt.step()
        >>> opt.zero_grad()
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        module: torch.nn.Module | None = None,
        layout: Literal["auto", "sliced", "whole"] = "auto",
        precision: MixedPrecision | None = None,
        bucket_bytes: int | None = None,
        overlap: bool = True,
        broadcast_buffers: bool = True,
        recoverable: bool = False,
        **defaults: Any,
    ) -> None:
        self.initialized = False
        refuse_stray_rank()
        given = ParamsArgument(params)
        comm = connect(process_group, given.tensors)
        self.process_group = comm.group
        self.world_size = comm.world_size
        self.rank = comm.group_rank
        self.global_rank = dist.get_rank() if self.process_group is not None else 0
        self._consolidated: Consolidated | None = None
        # The local optimizer knows the class and its options, so torch's constructor comes later.
        self._param_groups: list[dict[str, Any]] = []
        self._join = join = JoinContext(self)
        Joinable.__init__(self)
        if module is not None:
            self.mode: Mode = ModuleMode(
                comm, join, module, overlap, broadcast_buffers, recoverable
            )
        elif overlap_with_ddp:
            self.mode = InsideDDP(comm, join, given.module)
        else:
            self.mode = DropIn(comm, join, given, parameters_as_bucket_view)
        mode = self.mode
        self.parameters_as_bucket_view = mode.bucket_views

        def make_plan() -> Planned:
            if overlap_with_ddp and module is not None:
                raise ValueError("module= replaces DDP; leave out overlap_with_ddp=True")
            if recoverable and module is None:
                raise ValueError("recoverable=True needs module=, as recover() does")
            known = inspect.signature(type(self)).parameters
            check_arguments(known, optimizer_class, defaults, module, bucket_bytes)
            policy = resolve(precision, mode.separate, module is not None)
            recipe = OptimizerRecipe(optimizer_class, defaults)
            layouts = Layouts(layout, recipe, comm.world_size, policy)
            # The local optimizer knows the class's defaults; they are taken over from it below.
            Optimizer.__init__(self, given.items(), {})
            warn = precision is None and module is None and self.rank == 0
            planned = mode.plan_first(self.param_groups, layouts, bucket_bytes, warn)
            if module is not None:
                layouts.refuse_sparse()
            return planned

        mode.start(check_same_on_all_ranks(comm, CONSTRUCTING, make_plan))
        # Schedulers look in `defaults` for options such as "betas".
        self.defaults = self.optim.defaults
        self.initialized = True

    # ------------------------------------------------------------------------ plan and parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups with all parameters. Options may be edited; parameters stay where they are."""
        return self._param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        # One list for the lifetime: the planner and the local optimizer share it.
        self._param_groups[:] = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as for any optimizer, and place them.

        Called on every rank, with the same group. With `module`, they start from rank 0's values.

        Raises:
            ValueError: on every rank, if they cannot be added; nothing has changed then.
            RuntimeError: on every rank, if there are gradients that the next step would miss.
        """
        append = super().add_param_group

        def add() -> None:
            refuse_new_class(param_group, self.optim)
            with no_defaults(self):
                append(param_group)

        if self.initialized:
            self.mode.add_group(add)
        else:
            append(param_group)

    def detach(self) -> None:
        """Restore plain parameters, remove all hooks, end this optimizer. Called on every rank."""
        self.mode.detach()

    # ----------------------------------------------------------------------------------- the step

    @_disable_dynamo  # collectives are not for torch.compile to trace
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Update this rank's pieces of the parameters, and gather the rest. Called on every rank.

        Args:
            closure: computes the loss again and returns it.
            **kwargs: passed on to the local optimizer's `step`, whose result is returned.
        """
        result = self.mode.step(closure, **kwargs)
        set_to_none = self.mode.pipeline.local.clears_to_none
        if set_to_none is not None:
            self.zero_grad(set_to_none or not self.mode.zeroes_in_place)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, to None or to zero. Called on every rank."""
        # Clearing the gradient of a parameter in flight does not wait for it.
        with torch._C.DisableTorchFunctionSubclass():
            self.mode.pipeline.gradients.zero(set_to_none)
            super().zero_grad(set_to_none)
        self.mode.after_zero_grad()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip the gradients of all parameters by their total norm. Called on every rank.

        It is `torch.nn.utils.clip_grad_norm_`, with its arguments, for gradients that may be
        sharded across ranks; every element is counted once.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            TypeError: if `max_norm` is not a number.
        """
        limit = clip_limit(max_norm, "max_norm", "clip_grad_norm_")
        self.mode.check_change("clip_grad_norm_()")
        gradients = self.mode.ready_gradients()
        return gradients.clip_norm(limit, float(norm_type), error_if_nonfinite, foreach)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients only accumulate on each rank; needs `module`.

        Entered on every rank. The next backward pass outside of it sends them, or the step does.
        """
        return self.mode.no_sync()

    def recover(self) -> None:
        """Give up a batch on which a rank has failed. Called on every rank.

        Needs `module`, and on an accelerator `recoverable=True`: otherwise ranks do not wait for
        each other's notes there.

        A rank on which the loader, forward, backward or the closure raised calls this in its
        handler. `step()`, `zero_grad()` or the next backward pass then raises `BatchSkippedError`
        on the other ranks, which call this in theirs. Gradients are cleared, no step is taken, and
        all ranks go on with the next batch. Loaded options and state stay as they are.

        Example:
            >>> model = torch.nn.Linear(4, 4)
            >>> opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, module=model)
            >>> try:
            ...     model(torch.ones(1, 5)).sum().backward()
            ...     opt.step()
            ... except RuntimeError:  # BatchSkippedError is one
            ...     opt.recover()
        """
        self.mode.recover()

    def apply(self, act: Callable[[Optimizer], object]) -> None:
        """Let every rank's local optimizer change its pieces, and gather the result.

        Called on every rank, with the same `act`, which gets the local optimizer. For changes
        outside of `step()`: `train()` and `eval()` of schedule-free classes use it. `act` sees
        no gradients, and must not look beyond the element or tensor that the layout keeps together.

        Raises:
            RuntimeError: on every rank, if it failed on one. Its changes are gathered all the same:
                parameters are equal on all ranks.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(4))
            >>> opt = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.1)
            >>> opt.apply(lambda local: [p.data.zero_() for p in local.param_groups[0]["params"]])
            >>> weight.sum().item()
            0.0
        """
        apply(self.mode, lambda: act(self.optim))

    if not TYPE_CHECKING:  # or the checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Return `train` or `eval`, if a class here has them."""
            if name in MODES and self.__dict__.get("initialized") and has_train_eval(self.optim):
                set_mode = self.mode.pipeline.local.set_mode
                return lambda *args, **kwargs: apply(
                    self.mode, lambda: set_mode(name, *args, **kwargs)
                )
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; construct another one and load "
            "this one's state dict"
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Answer `GradScaler.step`: this optimizer does not unscale gradients itself."""
        self.mode.check_change("GradScaler")
        return False

    # ---------------------------------------------------------------------------------- the state

    @property  # type: ignore[override]
    def state(self) -> LocalState:
        """This rank's part of the state, by parameter; a view that can be read and cleared."""
        return LocalState(self.mode.params, self.mode.pipeline.local)

    @state.setter
    def state(self, value: Mapping[torch.Tensor, Any]) -> None:
        # Torch's base class assigns an empty dict; the state is the local optimizer's.
        if self.initialized:
            if value:
                raise TypeError("the state is sharded across ranks; set it with load_state_dict()")
            self.state.clear()

    def consolidate_state_dict(self, to: int | Literal["all"] = 0) -> None:
        """Gather the whole state on rank `to` of the process group, in its CPU memory.

        Called on every rank. Afterwards, until the next step or load, `state_dict()` may be called
        on rank `to`, or on every rank if it is `"all"`. It raises on every rank, if ranks pass
        different ones or there is state that cannot be sent.
        """
        self._consolidated = consolidate(self.mode, to)

    def state_dict(self) -> StateDict:
        """Return the state that `consolidate_state_dict` gathered on this rank.

        It equals the unsharded optimizer's `state_dict()`, with tensors on the CPU, and loads into
        a plain `torch.optim` optimizer. Masters are in it under `"masters"`. Before the first step
        there is mostly no state to gather: it returns the groups on every rank. A class like
        Adagrad has state from the start. For `torch.distributed.checkpoint`, wrap the optimizer in
        `shardstep.checkpoint.Sharded`.

        Raises:
            RuntimeError: if the state was not consolidated on this rank since the last step.
        """
        return run_state_dict_hooks(self, self._full_state_dict)

    def _full_state_dict(self) -> StateDict:
        if self.world_size == 1:
            self.consolidate_state_dict()
        return full_state_dict(self.mode, self.param_groups, self._consolidated)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load this rank's share of a full state dict.

        Called on every rank; nothing is sent. The dict may come from here, at any world size and
        layout, from the plain `torch.optim` class, or, in full and with parameter names, from
        `get_optimizer_state_dict`. It is not changed, and its tensors are copied. Masters are taken
        from it if it has any, and made from the parameters otherwise. A warning names trainable
        parameters that it has no state for.

        Raises:
            ValueError: if it does not fit this optimizer's parameters; nothing is loaded then.
        """
        run_load_hooks(self, state_dict, lambda full: load_full(self.mode, self.param_groups, full))
        self.mode.lockstep.loads += 1
