"""All-gathers that overlap with the next forward pass.

`launch` returns at once. A bucket is waited for when one of its parameters is first read: see Note
[Parameters in flight] in `in_flight.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from typing_extensions import override

from shardstep.comm import Comm
from shardstep.comm.at_exit import ends_with_error
from shardstep.comm.spans import span
from shardstep.gather.base import ParamGather
from shardstep.gather.compiled import (
    CompiledPart,
    Handle,
    parts_that_read,
    runs_outside_python,
    watch_compiler,
)
from shardstep.gather.in_flight import FailedGather, Flights
from shardstep.params.module_hook import Removable, UncopiedHook, remove_hooks, when_freed
from shardstep.params.sharded_params import ShardedParams

COMPILED_IN_FLIGHT = 4
"""Forward passes that may compile while parameters are in flight.

Dynamo compiles a part again in every forward pass if it reads parameters of other parts: in flight
they have another class. It gives up after 8 times.
"""


class OverlappedGather(ParamGather):
    """Gathers that go on after `launch` has returned, until their parameters are read.

    `comm` carries nothing else, and the parameters live in their buckets.
    """

    def __init__(self, comm: Comm, params: ShardedParams, module: torch.nn.Module) -> None:
        self._comm = comm
        self._storage = params.storage
        buckets = params.plan.training_buckets
        self._params = [[params.params[slot.param] for slot in bucket.slots] for bucket in buckets]
        self._flights = Flights(self._params)
        watch_compiler(_compilation_starts)
        self._overlap = not runs_outside_python(module)
        self._compiled: list[CompiledPart] = []
        self._num_compiled_in_flight = 0
        self._handles: list[Removable] = []
        if self._overlap:
            self._hook_forward(module)
        when_freed(self, _remove_after_last, self._flights, self._handles)
        _alive.add(self)

    def _hook_forward(self, module: torch.nn.Module) -> None:
        bucket_of = {param: number for number, held in enumerate(self._params) for param in held}
        at_root = UncopiedHook(_make_root_hook(self._flights, self._compiled))
        self._handles.append(module.register_forward_pre_hook(at_root))
        for part, compiled, params in list(parts_that_read(module)):
            own = sorted({bucket_of[param] for param in params if param in bucket_of})
            if compiled:
                self._compiled.append(CompiledPart(part, self._flights, own))
            elif own:
                hook = _WaitHook(self._flights, weakref.ref(self), own)
                self._handles.append(part.register_forward_pre_hook(hook))
        self._handles += map(Handle, self._compiled)

    @override
    def share_error(self, error: Exception | None) -> None:
        try:
            self._flights.errors = self._comm.share_error(error)
        except RuntimeError as raised:
            self._flights.errors = FailedGather(raised)

    @override
    def wait_for_errors(self) -> None:
        self._flights.wait_for_errors()

    @override
    def launch(self, buckets: Collection[int] | None = None) -> None:
        if self._comm.world_size == 1:
            return
        if not _in_place(self._compiled):
            self.disable_overlap()
        error: RuntimeError | None = None
        for message in self._storage.messages:
            if buckets is not None and message.bucket not in buckets:
                continue
            try:
                with span("gather", message.bucket):
                    work = self._comm.all_gather(message.buffer, message.cuts)
            except RuntimeError as raised:
                error = error or raised
                work = FailedGather(error)
            self._flights.add(message.bucket, work, message.buffer.device, mark=self._overlap)
        if error is not None:
            raise error
        if not self._overlap:
            self.wait()

    @override
    def wait(self) -> None:
        self._flights.wait()

    def compilation_starts(self, within_part: bool) -> None:
        """Wait, so that the compiler sees no parameter in flight. See `compiled.py`."""
        self._num_compiled_in_flight += bool(self._flights.works)
        if within_part and self._num_compiled_in_flight < COMPILED_IN_FLIGHT:
            self.wait()
        else:
            self.disable_overlap()

    def disable_overlap(self) -> None:
        """Wait within `launch` from now on, and remove the module hooks."""
        self._overlap = False
        self.wait()
        remove_hooks(self._handles)

    @override
    def detach(self) -> None:
        self.disable_overlap()
        _alive.discard(self)


class _WaitHook(UncopiedHook):
    """Waits for the buckets that a module's own parameters are in, before its forward."""

    def __init__(
        self, flights: Flights, gather: weakref.ref[OverlappedGather], buckets: Sequence[int]
    ) -> None:
        self._flights, self._gather, self._buckets = flights, gather, buckets
        self._in_flight = flights.works.keys()

    @override
    def __call__(self, *args: Any) -> None:
        # Every module of the model asks, in every forward: mostly its buckets have arrived.
        if torch._C._is_tracing() or not self._in_flight.isdisjoint(self._buckets):
            self._wait()

    @_disable_dynamo
    def _wait(self) -> None:
        gather = self._gather() if torch._C._is_tracing() else None
        if gather is not None:
            gather.disable_overlap()  # the trace will read parameters without Python
        for number in self._buckets:
            self._flights.wait_for(number)


def _in_place(parts: Sequence[CompiledPart]) -> bool:
    return all(part.in_place for part in parts)


def _make_root_hook(flights: Flights, compiled: Sequence[CompiledPart]) -> Callable[..., None]:
    def wait_at_root(module: torch.nn.Module, args: Any) -> None:
        flights.wait_for_errors()
        # Torch skips fused inference kernels for tensor subclasses, and the fallback rounds
        # differently.
        if not module.training or not _in_place(compiled):
            flights.wait()

    return wait_at_root


def _remove_after_last(flights: Flights, handles: Sequence[Removable]) -> None:
    flights.after_last(lambda: remove_hooks(handles))


_alive: weakref.WeakSet[OverlappedGather] = weakref.WeakSet()


def _wait_for_all() -> None:
    for gather in list(_alive):
        gather.wait()


# A gather in flight arrives in this process: in a forked one, a read would wait forever.
os.register_at_fork(before=_wait_for_all)


@atexit.register
def _wait_at_exit() -> None:
    """Wait for gathers in flight: a rank that leaves earlier cuts off messages of the others."""
    # A rank that has raised must not wait: the others are to learn of it at once.
    if not ends_with_error():
        with contextlib.suppress(RuntimeError):
            _wait_for_all()


def _compilation_starts(within_part: bool) -> None:
    for gather in list(_alive):
        # A gather that failed is no affair of the code that is compiled: its own parameters raise.
        with contextlib.suppress(RuntimeError):
            gather.compilation_starts(within_part)
