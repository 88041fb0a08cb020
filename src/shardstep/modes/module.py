"""Ties a module to its optimizer: common starting values, common buffers, and two hooks.

This is what stands in for the DDP wrapper in ZeRO-2. The module stays as it is; it is watched at
its root only, for the start of a forward pass and for the start of the backward pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from shardstep.comm import Comm
from shardstep.comm.broadcast import broadcast
from shardstep.params.module_hook import UncopiedHook
from shardstep.params.names import names_in


def check_membership(module: torch.nn.Module, params: Sequence[torch.Tensor]) -> None:
    """Make sure that the optimizer and the module are about the same parameters.

    Raises:
        ValueError: if the optimizer has a parameter that is not the module's, or lacks one that
            trains: nobody would synchronise its gradient. If there is a DDP wrapper: two would.
    """
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            where = f", here at {name!r}" if name else ""
            raise ValueError(
                "module= replaces DDP, which would reduce the same gradients; pass the module "
                f"inside of the wrapper{where}, and call that one"
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


def describe_buffers(module: torch.nn.Module) -> list[str]:
    """One line per buffer, for ranks to compare."""
    return [
        f"buffer {name!r} (shape {tuple(buffer.shape)}, {buffer.dtype})"
        for name, buffer in module.named_buffers()
    ]


def broadcast_start(comm: Comm, module: torch.nn.Module) -> None:
    """Make rank 0's parameters and buffers everyone's. Called on every rank."""
    broadcast(comm, module.parameters(), source=0)
    broadcast(comm, module.buffers(), source=0)


class ModuleTie:
    """The hooks at a module's root, and its buffers.

    Args:
        module: the module.
        comm: the ranks.
        broadcast_buffers: whether buffers follow those of one rank, as DDP's do.
        before_forward: called before a forward pass that may be trained on; says whether the
            backward pass through it will be synchronised.
        expect_backward: called within the backward pass through the module's outputs.
        announce: called before buffers are synchronised in a forward pass.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        comm: Comm,
        broadcast_buffers: bool,
        before_forward: Callable[[], bool],
        expect_backward: Callable[[], None],
        announce: Callable[[], None],
    ) -> None:
        self._module = module
        self._comm = comm
        self._broadcast_buffers = broadcast_buffers
        self._before_forward = before_forward
        self._expect_backward = expect_backward
        self._announce = announce
        self._apart = False
        self.source = 0
        self._handles = [
            module.register_forward_pre_hook(UncopiedHook(self._pre_forward)),
            module.register_forward_hook(UncopiedHook(self._post_forward)),
        ]

    def sync_buffers(self) -> None:
        """Make one rank's buffers everyone's. Called on every rank, after a step.

        A forward pass changes them on each rank in its own way. DDP evens them out before the next
        forward pass; doing it here gives that pass the same buffers, and evaluation, which need not
        run on all ranks, too.
        """
        self._apart = False
        if self._broadcast_buffers:
            # `.data`, as under DDP: a backward pass to come may have saved them, and is not to fail
            # on the ranks that were written to, while the others wait for it.
            broadcast(self._comm, (buffer.data for buffer in self._module.buffers()), self.source)

    # Collectives are not for torch.compile to trace: it fails on process groups.
    @_disable_dynamo
    def _pre_forward(self, module: torch.nn.Module, args: Any) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        synchronised = self._before_forward()
        # Not in a forward pass that activation checkpointing runs again inside backward.
        if torch._C._current_graph_task_id() == -1:
            if self._apart and self._broadcast_buffers:
                self._announce()
                self.sync_buffers()
            # Like DDP, not behind a forward pass under no_sync: it is to communicate nothing.
            self._apart = synchronised

    def _post_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                # Not on a leaf, such as a parameter that is handed out: it outlives the pass, and
                # would collect a hook at every one. Nothing of the module lies behind it.
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._backward_starts)  # type: ignore[no-untyped-call]

    def _backward_starts(self, grad: torch.Tensor) -> None:
        self._expect_backward()

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
