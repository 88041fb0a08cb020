"""From every rank's segment to everybody's parameters.

`gather_parameters` does it there and then. `GatherAhead` launches the gathers and returns: a bucket
is waited for when one of its parameters is first used, so that the gathers run while the next
forward does.

Note [How a parameter in flight is watched]

A parameter whose bucket is in flight must not be read by anybody: not by its own module's forward,
nor by another module that reaches for it, by a checkpoint, by an average of the weights that keeps
a list of the parameters, or by a user at a prompt. A module's hooks see only the first of these. So
the parameter itself watches: for as long as its bucket is in flight its class is a subclass that
overrides `__torch_function__`, which torch calls for whatever is done to it from Python. The first
call that may read its data waits for the bucket and gives the class back; calls that ask only for
metadata or for `.grad` go through. Torch's own `UninitializedParameter` changes its class in this
way too.

What Python does not see, it cannot stop. A kernel that is handed a parameter straight from C++ is
covered by a hook on the module that owns the parameter; one that is called outside of that module's
forward, a function transform or DLPack export applied to the parameter itself, another tensor on
the same memory that was taken before the launch, and the replay of a CUDA graph are not: construct
the optimizer with `overlap=False` for those. Compiled and scripted code reads parameters without
Python: from the first compilation or trace on, and for a scripted module, gathers are waited for
where they are launched.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch

from shardstep.comm import Comm, Work
from shardstep.gradients.sharded_grad import flatten
from shardstep.params.module_hook import UncopiedHook
from shardstep.params.storage import ParamStorage
from shardstep.plan import Bucket, ShardPlan


def gather_parameters(
    comm: Comm, plan: ShardPlan, home: ParamStorage, buckets: Sequence[int] | None = None
) -> None:
    """Bring trainable parameters up to date on every rank, with one gather per bucket.

    Called on every rank. Buckets travel in the order of the plan, as many at a time as the home
    has buffers for.
    """
    in_flight: deque[tuple[Bucket, torch.Tensor, Work]] = deque()

    def land() -> None:
        bucket, buffer, pending = in_flight.popleft()
        pending.wait()
        home.store(bucket, buffer)

    if comm.world_size == 1:
        return
    for bucket in plan.training_buckets:
        if buckets is not None and bucket.index not in buckets:
            continue
        if len(in_flight) == home.depth:
            land()
        buffer = home.load(bucket)
        in_flight.append((bucket, buffer, comm.all_gather(buffer, bucket.cuts)))
    while in_flight:
        land()


class ParamGather(Protocol):
    """How updated parameters get to everybody. Every method is called on every rank."""

    def launch(self, buckets: Sequence[int] | None = None) -> None:
        """Send this rank's segments and ask for the others', of these buckets or of all."""

    def land(self) -> None:
        """Wait for everything that was launched."""

    def detach(self) -> None:
        """Leave parameters and modules alone from now on."""


class ImmediateGather:
    """Gathers are over when `launch` returns.

    Args:
        comm: the ranks.
        plan: the placement.
        home: where the parameters live.
    """

    def __init__(self, comm: Comm, plan: ShardPlan, home: ParamStorage) -> None:
        self._comm = comm
        self._plan = plan
        self._storage = home

    def launch(self, buckets: Sequence[int] | None = None) -> None:
        """Gather these buckets, or all. Called on every rank."""
        gather_parameters(self._comm, self._plan, self._storage, buckets)

    def land(self) -> None:
        """Nothing is in flight."""

    def detach(self) -> None:
        """Nothing is attached."""


class OverlappedGather:
    """Gathers run on after `launch` has returned, until somebody needs them.

    Args:
        comm: the ranks, on connections that carry nothing else.
        plan: the placement.
        home: where the parameters live: in the buckets, so that nothing is left to unpack.
        params: all parameters, in the plan's order.
        module: the module they belong to.
    """

    def __init__(
        self,
        comm: Comm,
        plan: ShardPlan,
        home: ParamStorage,
        params: Sequence[torch.Tensor],
        module: torch.nn.Module,
    ) -> None:
        self._comm = comm
        self._plan = plan
        self._storage = home
        self._params = [
            [params[slot.param] for slot in bucket.slots] for bucket in plan.training_buckets
        ]
        self._in_flight: dict[int, Work] = {}
        self._lock = threading.RLock()
        self._bucket_of = {
            param: number for number, held in enumerate(self._params) for param in held
        }
        self._ahead = not _runs_outside_python(module)
        self._handles: list[Any] = []
        if self._ahead:
            self._watch_forward(module)
        _alive.add(self)
        _watch_compiler()

    def _watch_forward(self, module: torch.nn.Module) -> None:
        self._handles.append(
            module.register_forward_pre_hook(UncopiedHook(self._before_evaluation))
        )
        for part in module.modules():
            params = part.parameters(recurse=False)
            own = {self._bucket_of[p] for p in params if p in self._bucket_of}
            if own:
                self._handles.append(
                    part.register_forward_pre_hook(UncopiedHook(self._before_forward(sorted(own))))
                )

    def _before_forward(self, buckets: list[int]) -> Any:
        def wait_for_own(module: torch.nn.Module, args: Any) -> None:
            if torch._C._is_tracing():
                self.disable_overlap()  # the trace will read parameters without Python
            if self._in_flight:
                for number in buckets:
                    self._land_bucket(number)

        return wait_for_own

    def _before_evaluation(self, module: torch.nn.Module, args: Any) -> None:
        # Fused inference kernels are passed over for a tensor that overrides anything, and what is
        # used instead rounds differently.
        if not module.training:
            self.land()

    def launch(self, buckets: Sequence[int] | None = None) -> None:
        """Send this rank's segments and ask for the others'. Called on every rank."""
        if self._comm.world_size == 1:
            return
        error: RuntimeError | None = None
        for number, bucket in enumerate(self._plan.training_buckets):
            if buckets is not None and number not in buckets:
                continue
            try:
                pending = self._comm.all_gather(self._storage.load(bucket), bucket.cuts)
            except RuntimeError as raised:
                error = error or raised
                pending = _Failed(error)
            self._in_flight[number] = _on_this_stream(pending, self._params[number][0].device)
            if self._ahead:
                for param in self._params[number]:
                    param.__class__ = _watched(type(param))
                    param._shardstep_flight = (self, number)  # type: ignore[attr-defined]
        if error is not None:
            raise error
        if not self._ahead:
            self.land()

    def land(self) -> None:
        """Wait for every bucket in flight."""
        for number in list(self._in_flight):
            self._land_bucket(number)

    def _land_bucket(self, number: int) -> None:
        # Whoever else asks meanwhile, in another thread, has to wait as well.
        with self._lock:
            pending = self._in_flight.get(number)
            if pending is None:
                return
            # If this raises, the bucket stays in flight: its values have not come, and nobody may
            # take what is there for them.
            pending.wait()
            for param in self._params[number]:
                if isinstance(param, _Watched):
                    param.__class__ = param._shardstep_class
                    del param._shardstep_flight
            del self._in_flight[number]

    def disable_overlap(self) -> None:
        """From now on, let gathers land where they are launched, and leave the modules alone."""
        self.land()
        self._ahead = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def detach(self) -> None:
        """Land everything and remove the hooks."""
        self.disable_overlap()
        _alive.discard(self)


def _on_this_stream(pending: Work, device: torch.device) -> Work:
    """`pending`, waited for by the stream that is current now, whichever asks for it first.

    A plain optimizer would have written the parameters on this stream: whoever orders itself
    behind it has to find them there.
    """
    if device.type == "cpu":
        return pending
    return _OnStream(pending, device)


class _OnStream:
    """A gather that was launched from one stream and may be waited for from another."""

    def __init__(self, pending: Work, device: torch.device) -> None:
        self._pending = pending
        self._device = device
        self._streams = torch.get_device_module(device)
        self._launched_from = self._streams.current_stream(device)

    def wait(self) -> None:
        """Wait on both streams."""
        here = self._streams.current_stream(self._device)
        with self._streams.stream(self._launched_from):
            self._pending.wait()
        if here != self._launched_from:
            here.wait_stream(self._launched_from)


class _Failed:
    """A gather that could not be launched: a parameter of the bucket must not be read."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        """Say why."""
        raise self._error


class _Watched:
    """What a parameter's class inherits from while it is in flight."""

    _shardstep_class: type
    _shardstep_flight: tuple[OverlappedGather, int]

    # What torch does in these it does by the class of the parameter, before it reads its data.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _land(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _land(self)
        return self.__reduce_ex__(protocol)

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
        for leaf in flatten((args, kwargs)):
            if isinstance(leaf, _Watched):
                _land(leaf)
        return func(*args, **(kwargs or {}))


def _land(param: _Watched) -> None:
    flight = getattr(param, "_shardstep_flight", None)
    if flight is not None:  # it may have landed just now, in another thread
        gather, number = flight
        gather._land_bucket(number)


@cache
def _watched(cls: type) -> type:
    """The class that a parameter of class `cls` has while it is in flight."""
    return type(f"InFlight{cls.__name__}", (_Watched, cls), {"_shardstep_class": cls})


def _getters(*names: str) -> Iterable[Any]:
    return (getattr(torch.Tensor, name).__get__ for name in names)


_METADATA = frozenset(
    {
        *_getters("grad", "requires_grad", "is_leaf", "shape", "dtype", "device", "layout", "ndim"),
        *_getters("is_cuda", "is_cpu", "is_sparse", "is_meta", "is_quantized", "itemsize"),
        *_getters("grad_fn", "nbytes", "_backward_hooks", "_post_accumulate_grad_hooks"),
        *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.element_size,
        torch.Tensor.storage_offset,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.is_contiguous,
        torch.Tensor.get_device,
        torch.Tensor.__len__,
        torch.Tensor.__hash__,
    }
)
"""What can be asked of a parameter without reading its data."""


_alive: weakref.WeakSet[OverlappedGather] = weakref.WeakSet()
_watching = False


def _land_all() -> None:
    for gather in list(_alive):
        gather.land()


# What is in flight arrives in this process: in a forked one, a read would wait forever.
os.register_at_fork(before=_land_all)


def _watch_compiler() -> None:
    """Have every gather told when torch.compile starts for the first time."""
    global _watching
    if not _watching:
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(_compilation_starts)
        _watching = True


def _compilation_starts(args: Any = None) -> None:
    for gather in list(_alive):
        gather.disable_overlap()


def _runs_outside_python(module: torch.nn.Module) -> bool:
    """Whether any of this may be running code already that Python does not see."""
    from torch._dynamo.utils import counters

    scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    return scripted or bool(counters["frames"])
