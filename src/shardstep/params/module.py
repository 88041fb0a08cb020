"""The user's module: hooks that keep nothing alive, parameters that were put in later, buffers.

A hook does not follow its module into a copy or a file.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from types import MethodType
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo

from shardstep.comm import Comm, Operation, broadcast
from shardstep.comm.join import JoinContext


class UncopiedHook:
    """A hook of one module or tensor. Copies of the module, also in files, get an empty one.

    A bound method is held weakly: once its object is freed, the hook does nothing. Modules and the
    graph of autograd outlive an optimizer, and must not keep it alive.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = weakref.WeakMethod(call) if isinstance(call, MethodType) else lambda: call

    @_disable_dynamo  # compiling a hook's own code would wait for gathers in the middle of a wait
    def __call__(self, *args: Any) -> None:
        """Call the hook."""
        call = self._call()
        if call is not None:
            call(*args)

    @property
    def __name__(self) -> str:
        """Refuse: `torch.jit.script` asks for the name of a function that it can compile."""
        raise AttributeError(
            "torch.jit.script cannot compile the hooks of a ZeroRedundancyOptimizer; call "
            "torch.jit.trace, or the optimizer's detach() before you script or copy the module"
        )

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_empty_hook, ()


def _make_empty_hook() -> Callable[..., None]:
    return UncopiedHook(_empty_hook)


def _empty_hook(*args: Any) -> None:
    pass


def when_freed(owner: object, act: Callable[..., None], *args: Any) -> Callable[[], object]:
    """Call `act` when `owner` is freed, or earlier by calling the function returned; only once.

    `args` must not refer to `owner`. At the end of the program nothing is called.
    """
    finalizer = weakref.finalize(owner, act, *args)
    finalizer.atexit = False
    return finalizer


class Removable(Protocol):
    """A handle of something that was put on a module or tensor."""

    def remove(self) -> None:
        """Take it away."""


def remove_hooks(handles: Sequence[Removable]) -> None:
    """Remove hooks from their modules and tensors."""
    for handle in handles:
        handle.remove()


@dataclass(eq=False)
class ModuleBuffers:
    """The buffers of a module, if there is one, which follow those of one rank.

    Attributes:
        differ: whether a forward pass may have changed the buffers of each rank in its own way.
    """

    comm: Comm
    join: JoinContext
    module: torch.nn.Module | None
    differ: bool = False

    def send(self) -> None:
        """Copy the buffers of the first rank that has data to all ranks. Called on every rank."""
        self.differ = False
        if self.module is not None:
            # `.data`, as under DDP: a backward pass to come may have saved them, and must not fail
            # on the ranks that were written to while the others wait for it.
            buffers = [buffer.data for buffer in self.module.buffers()]
            if buffers:
                broadcast(self.comm, buffers, self.join.source, Operation.BUFFERS)


class ModuleWatch:
    """The parameters and submodules of a module, if there is one, to see when they change.

    A look at an unchanged module compares identities only, without walking through it.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._module = module
        self._remember()

    def _remember(self) -> None:
        parts = [] if self._module is None else [vars(part) for part in self._module.modules()]
        # Scripted modules keep them elsewhere, and cannot be changed.
        found = [part.get(key) for part in parts for key in ("_parameters", "_modules")]
        self._tables = [table for table in found if type(table) is dict]
        entries = [(table, *item) for table in self._tables for item in table.items()]
        self._in = [table for table, _, _ in entries]
        self._names = [name for _, name, _ in entries]
        self._values = [value for _, _, value in entries]

    def _unchanged(self) -> bool:
        now = map(dict.get, self._in, self._names)
        return sum(map(len, self._tables)) == len(self._values) and all(map(is_, now, self._values))

    def check(self, params: Sequence[torch.Tensor]) -> None:
        """Raise if a parameter that trains was put into the module and is not among `params`.

        Raises:
            ValueError: naming the parameter.
        """
        if self._module is None or self._unchanged():
            return
        known = set(map(id, params))
        for name, param in self._module.named_parameters():
            # torch.func.functional_call puts plain tensors in for the time of a call.
            trains = param.requires_grad and isinstance(param, torch.nn.Parameter)
            if trains and id(param) not in known:
                raise ValueError(
                    f"parameter {name!r} was put into the module after the optimizer was "
                    "constructed, so it would never be stepped; construct the optimizer after it, "
                    "pass it to add_param_group(), or freeze it"
                )
        self._remember()
