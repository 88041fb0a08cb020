"""ZeRO-1: every rank has every gradient in `param.grad`, synchronised by DDP or the user."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from typing_extensions import override

from shardstep.gradients.base import GradientSource, piece_gradient, refuse_nonfinite
from shardstep.params.dtensor import full_value, is_dtensor, local_gradient, local_part
from shardstep.params.sharded_params import ShardedParams
from shardstep.plan import Bucket
from shardstep.precision import MixedPrecision


class FullGradients(GradientSource):
    """Gradients that are in `param.grad` on every rank."""

    nbytes = 0
    paused = False

    def __init__(self, params: ShardedParams, precision: MixedPrecision) -> None:
        self._params = params.params
        self._precision = precision
        self._views = params.shard.views
        self._dtensors = {i: p for i, p in enumerate(self._params) if is_dtensor(p)}
        self._sliced = [
            (params.plan.specs[slot.param].name, self._params[slot.param])
            for bucket in params.plan.buckets
            for slot in bucket.slots
            if _is_cut(slot.bucket_offset, slot.bucket_offset + slot.numel, bucket)
        ]

    @override
    def collect(self) -> None:
        """Point each partial piece at its part of `param.grad`.

        A tensor of a wider dtype than its parameter gets a copy until `release`.

        Raises:
            ValueError: on every rank, if a parameter that is sliced has a sparse gradient.
        """
        for name, param in self._sliced:
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise ValueError(
                    f"parameter {name!r} has a sparse gradient, which cannot be cut into slices; "
                    'construct the optimizer with layout="whole"'
                )
        # All of them on every rank: the ranks of a mesh may own pieces of different parameters.
        local = {i: local_gradient(param) for i, param in self._dtensors.items()}
        for piece, tensor in self._views:
            param = self._params[piece.param]
            grad = local.get(piece.param, param.grad)
            tensor.grad = piece_gradient(grad, piece, local_part(param).stride(), tensor.dtype)

    @override
    def release(self) -> None:
        for _, tensor in self._views:
            tensor.grad = None  # so that zero_grad() can free param.grad

    @override
    def zero(self, set_to_none: bool) -> None:
        pass  # torch's zero_grad() clears param.grad

    @override
    def clip_norm(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> torch.Tensor:
        """Clip with torch's own function where it is exact.

        Torch rounds the norm of a 16-bit gradient to 16 bits. If the gradient is stepped on in a
        wider dtype, its norm is computed in that dtype. Torch also refuses a mix of DTensors and
        plain tensors.
        """
        dtypes = [self._precision.step_dtype(param.dtype) for param in self._params]
        own = all(p.dtype == dtype for p, dtype in zip(self._params, dtypes, strict=True))
        if own and not self._dtensors:
            return torch.nn.utils.clip_grad_norm_(
                self._params, max_norm, norm_type, error_if_nonfinite, foreach
            )
        norm = _wide_norm(self._params, dtypes, norm_type)
        refuse_nonfinite(norm, norm_type, error_if_nonfinite)
        # Scaling local parts is right for every placement. Torch 2.11's list functions leave a
        # DTensor that is a partial sum unscaled.
        parts = [
            SimpleNamespace(grad=local_part(param.grad))
            for param in self._params
            if param.grad is not None
        ]
        torch.nn.utils.clip_grads_with_norm_(parts, max_norm, norm, foreach)  # type: ignore[arg-type]
        return norm

    @override
    def clip_value(self, clip_value: float) -> None:
        torch.nn.utils.clip_grad_value_(self._params, clip_value)

    @override
    def all_norms(self, norm_type: float) -> dict[int, torch.Tensor]:
        return {
            index: _wide_norm([param], [self._precision.step_dtype(param.dtype)], norm_type)
            for index, param in enumerate(self._params)
            if param.grad is not None
        }

    @override
    def full(self, param: int) -> torch.Tensor | None:
        grad = self._params[param].grad
        return None if grad is None else grad.detach().clone()

    @override
    def pause(self) -> None:
        raise RuntimeError(
            "no_sync() needs module=; without it, use the no_sync() of whatever synchronises the "
            "gradients, such as DistributedDataParallel"
        )

    @override
    def resume(self) -> None:
        pass

    @override
    def has_gradients(self) -> bool:
        return False  # they stay in param.grad

    @override
    def detach(self) -> None:
        pass


def _is_cut(start: int, stop: int, bucket: Bucket) -> bool:
    """Return whether a cut of `bucket` falls strictly between `start` and `stop`."""
    cuts = bucket.cuts
    if not isinstance(cuts, range) or stop <= start:
        return False
    return start // cuts.step != (stop - 1) // cuts.step


def _wide_norm(
    params: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], norm_type: float
) -> torch.Tensor:
    """Return the norm of the gradients of `params`, each computed in the dtype given for it.

    Called on every rank of a mesh if there are DTensors among them: these count with all parts.
    """
    norms = [
        full_value(torch.linalg.vector_norm(param.grad.detach(), norm_type, dtype=dtype)).to(
            params[0].device
        )
        for param, dtype in zip(params, dtypes, strict=True)
        if param.grad is not None and param.grad.numel()
    ]
    if not norms:
        return torch.zeros((), device=params[0].device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm
