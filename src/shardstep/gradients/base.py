"""The interface of a gradient source, and functions that all sources share."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from shardstep.params.flat import flat
from shardstep.plan import Piece


class GradientSource(Protocol):
    """Gives each piece of this rank its gradient. Every method is called on every rank."""

    paused: bool
    """True while gradients only accumulate on each rank, as under `no_sync()`."""

    @property
    def nbytes(self) -> int:
        """Bytes kept for gradients in addition to `param.grad`."""

    def collect(self) -> None:
        """Give every tensor of this rank's shard its gradient, or None if there is none."""

    def release(self) -> None:
        """Drop references to gradients after the step."""

    def zero(self, set_to_none: bool) -> None:
        """Clear the gradients."""

    def clip_norm(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most `max_norm`; return the norm."""

    def clip_value(self, clip_value: float) -> None:
        """Clamp every element of all gradients to at most `clip_value` in magnitude."""

    def all_norms(self, norm_type: float) -> dict[int, torch.Tensor]:
        """Return the norm of every gradient there is, by number of the parameter."""

    def full(self, param: int) -> torch.Tensor | None:
        """Return the full gradient of one parameter, or None if it has none."""

    def pause(self) -> None:
        """From now on, only accumulate gradients on each rank."""

    def resume(self) -> None:
        """Reduce gradients again, accumulated ones included."""

    def has_gradients(self) -> bool:
        """Return whether dropping this object would lose gradients for the next step."""

    def detach(self) -> None:
        """Clear the gradients and remove all hooks."""


def piece_gradient(
    grad: torch.Tensor | None, piece: Piece, stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the part of a full gradient that belongs to `piece`."""
    if grad is None:
        return None
    part = grad if piece.entire else flat(grad, stride)[piece.param_interval.slice]
    return part.to(dtype)


def refuse_nonfinite(norm: torch.Tensor, norm_type: float, error_if_nonfinite: bool) -> None:
    """Raise if asked to and the norm is not finite."""
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so they "
            "cannot be clipped; to scale them all the same, pass error_if_nonfinite=False"
        )
