"""The policy for parameters of fewer than 32 bits: step dtype, wire dtype and rounding."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # the planner imports this policy
    from shardstep.plan import ParamSpec

_WIDE = (torch.float32, torch.float64)
_WIRE = (torch.float16, torch.bfloat16, *_WIDE)


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """A policy for parameters narrower than the optimizer needs.

    A 16-bit weight cannot take a small update: bf16 has 8 significant bits, so an update of less
    than 1/512 of the weight is rounded away, step after step. A *master* is the same element in
    fp32, kept by its owner. Gradients become fp32, and the optimizer steps on the master with fp32
    state. The model sees the master rounded to nearest.

    Only parameters narrower than `master_dtype` get masters. All others stay as they are.

    Args:
        master_dtype: dtype of the masters, `torch.float32` or `torch.float64`; None for none.
        reduce_dtype: dtype of gradients on the wire, for all real floating-point parameters; None
            for the parameter's dtype, as under DDP. Only with `module=` or `register`; in other
            modes DDP or the caller sends the gradients. Whatever the wire dtype, a piece with a
            master receives and accumulates its gradient in `master_dtype`.
        stochastic_rounding: without masters, step on fp32 copies that exist only during the step,
            and round them up or down at random, with probabilities that keep the mean. State is in
            fp32.
        seed: seed of that randomness. A random number depends on the seed, the step, the number of
            the parameter and of the element, and nothing else: not the world size, not the layout.

    Example:
        >>> MixedPrecision().step_dtype(torch.bfloat16)
        torch.float32
        >>> MixedPrecision(reduce_dtype=torch.float32).wire_dtype(torch.bfloat16)
        torch.float32
    """

    master_dtype: torch.dtype | None = torch.float32
    reduce_dtype: torch.dtype | None = None
    stochastic_rounding: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.master_dtype not in (None, *_WIDE):
            raise ValueError(
                "master_dtype must be torch.float32, torch.float64 or None, not "
                f"{self.master_dtype}"
            )
        if self.reduce_dtype not in (None, *_WIRE):
            raise ValueError(
                "reduce_dtype must be a floating-point dtype of 16, 32 or 64 bits or None, not "
                f"{self.reduce_dtype}"
            )
        if self.stochastic_rounding and self.master_dtype is not None:
            raise ValueError(
                "with masters nothing is lost by rounding to nearest, so stochastic_rounding=True "
                "needs master_dtype=None"
            )

    def step_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the optimizer steps on a parameter of `dtype`."""
        wide = torch.float32 if self.stochastic_rounding else self.master_dtype
        narrower = wide is not None and dtype.is_floating_point and dtype.itemsize < wide.itemsize
        return wide if narrower and wide is not None else dtype

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype on the wire for gradients of a parameter of `dtype`."""
        return self.reduce_dtype if self.reduce_dtype and dtype.is_floating_point else dtype


UNCHANGED = MixedPrecision(master_dtype=None)
"""The policy that does everything in the parameter's own dtype."""


def resolve(
    given: MixedPrecision | None, sends_gradients: bool, has_module: bool
) -> MixedPrecision:
    """Return the policy in force. Raise if this optimizer cannot follow the given one.

    Without a given policy, an optimizer with `module=` keeps masters, because it replaces DDP as a
    whole. A drop-in does the same as the replaced optimizer.
    """
    if given is None:
        return MixedPrecision() if has_module else UNCHANGED
    if not isinstance(given, MixedPrecision):
        raise TypeError(
            f"precision must be a MixedPrecision, not {type(given).__name__}; pass "
            "shardstep.MixedPrecision(), or None for the default"
        )
    if given.reduce_dtype is not None and not sends_gradients:
        raise ValueError(
            f"reduce_dtype={given.reduce_dtype} has no effect here: without module= this optimizer "
            "does not reduce gradients; set the dtype where they are reduced, as by a DDP hook"
        )
    return given


def warn_of_16_bits(specs: Sequence[ParamSpec], optimizer: str) -> bool:
    """Warn if any of these parameters trains in 16 bits. Return True if it warned."""
    trained = [spec for spec in specs if spec.trainable and spec.dtype.is_floating_point]
    narrow = [spec for spec in trained if spec.dtype.itemsize < 4]
    if not narrow:
        return False
    dtype = str(narrow[0].dtype).removeprefix("torch.")
    share = 4 / torch.finfo(narrow[0].dtype).eps
    warnings.warn(
        f"{len(narrow)} parameters, the first of them {narrow[0].name!r}, train in {dtype}: "
        f"{optimizer} updates them, and keeps its state, in {dtype}, where an update of less than "
        f"1/{share:.0f} of a weight is rounded away. Pass precision=MixedPrecision() to keep "
        "fp32 masters, sharded across ranks; precision=MixedPrecision(master_dtype=None, "
        "stochastic_rounding=True) to do without masters and lose nothing in the mean; or "
        "precision=MixedPrecision(master_dtype=None) if this is meant",
        stacklevel=5,
    )
    return True
