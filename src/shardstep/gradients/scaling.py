"""Clipping and unscaling of gradients that are sharded across ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from shardstep.gradients.clip import clip_norm, unscale
from shardstep.gradients.norms import ShardNorms


class ShardScaling(ShardNorms):
    """The part of a reducer that scales the gradients of this rank's pieces."""

    @override
    def clip_norm(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> torch.Tensor:
        self.collect()
        self._announce("clip", lambda: [max_norm, norm_type, error_if_nonfinite, foreach])
        return self.shadow_clip(max_norm, norm_type, error_if_nonfinite, foreach)

    def unscale(
        self, params: Sequence[int], found_inf: torch.Tensor, inv_scale: torch.Tensor
    ) -> None:
        """Unscale these gradients, with one verdict on all ranks. Called on every rank."""
        self.collect()
        self._announce("unscale", lambda: [list(params), inv_scale.item()])
        self._unscale_own(params, found_inf, inv_scale)

    def _unscale_own(
        self, params: Sequence[int], found_inf: torch.Tensor, inv_scale: torch.Tensor
    ) -> None:
        among = set(params)
        grads = [t.grad for param, t in self._pieces if param in among and t.grad is not None]
        self._norms.clear()
        unscale(self._comm, grads, found_inf, inv_scale)

    def shadow_clip(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> torch.Tensor:
        """Take part in clipping. Called on every rank."""
        self.collect()
        self._norms.clear()
        return clip_norm(
            self._comm,
            [tensor for _, tensor in self._pieces],
            self.params[0].device,
            self.lanes.norm_dtype,
            max_norm,
            norm_type,
            error_if_nonfinite,
            foreach,
        )

    def shadow_unscale(self, params: Sequence[int], inv_scale: float) -> None:
        """Take part in unscaling. Called on every rank."""
        self.collect()
        device = self.params[params[0]].device
        found_inf = torch.zeros((), device=device)
        self._unscale_own(params, found_inf, torch.tensor(inv_scale, device=device))
