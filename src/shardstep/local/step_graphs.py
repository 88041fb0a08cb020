"""Steps that repeat an earlier one, replayed as CUDA graphs: one launch takes a whole step.

A fused Adam spends more of the host's time on walks through lists of tensors than on launches. A
graph needs neither, but it has the addresses of all tensors and the values of all options built in.
So before each step both are compared with those of earlier steps. A step seen for the first time is
taken as usual. When it comes again, it is recorded, and replayed from then on. Gradients mostly do
come back to the same memory: each iteration allocates and frees in the same order.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import NoneType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

REMEMBERED = 8
"""The number of steps that are remembered. Mostly one or two take turns."""

PATIENCE, PAUSE = 16, 64
"""After so many steps in a row that were new, only every so many are compared."""


@dataclass(slots=True)
class _Footprint:
    """The tensors and options of a step.

    If an optimizer has the same footprint again, its step launches the same kernels.

    Attributes:
        addresses: of gradients, parameters and state.
        strides: of the gradients; parameters and state keep theirs.
        missing: for each parameter, whether it has no gradient; empty if all have one.
        owners: the identities of the parameters with state.
        names: of all state, in the order of the owners.
        options: of each group, and its number of parameters.
        code: the step of the class, which somebody may patch.
    """

    addresses: list[int]
    strides: list[tuple[int, ...]]
    missing: list[bool]
    owners: list[int]
    names: list[Any]
    options: list[list[Any]]
    code: Any

    @classmethod
    def of(cls, optim: Optimizer) -> _Footprint | None:
        """Return the footprint of the next step, or None if addresses do not say all of it."""
        params = [param for group in optim.param_groups for param in group["params"]]
        grads = [grad for param in params if (grad := param.grad) is not None]
        if not grads:
            return None  # torch warns of an empty graph
        states = optim.state.values()
        options = _options(optim)
        if {*map(type, states)} - {dict} or not all(map(_is_fixed, chain(*options))):
            return None
        tensors = [*grads, *params, *chain.from_iterable([state.values() for state in states])]
        if {*map(type, tensors)} - {Tensor, Parameter}:
            return None  # others have their memory elsewhere
        try:
            addresses = [*map(Tensor.data_ptr, tensors)]
        except RuntimeError:  # a sparse one has several addresses
            return None
        return cls(
            addresses,
            strides=[*map(Tensor.stride, grads)],
            missing=[p.grad is None for p in params] if len(grads) < len(params) else [],
            owners=[*map(id, optim.state)],
            names=[*chain.from_iterable(states)],
            options=options,
            code=type(optim).step,
        )


@dataclass(slots=True)
class _Known:
    """A step that was taken. If it comes again, it is recorded; `replay` is None if that failed."""

    footprint: _Footprint
    recorded: bool = False
    replay: Callable[[], object] | None = None


class StepGraphs:
    """Takes an optimizer's steps in its place, and replays those that repeat an earlier one."""

    device_type: ClassVar[str] = "cuda"

    def __init__(self, optim: Optimizer) -> None:
        self._optim = optim
        self._attributes = _attributes_of_new(type(optim))
        self._known: deque[_Known] = deque(maxlen=REMEMBERED)
        self._new = 0  # steps since the last that was known

    def step(self, **kwargs: Any) -> Any:
        """Take a step, and return what the optimizer's own `step` returns."""
        optim = self._optim
        tired = self._new >= PATIENCE and self._new % PAUSE
        if kwargs or tired or not self._replayable():
            self._new += 1
            return optim.step(**kwargs)
        now = _Footprint.of(optim)
        known = next((known for known in self._known if known.footprint == now), None)
        if known is None:
            self._new += 1
            result = optim.step()
            after = _Footprint.of(optim)  # the first step has made state
            if after is not None:
                self._known.append(_Known(after))
            return result
        self._new = 0
        if not known.recorded:
            known.recorded, known.replay = True, record(optim)
        return optim.step() if known.replay is None else known.replay()

    def _replayable(self) -> bool:
        """Return True if nothing but tensors and options decides what a step does."""
        optim = self._optim
        first = next((param for group in optim.param_groups for param in group["params"]), None)
        return (
            first is not None
            and all(map(_is_capturable, optim.param_groups))
            and first.device.type == self.device_type
            and not vars(optim).keys() - self._attributes  # such as a scaler's, or another `step`
            and not optim._optimizer_step_pre_hooks
            and not optim._optimizer_step_post_hooks
            and not (first.is_cuda and torch.cuda.is_current_stream_capturing())
        )


def _attributes_of_new(optimizer_class: Any) -> frozenset[str]:
    """Return the attributes of an optimizer that nobody has patched."""
    new = optimizer_class([Parameter(torch.zeros(1, device="cpu"))], fused=True)
    return frozenset({*vars(new), "_warned_capturable_if_run_uncaptured"})


def _is_capturable(group: Mapping[str, Any]) -> bool:
    return bool(group.get("capturable") and group.get("fused"))


def steps_of(optim: Optimizer) -> Optimizer | StepGraphs:
    """Return what takes the steps: graphs for torch's fused classes with `capturable=True`."""
    is_torchs = type(optim).__module__.startswith("torch.optim.")
    return StepGraphs(optim) if is_torchs and _is_capturable(optim.defaults) else optim


def record(optim: Optimizer) -> Callable[[], None] | None:
    """Record a step without taking it. Return what takes it, or None if it cannot be recorded.

    A step that fails while it is recorded has done nothing. It is taken as usual then.
    """
    groups = optim.param_groups
    params = [param for group in groups for param in group["params"]]
    state = chain.from_iterable([state.values() for state in optim.state.values()])
    rates = [group["lr"] for group in groups if isinstance(group["lr"], Tensor)]
    devices = {tensor.device for tensor in chain(params, state, rates)}
    if len(devices) > 1:
        return None
    device = devices.pop()
    graph = torch.cuda.CUDAGraph()
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    try:
        # Some versions of torch reset an offset here that the user's graphs with dropout read.
        side.wait_stream(current)
        with torch.cuda.device(device), torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")  # NCCL's threads go on
            try:
                optim.step()
            finally:
                graph.capture_end()
        current.wait_stream(side)
    except RuntimeError:
        return None
    replay: Callable[[], None] = graph.replay
    return replay


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _options(optim: Optimizer) -> list[list[Any]]:
    """Return what the class reads of each group; a tensor as a learning rate by its address."""
    options = []
    for group in optim.param_groups:
        rate = group["lr"]
        if isinstance(rate, Tensor):
            rate = (rate.data_ptr(), str(rate.dtype))
        others = (group.get(key) for key in optim.defaults if key != "lr")
        options.append([len(group["params"]), rate, *others])
    return options


def _is_fixed(value: Any) -> bool:
    """Return True if `value` cannot change in place."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, (bool, int, float, str, NoneType))
