"""`module=` mode (ZeRO-2): the optimizer replaces DDP.

All ranks start from rank 0's values. Gradients are reduced to their owners while backward runs, and
parameters are gathered while the next forward runs. The module stays as it is; two hooks at its
root watch for the start of a forward pass and of the backward pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from shardstep.comm import Comm, Operation, all_gather_json, broadcast
from shardstep.comm.join import AFTER_AN_ERROR, JoinContext
from shardstep.gather import OverlappedGather, ParamGather
from shardstep.gradients import AutogradFeeder, GradientSource, GradReducer
from shardstep.gradients.feeders import refuse_watched
from shardstep.modes.base import FOLLOWING, Mode
from shardstep.modes.join import options_of, take_options
from shardstep.modes.planner import Planned
from shardstep.params.inputs import parameters
from shardstep.params.module import ModuleBuffers, UncopiedHook, remove_hooks, when_freed
from shardstep.params.names import names_in
from shardstep.params.sharded_params import ShardedParams


class ModuleMode(Mode):
    """Gradients come from autograd; reductions and gathers overlap with the model."""

    title = "module= (ZeRO-2)"
    reduces_gradients = True

    def __init__(
        self,
        comm: Comm,
        join: JoinContext,
        module: torch.nn.Module,
        overlap: bool,
        broadcast_buffers: bool,
        recoverable: bool,
    ) -> None:
        super().__init__(comm, join, module)
        self.module = self._module = module
        self._overlap = overlap
        self._broadcast_buffers = broadcast_buffers
        self._recoverable = recoverable
        self._rounds_before = 0  # the last forward pass

    # ------------------------------------------------------------------------------ construction

    @override
    def check(self) -> None:
        check_membership(self._module, parameters(self.groups))
        refuse_watched(self._module.named_parameters())
        for name, buffer in self._module.named_buffers():
            if any(
                size > 1 and not step
                for size, step in zip(buffer.shape, buffer.stride(), strict=True)
            ):
                raise ValueError(
                    f"buffer {name!r} is expanded: several of its elements share memory, so it "
                    "cannot follow rank 0's; register a clone of it"
                )

    @override
    def describe(self) -> list[str]:
        buffers = [
            f"buffer {name!r} (shape {tuple(buffer.shape)}, {buffer.dtype})"
            for name, buffer in self._module.named_buffers()
        ]
        return [
            *super().describe(),
            f"broadcast_buffers={self._broadcast_buffers}",
            f"recoverable={self._recoverable}",
            *buffers,
        ]

    @override
    def synchronise_start(self) -> None:
        # Before the local optimizer is made: a class may note the parameters' values.
        broadcast(self.comm, self._module.parameters(), 0, Operation.START)
        broadcast(self.comm, self._module.buffers(), 0, Operation.START)

    @override
    def check_new(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        refuse_watched(named)

    @override
    def synchronise_new(self, params: Sequence[torch.Tensor]) -> None:
        broadcast(self.comm, params, 0, Operation.START)

    @override
    def connect(self) -> None:
        # Gathers of one step and reductions of the next overlap, so neither may queue behind the
        # other, except over NCCL, where two queues for each are faster. Nor may they share a queue
        # with another optimizer of the same group: a backward pass through two modules may reduce
        # in a different order on each rank.
        if self._recoverable:
            self.lockstep.recovery_comm = self.comm.new_connection("gloo")
        self.comm, self.gather_comm = self.comm.new_pair()
        self.gather_comm.compare_calls(self.comm)
        followed = self._module if self._broadcast_buffers else None
        self.buffers = ModuleBuffers(self.comm, self.join, followed)

    @override
    def make_gradients(self, params: ShardedParams) -> GradReducer:
        self._feeder = AutogradFeeder()
        overlap, join, lockstep = self._overlap, self.join, self.lockstep
        self._reducer = GradReducer(
            self.comm, params, self._feeder, self.precision, overlap, join, lockstep
        )
        return self._reducer

    @override
    def make_gather(self, params: ShardedParams) -> ParamGather:
        if not self._overlap:
            return super().make_gather(params)
        return OverlappedGather(self.gather_comm, params, self._module)

    @override
    def attach(self) -> None:
        self._at_backward = UncopiedHook(self._backward_starts)
        handles = [
            self._module.register_forward_pre_hook(UncopiedHook(self._before_forward)),
            self._module.register_forward_hook(UncopiedHook(self._after_forward)),
        ]
        self._remove_hooks = when_freed(self, remove_hooks, handles)

    @override
    def detach(self) -> None:
        super().detach()
        self._remove_hooks()

    # ---------------------------------------------------------------------- forward and backward

    # Collectives are not for torch.compile to trace: it fails on process groups.
    @_disable_dynamo
    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        # A part may train while the root evaluates. A model of which no part trains changes no
        # buffers, and may be run on some ranks only.
        trains = torch.is_grad_enabled() and any(part.training for part in module.modules())
        if not trains or _is_recorded():
            return
        self.watch.check(self.pipeline.params.params)
        self._reducer.check_forward()
        if torch._C._current_graph_task_id() != -1:
            return  # activation checkpointing runs this forward pass again, inside backward
        self.follow()
        if self.buffers.differ and self._broadcast_buffers:
            self._reducer.announce("buffers")
            self.buffers.send()
        # Like DDP, not after a forward pass under no_sync, which communicates nothing.
        self.buffers.differ = not self._reducer.paused
        self._rounds_before = self.lockstep.rounds

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or _is_recorded():
            return
        for tensor in tree_leaves(output):
            # Not on a leaf, such as a parameter that the module returns: it outlives the pass and
            # would collect a hook at each one.
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._at_backward)  # type: ignore[no-untyped-call]

    def _backward_starts(self, grad: torch.Tensor) -> None:
        self._reducer.expect_backward()

    # ----------------------------------------------------------------------------------- the step

    @override
    def before_step(self) -> None:
        if not self.join.shadowing:
            self.watch.check(self.pipeline.params.params)
            self._follow_without_gradients()
            # Reductions that are still to be announced come before the step. Notes travel with
            # every round of them.
            self._reducer.collect()
            if self.join.enabled:
                self._reducer.announce("step", lambda: [options_of(self.groups)])

    @override
    def recover(self) -> None:
        if self.join.enabled:
            raise RuntimeError(
                f"rank {self.comm.group_rank}: recover() cannot be called within Join: joined "
                f"ranks would not take part; {AFTER_AN_ERROR}"
            )
        headers = self.comm.headers
        in_one_order = headers is not None and not headers.of_every_call
        if not self.lockstep.recovery_comm and (
            in_one_order or not self.lockstep.waits_on(self.params[0].device)
        ):
            raise RuntimeError(
                f"rank {self.comm.group_rank}: recover() needs recoverable=True on an accelerator, "
                "and over other backends than Gloo: without it, other ranks do not wait, and may "
                "have taken the step; start again from a checkpoint"
            )
        left_out = self._rounds_before < self.lockstep.rounds and not self._reducer.has_gradients()
        if left_out and self.buffers.differ:
            self.buffers.send()  # as the others do before the forward pass that failed here
        self._reducer.recover()
        self.buffers.send()

    after_zero_grad = Mode.follow

    @override
    def ready_gradients(self) -> GradientSource:
        self._follow_without_gradients()
        return super().ready_gradients()

    def _follow_without_gradients(self) -> None:
        """Adapt to parameters of another form before gradients are asked for, if there are none.

        Called on every rank. Finding that no rank has gradients takes a round of reductions, which
        needs the dtype and device that parameters have now. Freezing can wait until that is over,
        and has to: a rank without gradients does not know whether others have some. So can another
        memory format. Joined ranks adapt when they shadow the step.
        """
        params = self.pipeline.params
        if self.join.enabled or self.join.shadowing or params.unchanged():
            return
        with torch._C.DisableTorchFunctionSubclass():
            intact = params.storage.intact()
            waits = intact or self._reducer.has_gradients()
            late = [index for index in params.frozen if params.params[index].requires_grad]
        if not intact and self._has_other_strides():
            self._take_in(late)
        elif not waits:
            self.follow()
        elif late:
            self._take_in(late)

    def _has_other_strides(self) -> bool:
        """Return whether parameters have another memory format, and no other dtype or device."""
        pairs = [*zip(self.planner.specs(), self.plan.specs, strict=False)]
        return any(now.stride != old.stride for now, old in pairs) and all(
            replace(now, stride=old.stride, trainable=old.trainable) == old for now, old in pairs
        )

    def _take_in(self, late: Sequence[int]) -> None:
        """Adopt a plan for a change that went unnoticed. Called on every rank.

        Parameters were unfrozen, or have another memory format. The root's forward was not called
        in between: parts of the model or its methods were, or the model evaluates. Gradients that
        were reduced are gathered and sent once more, with those of the late parameters. On 16-bit
        wires that rounds them once more.
        """
        params = self.params
        self._reducer.collect()
        grads = {index: self._reducer.full(index) for index in self._reducer.trained}
        grads |= {index: params[index].grad for index in late}
        self._reducer.zero(set_to_none=True)

        def make() -> Planned:
            for index, grad in grads.items():
                # Frozen or not, a parameter with a gradient is stepped on.
                params[index].grad = None if grad is None else torch.zeros_like(params[index])
            try:
                return self.planner.plan()
            finally:
                for index in grads:
                    params[index].grad = None

        self.replan(FOLLOWING, make)
        self._reducer.ran_backward = True  # if not, collect() has raised
        for index, grad in grads.items():
            if grad is not None:
                self._feeder.put_aside(index, grad)

    # -------------------------------------------------------------------------------- uneven inputs

    @override
    def shadow(self, step: Callable[[], object], zero_grad: Callable[[bool], object]) -> None:
        kind, kept, arguments = self.join.announce(self.comm, None)
        self._feeder.keep(kept)

        def shadow_step(options: list[dict[str, Any]]) -> None:
            take_options(self.groups, options)
            step()

        actions: dict[str, Callable[..., object]] = {
            "round": self._reducer.shadow_round,
            "clip": self._reducer.clip_norm,
            "unscale": self._reducer.shadow_unscale,
            "norms": self._reducer.shadow_norms,
            "change": self._reducer.change,
            "zero": lambda: zero_grad(False),
            "buffers": self.buffers.send,
            "step": shadow_step,
        }
        with self.join.shadow():
            actions[kind](*arguments)
            self._reducer.used.compare()  # as the others do before they announce another action

    @override
    def end_join(self) -> None:
        # The last rank with data may have cleared gradients after its last step.
        kept = all_gather_json(self.comm, sorted(self._feeder.present().kept))
        self._feeder.keep([index for index in kept[0] if all(index in each for each in kept)])


def check_membership(module: torch.nn.Module, params: Sequence[torch.Tensor]) -> None:
    """Raise unless the optimizer and the module have the same trainable parameters.

    Raises:
        ValueError: if the optimizer has a parameter that is not the module's, or lacks one that
            trains, whose gradient would not be synchronised; if the module contains a DDP wrapper,
            which would reduce the same gradients.
    """
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            where = f" at {name!r}" if name else ""
            raise ValueError(
                "module= replaces DDP, which would reduce the same gradients; pass the module "
                f"inside the wrapper{where}, and call that one"
            )
    given = {id(param) for param in params}
    names = names_in(module)
    for number, param in enumerate(params):
        if id(param) not in names:
            raise ValueError(
                f"parameter {number} of the optimizer is not a parameter of the given module; "
                "pass the module that the parameters belong to"
            )
    for name, param in module.named_parameters():
        if param.requires_grad and id(param) not in given:
            raise ValueError(
                f"parameter {name!r} of the module trains but was not given to the optimizer, so "
                "its gradient would not be synchronised; pass it too, or freeze it"
            )


def _is_recorded() -> bool:
    """Return whether torch records the running code: for an export, a trace, or with fake tensors.

    A rank may do that alone, so nothing may be sent meanwhile.
    """
    modes = torch._C._TorchDispatchModeKey
    return torch._C._is_tracing() or any(
        torch._C._get_dispatch_mode(mode) is not None for mode in (modes.FAKE, modes.PROXY)
    )
