"""Feeders of a reducer: local gradients from autograd, or from DDP's buckets.

A feeder hands this rank's gradients to the reducer and puts a placeholder into `param.grad` once a
gradient has been sent.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from shardstep.gradients.sharded_grad import ShardedGrad
from shardstep.params.module import remove_hooks, when_freed

if TYPE_CHECKING:
    from shardstep.gradients.reducer import GradReducer


class Taken(NamedTuple):
    """The gradients of one bucket, to be sent.

    Attributes:
        grads: the gradient of each parameter; None if there is none.
        kept: the parameters whose reduced gradient was not cleared: these are added to it.
        cleared: the parameters whose earlier gradients no longer count.
        memory: room for each reduced gradient, once these were sent; empty if there is none.
    """

    grads: list[torch.Tensor | None]
    kept: set[int]
    cleared: Sequence[int]
    memory: Sequence[torch.Tensor | None] = ()


class Present(NamedTuple):
    """The gradients that there are.

    Attributes:
        types: the types of `param.grad`: of gradients, placeholders and None.
        kept: the parameters whose gradient was sent and not cleared: equal on every rank.
    """

    types: set[type]
    kept: set[int]


class Feeder:
    """The source of a reducer's local gradients.

    The reducer calls `attach` once.

    Attributes:
        aside: placeholders of gradients that the next round replaces and does not add to.
    """

    ends_with_backward = True
    """True if a round ends with the backward pass that it began in; if not, the step ends it."""

    lends_memory = False
    """True if `take` lends room for this rank's part of every reduced gradient."""

    def attach(self, reducer: GradReducer) -> None:
        """Feed `reducer` from now on."""
        self._params = reducer.params
        self._trained = reducer.trained
        self._training = [self._params[index] for index in self._trained]
        self._placeholders = reducer.placeholders
        # Hooks and DDP outlive the reducer; a strong reference would keep model and optimizer
        # alive, where the garbage collector cannot see it.
        self._reducer = weakref.ref(reducer)
        self.aside: set[int] = set()
        self._handles: list[RemovableHandle] = []
        served = [weakref.ref(param) for param in self._training]
        placeholders = list(self._placeholders.values())
        self._let_go = when_freed(self, _let_go, served, placeholders, self._handles)

    def detach(self) -> None:
        """Feed the reducer no longer: remove hooks and placeholders."""
        self._let_go()

    def present(self, check: bool = True) -> Present:
        """Return the gradients that there are.

        Raises:
            RuntimeError: if `check`, and a parameter was given the placeholder of another one.
        """
        # Parameters in flight, which this backward pass may not use, are not waited for.
        with torch._C.DisableTorchFunctionSubclass():
            grads = [param.grad for param in self._training]
        types = set(map(type, grads))
        if ShardedGrad not in types:
            return Present(types, set())
        sent = set()
        for grad, (index, placeholder) in zip(grads, self._placeholders.items(), strict=True):
            if grad is placeholder:
                sent.add(index)
            elif check and isinstance(grad, ShardedGrad):
                raise RuntimeError(
                    f"parameter {placeholder.param_name!r} was given the placeholder of the "
                    f"sharded gradient of parameter {grad.param_name!r}, which holds no "
                    f"numbers; give it optimizer.full_grad({grad.param_name!r}), called on "
                    "every rank"
                )
        return Present(types, sent - self.aside)

    def keep(self, params: Iterable[int]) -> None:
        """Clear the reduced gradients of all other parameters, as ranks that have data did."""
        for index in self.present().kept.difference(params):
            self._params[index].grad = None

    def take(self, params: Sequence[int]) -> Taken:
        """Return this rank's gradients to be sent, and forget them here."""
        raise NotImplementedError

    def before_end(self) -> None:
        """Note that a round is about to be ended, and not by its backward pass."""

    def hold_back(self, param: int) -> None:
        """Note that a gradient has come that is not to be sent yet."""

    def pause(self) -> None:
        """Refuse to accumulate gradients locally, if this feeder cannot."""

    def resume(self) -> None:
        """Put accumulated gradients aside, to be sent with the next round."""

    def check_zeroing(self) -> None:
        """Refuse to set gradients to zero, if this feeder cannot."""

    def check_change(self) -> None:
        """Refuse to change gradients, if the step was taken already."""


class AutogradFeeder(Feeder):
    """Gradients that autograd leaves in `param.grad`."""

    def attach(self, reducer: GradReducer) -> None:
        """Register a hook per parameter."""
        super().attach(reducer)
        for index in self._trained:
            if self._params[index].requires_grad:
                self._handles.append(reducer.hook(index))
        _attached.add(self)

    def detach(self) -> None:
        """Remove hooks and placeholders, and free the parameters for another optimizer."""
        super().detach()
        _attached.discard(self)

    @override
    def take(self, params: Sequence[int]) -> Taken:
        # Asked for every parameter in every round, so written out in one loop.
        grads: list[torch.Tensor | None] = []
        kept: set[int] = set()
        cleared: list[int] = []
        every, placeholders = self._params, self._placeholders
        for index in params:
            param, placeholder = every[index], placeholders[index]
            grad = param.grad
            if grad is placeholder:
                kept.add(index)
            else:
                param.grad = placeholder
            if isinstance(grad, ShardedGrad):
                grad = placeholder.incoming
            else:  # the user has cleared or replaced the earlier gradient
                cleared.append(index)
            grads.append(grad)
            placeholder.incoming = None
        kept -= self.aside
        self.aside.difference_update(params)
        return Taken(grads, kept, cleared)

    @override
    def hold_back(self, param: int) -> None:
        # Autograd would add the next gradient in 16 bits; a placeholder adds in the step's dtype.
        if self._placeholders[param].dtype != self._params[param].dtype:
            self.put_aside(param, self._params[param].grad)

    @override
    def resume(self) -> None:
        # Placeholders take the place of local gradients, which torch's own clipping or a
        # GradScaler would take for everyone's. On every rank, whatever it accumulated.
        for index in self._trained:
            self.put_aside(index, self._params[index].grad)

    def put_aside(self, param: int, grad: torch.Tensor | None) -> None:
        """Keep a gradient of this rank in the placeholder, to be sent with the next round."""
        if not isinstance(grad, ShardedGrad):
            reducer = self._reducer()
            assert reducer is not None
            reducer.used.clear([param])
            self._placeholders[param].incoming = grad
            self._params[param].grad = self._placeholders[param]
            self.aside.add(param)


class DDPFeeder(Feeder):
    """Gradients that DDP hands out in its buckets; every backward pass makes a step."""

    # Inner passes, such as those of reentrant activation checkpointing, end before DDP's last
    # bucket. The step at the end of the outer pass ends the round.
    ends_with_backward = False

    # DDP keeps its buckets for the next backward pass.
    lends_memory = True

    _hidden: Sequence[int] = ()

    def attach(self, reducer: GradReducer) -> None:
        """Feed `reducer` with the gradients that are given to `offer`."""
        super().attach(reducer)
        self._offered: dict[int, torch.Tensor] = {}
        self._places: dict[int, torch.Tensor] = {}
        self.aside = set(self._trained)  # each backward pass starts over

    def hide_placeholders(self) -> None:
        """Take the placeholders out of `param.grad`."""
        self._hidden = [i for i in self._trained if isinstance(self._params[i].grad, ShardedGrad)]
        for index in self._hidden:
            self._params[index].grad = None

    def drop_placeholders(self) -> None:
        """Take them out for good, as if the gradients had been cleared."""
        self.hide_placeholders()
        self._hidden = []

    def show_placeholders(self) -> None:
        """Put hidden placeholders back, where no gradient has come since."""
        for index in self._hidden:
            if self._params[index].grad is None:
                self._params[index].grad = self._placeholders[index]
        self._hidden = []

    def offer(self, param: int, grad: torch.Tensor) -> None:
        """Take one parameter's gradient; its memory is ours until the next backward pass."""
        reducer = self._reducer()
        assert reducer is not None
        # DDP fills in zeros for a parameter that this pass did not use, and for all parameters of
        # a joined rank, where the placeholders of its last step are left over.
        local = self._params[param].grad
        self._places[param] = grad
        if local is not None and not isinstance(local, ShardedGrad):
            self._offered[param] = grad
        reducer.gradient_ready(param)

    @override
    def take(self, params: Sequence[int]) -> Taken:
        for index in params:
            self._placeholders[index].incoming = None
        grads = [self._offered.pop(index, None) for index in params]
        return Taken(grads, set(), params, [self._places.pop(index, None) for index in params])

    @override
    def before_end(self) -> None:
        # Not earlier: DDP writes its own share to `param.grad` at the end of backward.
        for index in self._trained:
            self._params[index].grad = self._placeholders[index]

    @override
    def pause(self) -> None:
        raise RuntimeError("DDP decides when gradients are reduced: use ddp.no_sync()")

    @override
    def check_change(self) -> None:
        raise RuntimeError(
            "gradients cannot be clipped or scaled with overlap_with_ddp=True: the step was taken "
            "inside backward, on the gradients as they were; use module= instead"
        )

    @override
    def check_zeroing(self) -> None:
        raise ValueError(
            "gradients that DDP has reduced to their owners can be cleared, but not set to zero: "
            "call zero_grad() without set_to_none=False"
        )


def _let_go(
    params: Sequence[weakref.ref[torch.Tensor]],
    placeholders: Sequence[ShardedGrad],
    handles: Sequence[RemovableHandle],
) -> None:
    """Remove hooks, and placeholders that are left in `param.grad`."""
    remove_hooks(handles)
    for ref, placeholder in zip(params, placeholders, strict=True):
        param = ref()
        if param is not None and param.grad is placeholder:
            param.grad = None


_attached: weakref.WeakSet[AutogradFeeder] = weakref.WeakSet()


def refuse_watched(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise if another `module=` optimizer already reduces one of these parameters.

    Raises:
        ValueError: naming the parameter.
    """
    named = [(name, param) for name, param in named if param.requires_grad]
    watched = _watched()
    if any(id(param) in watched for _, param in named):
        gc.collect()  # an optimizer that the user has dropped may be waiting for the collector
        watched = _watched()
    for name, param in named:
        if id(param) in watched:
            raise ValueError(
                f"parameter {name!r} already has its gradient reduced by another optimizer with "
                "module=; call detach() on that one first"
            )


def _watched() -> set[int]:
    return {id(param) for feeder in _attached for param in feeder._training}
