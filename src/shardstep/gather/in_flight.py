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
those. Compiled and scripted code reads parameters without Python: from the first compilation or
trace on, and for a scripted module, every gather is over when the step returns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from shardstep.comm import Work


class BucketGather(Protocol):
    """Something that can wait for one bucket."""

    def wait_for(self, bucket: int) -> None:
        """Wait until the parameters of `bucket` have arrived."""


def mark_in_flight(param: torch.Tensor, gather: BucketGather, bucket: int) -> None:
    """Let `param` wait for `bucket` when it is first read."""
    param.__class__ = _in_flight_class(type(param))
    param._shardstep_flight = (gather, bucket)  # type: ignore[attr-defined]


def mark_arrived(param: torch.Tensor) -> None:
    """Give `param` its class back."""
    if isinstance(param, _InFlight):
        param.__class__ = param._shardstep_class
        del param._shardstep_flight


class _InFlight:
    """The base class of a parameter in flight."""

    _shardstep_class: type
    _shardstep_flight: tuple[BucketGather, int]

    # In these two, torch decides by the parameter's class before it reads the data.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait(self)
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
            if isinstance(leaf, _InFlight):
                _wait(leaf)
        return func(*args, **(kwargs or {}))


def _wait(param: _InFlight) -> None:
    flight = getattr(param, "_shardstep_flight", None)
    if flight is not None:  # another thread may just have waited for it
        gather, bucket = flight
        gather.wait_for(bucket)


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


def on_launching_stream(work: Work, device: torch.device) -> Work:
    """Make the current stream wait for `work`, whichever stream asks for it first.

    A plain optimizer would have written the parameters on this stream, so code that orders itself
    behind it expects them there.
    """
    return work if device.type == "cpu" else _OnStream(work, device)


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
