"""The placeholder in `param.grad` of a gradient that is sharded across ranks.

`None` there would be a trap: `torch.nn.utils.clip_grad_norm_` would silently clip nothing. A
`ShardedGrad` has the parameter's shape and no memory. Autograd may add to it: the addend is kept
and reduced with the next round. `zero_grad` may clear it, and a `GradScaler` may unscale it.
Clipping may ask for its norm, scale it and clamp it: Note [Norms of sharded gradients] in
`norms.py`. Every other operation raises and names the call to use instead.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from shardstep.gradients.reducer import GradReducer

aten = torch.ops.aten

_COMPILERS = ("torch._dynamo.variables.builder", "torch._subclasses.meta_utils")


class ShardedGrad(torch.Tensor):
    """The placeholder of one parameter's gradient.

    Attributes:
        param: number of the parameter.
        param_name: its name.
        incoming: the sum that autograd has added since the last round, if any.
    """

    param: int
    param_name: str
    incoming: torch.Tensor | None
    _reducer: weakref.ref[GradReducer]
    _sharded_dtype: torch.dtype

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, param: int, name: str, reducer: GradReducer, dtype: torch.dtype
    ) -> ShardedGrad:
        """Make a placeholder for the gradient of `like`, which is sharded and in `dtype`."""
        self: ShardedGrad = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        self.param = param
        self.param_name = name
        # The parameter holds its placeholder in C++, where the garbage collector cannot see it. A
        # strong reference would never let go of the model.
        self._reducer = weakref.ref(reducer)
        self.incoming = None
        self._sharded_dtype = dtype
        return self

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the sharded gradient; autograd and compilers see the parameter's own.

        `GradScaler` asks, and refuses to unscale fp16.
        """
        return super().dtype if _is_asked_by_compiler() else self._sharded_dtype

    @property
    def data(self) -> torch.Tensor:
        """The placeholder. Only itself may be assigned, as a conversion does that changes nothing.

        Torch would take any tensor, and put it where nobody looks.
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self:
            raise self.refusal("an assignment to .data")

    @property
    def reducer(self) -> GradReducer:
        """The reducer that has the gradient."""
        reducer = self._reducer()
        if reducer is None:
            raise RuntimeError(
                f"the optimizer that had the gradient of parameter {self.param_name!r} is gone; "
                "set its .grad to None"
            )
        return reducer

    def untyped_storage(self) -> torch.UntypedStorage:
        """Refuse, except for a compiler: there is no memory."""
        if _is_asked_by_compiler():
            return super().untyped_storage()
        raise self.refusal("untyped_storage")

    def __repr__(self) -> str:  # type: ignore[override]
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
        """Run the operations that a sharded gradient supports, and refuse the rest."""
        act, operation = _ACTS.get(func.overloadpacket), func.overloadpacket.__name__
        if kwargs:
            act, operation = None, f"{operation} with {', '.join(kwargs)}"
        in_backward = torch._C._current_graph_task_id() != -1
        # A user who adds to it means something else, and autograd does nothing but add. A hook
        # that changes it would change the sum over ranks, and end the round.
        if act is not _same and in_backward != (act is _accumulate):
            act = None
        single = isinstance(args[0], torch.Tensor)
        grads = [args[0]] if single else args[0]
        mixed = not all(isinstance(grad, ShardedGrad) for grad in grads)
        if act is None or (mixed and act is not _zero):
            found = next(a for a in tree_leaves(args) if isinstance(a, ShardedGrad))
            raise found.refusal(operation)
        # One list may hold gradients of several models, and some that were not sent yet.
        by_reducer: dict[Any, list[Any]] = {}
        for grad in grads:
            by_reducer.setdefault(getattr(grad, "reducer", None), []).append(grad)
        results = {reducer: act(part, *args[1:]) for reducer, part in by_reducer.items()}
        if None in results.values():  # in place
            return grads[0] if single else None
        ordered = {reducer: iter(each) for reducer, each in results.items()}
        all_results = [next(ordered[grad.reducer]) for grad in grads]
        return all_results[0] if single else all_results

    def refusal(self, operation: str) -> RuntimeError:
        """Return the error for an operation that needs the numbers."""
        return RuntimeError(
            f"{operation} is not possible on the gradient of parameter {self.param_name!r}, which "
            f"is sharded across ranks. To read it, call optimizer.full_grad({self.param_name!r}) "
            "on every rank; to change it, call optimizer.clip_grad_norm_() or the parameter's "
            "register_hook(). With module=, do not wrap the model in DDP; with register, call "
            "zero_grad() before backward"
        )


def _is_asked_by_compiler() -> bool:
    """Return whether the caller's caller compiles or exports a model.

    Torch looks at a parameter together with its gradient then, and makes fake tensors of both.
    """
    here = inspect.currentframe()
    frame = here and here.f_back and here.f_back.f_back
    return frame is not None and frame.f_globals.get("__name__") in _COMPILERS


def _make_refusal(operation: str) -> Callable[..., NoReturn]:
    def refuse(self: ShardedGrad, *args: Any, **kwargs: Any) -> NoReturn:
        raise self.refusal(operation)

    return refuse


# These bypass the dispatcher and read memory that is not there: share_memory() would crash.
for _name in ("data_ptr", "numpy", "tolist", "item", "__dlpack__"):
    setattr(ShardedGrad, _name, _make_refusal(_name))
ShardedGrad.__reduce_ex__ = _make_refusal("pickling")  # type: ignore[method-assign]


# Each of these takes the gradients that an operation is called on. It returns a result for each of
# them, or None for an operation in place.


def _accumulate(grads: Sequence[ShardedGrad], new: torch.Tensor, *_: Any) -> None:
    (grad,) = grads
    # Not in place: autograd may hand the same tensor to another parameter. In the step's dtype.
    grad.incoming = new if grad.incoming is None else grad.incoming.to(grad.dtype) + new


def _zero(grads: Sequence[Any], *_: Any) -> None:
    if isinstance(grads[0], ShardedGrad):
        grads[0].reducer.zero_some([grad.param for grad in grads])
        return
    for grad in grads:
        grad.zero_()  # not sent yet


def _unscale(
    grads: Sequence[ShardedGrad], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    grads[0].reducer.unscale([grad.param for grad in grads], found_inf, inv_scale)


def _norms(
    grads: Sequence[ShardedGrad], order: float = 2, dim: Any = None, keepdim: bool = False
) -> list[torch.Tensor]:
    if dim not in (None, [], list(range(grads[0].ndim))) or order <= 0 or keepdim:
        kept = " with keepdim" if keepdim else ""
        raise grads[0].refusal(f"a norm of order {order} over {dim}{kept}")
    return grads[0].reducer.norms([grad.param for grad in grads], float(order))


def _make_change(*operations: str) -> Callable[..., None]:
    """Return an operation that changes gradients in place by a number each, in this order."""

    def change(grads: Sequence[ShardedGrad], *numbers: Any) -> None:
        for operation, number in zip(operations, numbers, strict=False):
            several = isinstance(number, torch.Tensor) and number.ndim > 0
            if several or isinstance(number, (list, tuple)):
                raise grads[0].refusal(f"{operation} with more than one number")
            if number is not None:
                grads[0].reducer.change(operation, [grad.param for grad in grads], number)

    return change


def _same(grads: Sequence[ShardedGrad], *_: Any) -> None:
    pass


_ACTS: dict[Any, Callable[..., Any]] = {
    aten.add_: _accumulate,
    aten.zero_: _zero,
    aten._foreach_zero_: _zero,
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
    aten.linalg_vector_norm: _norms,
    aten.norm: _norms,
    aten._foreach_norm: _norms,
    aten.mul_: _make_change("mul_"),
    aten.div_: _make_change("div_"),
    aten.clamp_: _make_change("clamp_min_", "clamp_max_"),
    aten._foreach_mul_: _make_change("mul_"),
    aten._foreach_div_: _make_change("div_"),
    aten._foreach_clamp_min_: _make_change("clamp_min_"),
    aten._foreach_clamp_max_: _make_change("clamp_max_"),
    aten.detach: _same,
    aten.detach_: _same,
}
