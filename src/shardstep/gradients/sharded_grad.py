"""What stands in `param.grad` while the gradient itself lies divided among the ranks.

`None` there would be a trap: `torch.nn.utils.clip_grad_norm_` would find nothing to clip and say so
to nobody. A `ShardedGrad` has the parameter's shape and no memory. It lets autograd add to it (what
is added is kept aside and reduced with the next round), lets `zero_grad` clear it, lets a
`GradScaler` unscale it, and refuses everything else with the name of the call to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

aten = torch.ops.aten


class Keeper(Protocol):
    """Who looks after the divided gradients."""

    def zero_some(self, params: Sequence[int]) -> None:
        """Set the gradients of these parameters to zero: this rank's pieces, and what came in."""

    def unscale(
        self, params: Sequence[int], found_inf: torch.Tensor, inv_scale: torch.Tensor
    ) -> None:
        """Divide the gradients of these parameters by a scale, and tell every rank of an infinity.

        Called on every rank.
        """


class ShardedGrad(torch.Tensor):
    """The gradient of one parameter, which this rank has at most a part of.

    Attributes:
        param: number of the parameter.
        param_name: its name.
        keeper: who has the gradient.
        incoming: what autograd has added since the last round, if anything.
    """

    param: int
    param_name: str
    keeper: Keeper
    incoming: torch.Tensor | None
    _divided_dtype: torch.dtype

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, param: int, name: str, keeper: Keeper, dtype: torch.dtype
    ) -> ShardedGrad:
        """A stand-in for the gradient of `like`, which lies divided and in `dtype`."""
        self: ShardedGrad = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        self.param = param
        self.param_name = name
        self.keeper = keeper
        self.incoming = None
        self._divided_dtype = dtype
        return self

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype in which the ranks have the gradient; autograd sees the parameter's own.

        Asked by `GradScaler`, which refuses to unscale what it takes for fp16.
        """
        return self._divided_dtype

    def take_incoming(self) -> torch.Tensor | None:
        """What autograd has added since this was last asked; it is kept here no longer."""
        incoming, self.incoming = self.incoming, None
        return incoming

    def __repr__(self) -> str:  # type: ignore[override]
        """Says whose gradient it stands for; there are no numbers to show."""
        return f"ShardedGrad({self.param_name!r}, shape={tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what can be done on a divided gradient, and say what to call for the rest."""
        act = _ACTS.get(func.overloadpacket)
        if act is _accumulate and torch._C._current_graph_task_id() == -1:
            act = None  # only autograd adds; a user who does means something else
        grads = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
        mixed = not all(isinstance(grad, ShardedGrad) for grad in grads)
        if act is None or (mixed and act is not _zero_each):
            found = next(a for a in flatten(args) if isinstance(a, ShardedGrad))
            raise RuntimeError(
                f"{func.overloadpacket.__name__} cannot be done on the gradient of parameter "
                f"{found.param_name!r}: it lies divided among the ranks. Use "
                "optimizer.clip_grad_norm_(...) to clip, and, to see it, "
                f"optimizer.full_grad({found.param_name!r}) on every rank; before the next "
                "backward pass through a DDP module, clear it with zero_grad(); with module=, "
                "leave DDP out"
            )
        return act(grads, *args[1:])


def _accumulate(grads: Sequence[ShardedGrad], new: torch.Tensor, *_: Any) -> ShardedGrad:
    (grad,) = grads
    # Not in place: what autograd hands over may be somebody else's gradient too. And in the dtype
    # that the sum will be stepped on in.
    grad.incoming = new if grad.incoming is None else grad.incoming.to(grad.dtype) + new
    return grad


def _zero(grads: Sequence[ShardedGrad], *_: Any) -> ShardedGrad:
    _zero_each(grads)
    return grads[0]


def _zero_each(grads: Sequence[torch.Tensor], *_: Any) -> None:
    divided = [grad for grad in grads if isinstance(grad, ShardedGrad)]
    for grad in grads:
        if not isinstance(grad, ShardedGrad):
            grad.zero_()  # not sent yet
    divided[0].keeper.zero_some([grad.param for grad in divided])


def _unscale(
    grads: Sequence[ShardedGrad], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    grads[0].keeper.unscale([grad.param for grad in grads], found_inf, inv_scale)


def _same(grads: Sequence[ShardedGrad], *_: Any) -> ShardedGrad:
    return grads[0]


_ACTS: dict[Any, Callable[..., Any]] = {
    aten.add_: _accumulate,
    aten.zero_: _zero,
    aten._foreach_zero_: _zero_each,
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
    aten.detach: _same,
    aten.detach_: _same,
}


def flatten(value: Any) -> Iterator[Any]:
    """Whatever lies in the arguments of a call, however deep."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flatten(item)
    elif isinstance(value, Mapping):
        yield from flatten(list(value.values()))
    else:
        yield value
