"""Parameters that wait for their gather when they are first read.

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
a function transform or DLPack export of the parameter itself, a tensor on the same memory taken
before the launch, and the replay of a CUDA graph. Construct the optimizer with `overlap=False` for
those. Compiled and scripted code reads parameters without Python: see `compiled.py`. From the first
trace on, and for a scripted module, every gather is over when the step returns.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from shardstep.comm import Work
from shardstep.comm.spans import span


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
            param.__class__ = _in_flight_class(type(param))
            param._shardstep_flight = (self, bucket)  # type: ignore[attr-defined]

    def wait_for_errors(self) -> None:
        """Raise if the last step failed on another rank."""
        errors, self.errors = self.errors, None
        if errors is not None:
            errors.wait()

    def wait(self) -> None:
        """Wait for all buckets."""
        for number in list(self.works):
            self.wait_for(number)

    def wait_for(self, bucket: int) -> None:
        """Wait until the parameters of `bucket` have arrived."""
        # Another thread that asks meanwhile has to wait as well.
        with self._lock:
            work = self.works.get(bucket)
            if work is None:
                return
            # If this raises, the bucket stays in flight: its values must not be read.
            with span("wait for gather", bucket):
                work.wait()
            for param in self._alive(bucket):
                if isinstance(param, _InFlight):
                    param.__class__ = param._shardstep_class
                    del param._shardstep_flight
            del self.works[bucket]
            if not self.works and self._after_last is not None:
                self._after_last()
            self.wait_for_errors()

    def after_last(self, act: Callable[[], None]) -> None:
        """Call `act` once nothing is in flight any more."""
        self._after_last = act
        if not self.works:
            act()

    def _alive(self, bucket: int) -> Iterator[torch.Tensor]:
        return (param for ref in self._params[bucket] if (param := ref()) is not None)


class _InFlight:
    """The base class of a parameter in flight."""

    _shardstep_class: type
    _shardstep_flight: tuple[Flights, int]

    # In these two, torch decides by the parameter's class before it reads the data.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wait_if_in_flight(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_if_in_flight(self)
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
        for leaf in tree_leaves((args, dict(kwargs or {}))):
            wait_if_in_flight(leaf)
        return func(*args, **(kwargs or {}))


def wait_if_in_flight(value: Any) -> None:
    """Wait until `value` has arrived, if it is a parameter in flight."""
    flight = getattr(value, "_shardstep_flight", None) if isinstance(value, _InFlight) else None
    if flight is not None:  # another thread may just have waited for it
        flights, bucket = flight
        flights.wait_for(bucket)


@cache
def _in_flight_class(cls: type) -> type:
    """Return the class that a parameter of class `cls` has while it is in flight."""
    return type(f"InFlight{cls.__name__}", (_InFlight, cls), {"_shardstep_class": cls})


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
