"""All-gathers that overlap with the next forward pass.

`launch` returns at once. A bucket is waited for when one of its parameters is first read.

Note [Parameters in flight]

A parameter whose bucket is in flight must not be read: not by its module's forward, by another
module that reaches for it, by a checkpoint, by an average of the weights that keeps a list of the
parameters, or by a user at a prompt. Module hooks see only the first of these. So the parameter
itself waits: while its bucket is in flight, its class is a subclass that overrides
`__torch_function__`, which torch calls for every operation from Python. The first call that may
read its data waits for the bucket and restores the class. Calls that ask only for metadata or for
`.grad` go through. Torch's `UninitializedParameter` changes its class in the same way.

Reads that bypass Python are not seen. A kernel that gets a parameter from C++ is covered by a hook
on the module that owns the parameter. Not covered are: such a kernel outside that module's forward,
a function transform or DLPack export of the parameter itself, torch's constructors such as
`torch.tensor(param)`, `x.data = param` and `x.set_(param)`, a tensor on the same memory taken
before the launch, and the replay of a CUDA graph. Construct the optimizer with `overlap=False` for
those. Compiled and scripted code reads parameters without Python: see `compiled.py`. From the first
trace on, and for a scripted module, every gather is over when the step returns.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from shardstep.comm import Comm, Work, span
from shardstep.comm.at_exit import ends_with_error
from shardstep.gather.base import ParamGather
from shardstep.gather.compiled import (
    CompiledPart,
    Handle,
    parts_that_read,
    runs_outside_python,
    watch_compiler,
)
from shardstep.params.module import Removable, UncopiedHook, remove_hooks, when_freed
from shardstep.params.sharded_params import ShardedParams

COMPILED_IN_FLIGHT = 4
"""Forward passes that may compile while parameters are in flight.

Dynamo compiles a part again in every forward pass if it reads parameters of other parts: in flight
they have another class. It gives up after 8 times.
"""


class OverlappedGather(ParamGather):
    """Gathers that go on after `launch` has returned, until their parameters are read.

    The parameters live in their buckets.
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
        when_freed(self, self._flights.after_last, partial(remove_hooks, self._handles))
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
    def end_step(self, error: Exception | None, buckets: Collection[int] | None = None) -> None:
        try:
            self._flights.errors = self._comm.share_error(error)
        except RuntimeError as raised:
            self._flights.errors = FailedGather(raised)
        self.launch(buckets)

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
        for number, message in enumerate(self._storage.messages):
            if buckets is not None and message.bucket not in buckets:
                continue
            try:
                with span("gather", message.bucket):
                    work = self._comm.queue(number).all_gather(message.buffer, message.cuts)
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


class Flights:
    """The buckets in flight.

    Parameters in flight and module hooks refer to this object, not to the optimizer: a parameter
    that is read after its optimizer was freed still waits. In turn, it holds parameters weakly.

    Attributes:
        works: the gathers in flight, by the number of their bucket.
        errors: the errors of the last step, awaited before the next forward pass, or with the first
            bucket.
    """

    def __init__(self, buckets: Iterable[Iterable[torch.Tensor]]) -> None:
        self._params = [[weakref.ref(param) for param in params] for params in buckets]
        self.works: dict[int, Work] = {}
        self.errors: Work | None = None
        self._lock = threading.RLock()
        self._after_last: Callable[[], None] | None = None

    def add(self, bucket: int, work: Work, device: torch.device, mark: bool) -> None:
        """Take in a gather that was launched, and let its parameters wait for it if `mark`."""
        # A plain optimizer would have written the parameters on this stream, so code that orders
        # itself behind it expects them there, whichever stream waits first.
        self.works[bucket] = work if device.type == "cpu" else _OnStream(work, device)
        for param in self._alive(bucket) if mark else ():
            # In this order: a signal handler in between finds no flight to wait for otherwise.
            param._shardstep_flight = (self, bucket)  # type: ignore[attr-defined]
            param.__class__ = _in_flight_class(type(param))

    def wait_for_errors(self) -> None:
        """Raise if the last step failed on another rank."""
        errors, self.errors = self.errors, None
        if errors is not None:
            with _outside_modes():
                errors.wait()

    def wait(self) -> None:
        """Wait for all buckets, and for the errors of a step that had none to send."""
        for number in list(self.works):
            self.wait_for(number)
        self.wait_for_errors()

    def wait_for(self, bucket: int) -> None:
        """Wait until the parameters of `bucket` have arrived."""
        # Another thread that asks meanwhile has to wait as well.
        with self._lock:
            work = self.works.get(bucket)
            if work is not None:
                # If this raises, the bucket stays in flight: its values must not be read.
                with span("wait for gather", bucket), _outside_modes():
                    work.wait()
            # A signal handler may run between any two lines, here and in `add`, and wait for the
            # same bucket: parameters may still be marked when there is no work left.
            for param in self._alive(bucket):
                arrived = getattr(param, "_shardstep_class", None)
                if arrived is not None:
                    param.__class__ = arrived
                    vars(param).pop("_shardstep_flight", None)
            self.works.pop(bucket, None)
            if not self.works and self._after_last is not None:
                self._after_last()
            self.wait_for_errors()

    @staticmethod
    def wait_in(tree: Any) -> None:
        """Wait for every parameter in flight, of any optimizer, among the leaves of `tree`."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, _InFlight):
                flight = getattr(leaf, "_shardstep_flight", None)
                if flight is not None:  # another thread may just have waited for it
                    flights, bucket = flight
                    flights.wait_for(bucket)

    def after_last(self, act: Callable[[], None]) -> None:
        """Call `act` once nothing is in flight any more."""
        self._after_last = act
        if not self.works:
            act()

    def _alive(self, bucket: int) -> Iterator[torch.Tensor]:
        return (param for ref in self._params[bucket] if (param := ref()) is not None)


def _outside_modes() -> contextlib.AbstractContextManager[Any]:
    """Suspend the caller's dispatch modes: with fake tensors, copies would not take place."""
    active = torch._C._len_torch_dispatch_stack()
    return _disable_current_modes() if active else contextlib.nullcontext()


class _InFlight:
    """The base class of a parameter in flight."""

    _shardstep_class: type
    _shardstep_flight: tuple[Flights, int]

    # In these, torch reads the data without asking, or decides by the parameter's class before.

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._shardstep_class(*args, **kwargs)  # another of its class, which is not in flight

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        Flights.wait_in(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        Flights.wait_in(self)
        return self.__reduce_ex__(protocol)

    def as_subclass(self, cls: type) -> Any:
        Flights.wait_in(self)
        return self.as_subclass(cls)

    def detach(self) -> Any:
        Flights.wait_in(self)
        detached: Any = self.detach()
        # `torch.nn.Parameter(param)` took the class for a user's, which `detach()` has to keep.
        caller = getattr(inspect.currentframe(), "f_back", None)
        wrapped = caller is not None and caller.f_code is torch.nn.Parameter.__new__.__code__
        return detached.as_subclass(type(self)) if wrapped else detached

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        Flights.wait_in((args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


@cache
def _in_flight_class(cls: type) -> type:
    """Return the class that a parameter of class `cls` has while it is in flight."""
    return type(f"InFlight{cls.__name__}", (_InFlight, cls), {"_shardstep_class": cls})


_GETTERS = (
    "grad requires_grad is_leaf shape dtype device layout ndim is_cuda is_cpu is_sparse is_meta "
    "is_quantized itemsize grad_fn nbytes _backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "size stride numel nelement dim ndimension element_size storage_offset is_floating_point "
    "is_complex is_contiguous get_device __len__ __hash__"
)
_METADATA = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _GETTERS.split()),
        *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    }
)
"""Operations on a parameter that do not read its data."""


class _OnStream(Work):
    """A gather launched from one stream that may be waited for from another."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._pending = work
        self._device = device
        self._streams = torch.get_device_module(device)
        self._launched_from = self._streams.current_stream(device)

    @override
    def wait(self) -> None:
        here = self._streams.current_stream(self._device)
        with self._streams.stream(self._launched_from):
            self._pending.wait()
        if here != self._launched_from:
            here.wait_stream(self._launched_from)


class FailedGather(Work):
    """A gather that could not be launched: reading a parameter of its bucket raises."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    @override
    def wait(self) -> None:
        raise self._error


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
