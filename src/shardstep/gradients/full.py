"""Where the local optimizer's gradients come from; here, from `param.grad` on every rank.

This is ZeRO-1: somebody else (DDP, say) has made `param.grad` equal on all ranks. What ZeRO-2 does
instead is in `reduce.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Protocol

import torch

from shardstep.gradients.clip import refuse_nonfinite, wide_norm
from shardstep.params.dtensor import is_dtensor, local_gradient, local_part
from shardstep.params.shard import Shard
from shardstep.params.storage import flat
from shardstep.plan import Bucket, Piece, ShardPlan
from shardstep.precision import MixedPrecision


class GradientSource(Protocol):
    """What the optimizer asks of the gradients. Every method is called on every rank."""

    @property
    def nbytes(self) -> int:
        """Bytes kept for gradients beside `param.grad`."""

    def collect(self) -> None:
        """Let every tensor of this rank's shard have its gradient, or None if there is none."""

    def release(self) -> None:
        """The step is over: let go of what `collect` handed out."""

    def zero(self, set_to_none: bool) -> None:
        """Forget the gradients."""

    def clip_norm(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> torch.Tensor:
        """Scale all gradients so that their common norm is at most `max_norm`; return the norm."""

    def full(self, param: int) -> torch.Tensor | None:
        """The whole gradient of one parameter."""

    @property
    def synchronising(self) -> bool:
        """Whether gradients are sent as they come, and not held back."""

    def hold_back(self) -> None:
        """From now on, only add gradients up on each rank."""

    def send_again(self) -> None:
        """Hold gradients back no longer."""

    def held(self) -> bool:
        """Whether there are gradients for a step that are lost with this object."""

    def detach(self) -> None:
        """Leave the parameters alone from now on."""


class FullGradients:
    """Every rank has every gradient in `param.grad`.

    Args:
        plan: the placement.
        params: all parameters, in the plan's order.
        shard: this rank's pieces, where whole parameters stand for themselves.
        precision: in which dtype each parameter is stepped on.
    """

    def __init__(
        self,
        plan: ShardPlan,
        params: Sequence[torch.Tensor],
        shard: Shard,
        precision: MixedPrecision,
    ) -> None:
        self._params = params
        self._precision = precision
        self._views = shard.views
        self._dtensors = {i: param for i, param in enumerate(params) if is_dtensor(param)}
        self._cut_anywhere = [
            (plan.specs[slot.param].name, params[slot.param])
            for bucket in plan.buckets
            for slot in bucket.slots
            if _is_cut(slot.bucket_offset, slot.bucket_offset + slot.numel, bucket)
        ]

    nbytes = 0
    synchronising = True

    def collect(self) -> None:
        """Point each part of a parameter at its part of that parameter's gradient.

        A tensor of a wider dtype than its parameter gets a copy, which lasts until `release`.

        Raises:
            ValueError: if a parameter that is cut anywhere has a sparse gradient; found on every
                rank, whether or not it owns a part of it.
        """
        for name, param in self._cut_anywhere:
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise ValueError(
                    f"parameter {name!r} has a sparse gradient, which cannot be cut into slices; "
                    'construct the optimizer with layout="whole"'
                )
        # All of them, on every rank: the ranks of a mesh may own pieces of different parameters.
        local = {i: local_gradient(param) for i, param in self._dtensors.items()}
        for piece, tensor in self._views:
            param = self._params[piece.param]
            grad = local.get(piece.param, param.grad)
            tensor.grad = part_of(grad, piece, local_part(param), tensor.dtype)

    def release(self) -> None:
        """Let go of the gradients, so that `zero_grad()` can free them."""
        for _, tensor in self._views:
            tensor.grad = None

    def zero(self, set_to_none: bool) -> None:
        """Nothing beyond `param.grad`, which is the base class's business."""

    def clip_norm(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> torch.Tensor:
        """Every rank has every gradient: torch's own clipping is right.

        But it rounds the norm of a 16-bit gradient to 16 bits. Where such a gradient is stepped on
        in a wider dtype, its norm is computed in that. And it cannot take DTensors and plain
        tensors together.
        """
        dtypes = [self._precision.step_dtype(param.dtype) for param in self._params]
        alike = all(p.dtype == dtype for p, dtype in zip(self._params, dtypes, strict=True))
        if alike and not self._dtensors:
            return torch.nn.utils.clip_grad_norm_(
                self._params, max_norm, norm_type, error_if_nonfinite, foreach
            )
        norm = wide_norm(self._params, dtypes, norm_type)
        refuse_nonfinite(norm, norm_type, error_if_nonfinite)
        # Torch's functions on lists of tensors take DTensors or plain tensors, not both; and those
        # of 2.11 leave a DTensor that is a sum still to be taken as it was. To scale a part of it
        # is right for any placement.
        parts = [
            SimpleNamespace(grad=local_part(param.grad))
            for param in self._params
            if param.grad is not None
        ]
        torch.nn.utils.clip_grads_with_norm_(parts, max_norm, norm, foreach)  # type: ignore[arg-type]
        return norm

    def full(self, param: int) -> torch.Tensor | None:
        """A copy of what is in `param.grad`."""
        grad = self._params[param].grad
        return None if grad is None else grad.detach().clone()

    def hold_back(self) -> None:
        """Not this optimizer's business here."""
        raise RuntimeError(
            "without module= the gradients are synchronised by somebody else: use that one's "
            "no_sync(), such as DistributedDataParallel's"
        )

    def send_again(self) -> None:
        """Nothing is held back."""

    def held(self) -> bool:
        """They are in `param.grad`, whatever happens here."""
        return False

    def detach(self) -> None:
        """Nothing is attached."""


def part_of(
    grad: torch.Tensor | None, piece: Piece, param: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """What belongs to `piece` of the gradient of `param`; a view, unless `dtype` is another."""
    if grad is None:
        return None
    part = grad if piece.entire else flat(grad, param.stride())[piece.param_interval.slice]
    return part.to(dtype)


def _is_cut(start: int, stop: int, bucket: Bucket) -> bool:
    """Whether a cut of `bucket` falls strictly between `start` and `stop`."""
    cuts = bucket.cuts
    if not isinstance(cuts, range) or stop <= start:
        return False
    return start // cuts.step != (stop - 1) // cuts.step
