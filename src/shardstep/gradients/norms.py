"""Norms, clipping, unscaling and in-place changes of gradients that are sharded across ranks.

Note [Norms of sharded gradients]

`torch.nn.utils.clip_grad_norm_`, Trainer, Accelerate and Lightning ask each `param.grad` for its
norm, and then scale each. The first question after the gradients have changed gathers the norms of
all of them, in one collective; further ones are answered from its result, in any order. So every
rank has to ask for norms of the same order between two changes, as every rank clips. If a rank asks
alone, every rank raises: over Gloo at once, elsewhere after the timeout. Scaling and clamping
change this rank's pieces, and send nothing. Torch may ask and scale one by one: neither may look at
all parameters each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from shardstep.comm import Comm, Operation, all_gather_rows
from shardstep.gradients.base import GradientSource, refuse_nonfinite
from shardstep.gradients.feeders import Feeder
from shardstep.gradients.lanes import Lanes

CHANGES: dict[str, Callable[..., object]] = {
    "mul_": torch._foreach_mul_,
    "div_": torch._foreach_div_,
    "clamp_min_": torch._foreach_clamp_min_,
    "clamp_max_": torch._foreach_clamp_max_,
}
"""Element-wise operations with a number, on a list of tensors."""


class _Norms(NamedTuple):
    """The norms of one order.

    Attributes:
        parts: a row per rank and a column per parameter that trains; -1 for no gradient.
        total: the norm of each gradient, by parameter.
    """

    parts: torch.Tensor
    total: dict[int, torch.Tensor]


class ShardNorms(GradientSource):
    """The part of a reducer that answers for the gradients of all ranks, and scales them."""

    params: Sequence[torch.Tensor]
    trained: Sequence[int]
    lanes: Lanes
    _comm: Comm
    _feeder: Feeder
    _pieces: Mapping[int, torch.Tensor]
    """The tensors that this rank's optimizer steps on, by parameter."""
    _norms: dict[float, _Norms]
    """By order, since the gradients have changed."""

    def collect_once(self) -> None:
        """Collect the gradients unless they are; other changes by the user can wait.

        Called on every rank.
        """
        raise NotImplementedError

    def announce(self, kind: str, arguments: Callable[[], list[Any]] = list) -> None:
        """Under `Join`, announce an action to joined ranks. Called on every rank that has data."""
        raise NotImplementedError

    def norms(self, params: Sequence[int], norm_type: float) -> list[torch.Tensor]:
        """Return the norms of these gradients. Called on every rank."""
        self.collect_once()
        if norm_type not in self._norms:
            self.collect()
            self.announce("norms", lambda: [norm_type])
            self.shadow_norms(norm_type)
        total = self._norms[norm_type].total
        return [total[param].clone() for param in params]

    def shadow_norms(self, norm_type: float) -> None:
        """Gather the norm of every gradient. Called on every rank."""
        self.collect()
        device = self.params[0].device
        nothing = torch.full((), -1, dtype=self.lanes.norm_dtype, device=device)
        held = {
            # The largest element of nothing raises.
            param: torch.linalg.vector_norm(grad if grad.numel() else grad.new_zeros(1), norm_type)
            for param, tensor in self._pieces.items()
            if (grad := tensor.grad) is not None
        }
        # Stacked and not assigned one by one, which would wait for the accelerator.
        own = torch.stack([held.get(param, nothing).to(nothing) for param in self.trained])
        parts = all_gather_rows(self._comm, own, Operation.CLIP)
        there = parts.clamp_min(0)
        # A norm that one rank has is taken as it is: the norm of it alone could underflow.
        alone = (there != 0).sum(0) <= 1
        total = torch.linalg.vector_norm(there, norm_type, dim=0)
        total = torch.where(alone, there.sum(0), total)
        self._norms[norm_type] = _Norms(parts, dict(zip(self.trained, total, strict=True)))

    @override
    def all_norms(self, norm_type: float) -> dict[int, torch.Tensor]:
        self.collect()
        if not self.trained:
            return {}
        norms = self.norms(self.trained, norm_type)
        present = (self._norms[norm_type].parts != -1).any(0).tolist()
        found = zip(self.trained, norms, present, strict=True)
        # The user may have cleared some since the norms were gathered.
        return {p: norm for p, norm, had in found if had and self.params[p].grad is not None}

    def change(self, operation: str, params: Sequence[int], number: Any) -> None:
        """Change these gradients by an operation of `CHANGES`. Called on every rank."""
        self._feeder.check_change()
        self.collect_once()
        self.announce("change", lambda: [operation, list(params), float(number)])
        grads = self._to_change(params)
        if grads:
            CHANGES[operation](grads, number)

    def _to_change(self, params: Sequence[int]) -> list[torch.Tensor]:
        """Return this rank's parts of these gradients, and forget all norms."""
        self._norms.clear()
        pieces = (self._pieces[param] for param in params if param in self._pieces)
        return [tensor.grad for tensor in pieces if tensor.grad is not None]

    @override
    def clip_value(self, clip_value: float) -> None:
        self.collect()
        for operation, number in (("clamp_min_", -clip_value), ("clamp_max_", clip_value)):
            self.change(operation, self.trained, number)

    @override
    def clip_norm(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> torch.Tensor:
        self.collect()
        self.announce("clip", lambda: [max_norm, norm_type, error_if_nonfinite, foreach])
        self._norms.clear()
        # Torch would raise for the largest element of an empty gradient, on its owner only.
        pieces = self._pieces.values()
        with_grad = [t for t in pieces if t.grad is not None and t.grad.numel()]
        own = torch.zeros((), dtype=self.lanes.norm_dtype, device=self.params[0].device)
        if with_grad:
            grads = [tensor.grad for tensor in with_grad]
            own = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach).to(own)  # type: ignore[arg-type]
        everyone = all_gather_rows(self._comm, own.view(1), Operation.CLIP)
        norm: torch.Tensor = torch.linalg.vector_norm(everyone.view(-1), norm_type)
        refuse_nonfinite(norm, norm_type, error_if_nonfinite)  # before anything is scaled
        torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm, foreach)
        return norm

    def unscale(
        self, params: Sequence[int], found_inf: torch.Tensor, inv_scale: torch.Tensor
    ) -> None:
        """Unscale these gradients, with one verdict on all ranks. Called on every rank."""
        self.collect()
        self.announce("unscale", lambda: [list(params), inv_scale.item()])
        grads = self._to_change(params)
        if grads:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        everyone = all_gather_rows(self._comm, found_inf.reshape(1), Operation.UNSCALE)
        found_inf.copy_(everyone.max())

    def shadow_unscale(self, params: Sequence[int], inv_scale: float) -> None:
        """Take part in unscaling. Called on every joined rank."""
        device = self.params[params[0]].device
        scale = torch.tensor(inv_scale, device=device)
        self.unscale(params, torch.zeros((), device=device), scale)
