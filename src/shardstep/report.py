"""What `ZeroRedundancyOptimizer.report()` says: layouts and why, memory and traffic per rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardstep.plan import ShardPlan, share
from shardstep.precision import MixedPrecision


@dataclass(frozen=True)
class Report:
    """What one rank holds and sends. Print it.

    Attributes:
        rank: whose report it is.
        plan: the placement.
        layouts: for each group, its layout and how it was come by.
        parameter_nbytes: bytes of all trainable parameters, which every rank has.
        owned_nbytes: bytes of those that this rank updates.
        gradient_nbytes: bytes kept for gradients beside `param.grad`; 0 without `module=`.
        master_nbytes: bytes of this rank's masters, or, with stochastic rounding, of the copies
            that it has during a step.
        state_nbytes: bytes of the optimizer state that this rank has now.
        reduce_nbytes: bytes it sends in a step to reduce gradients; 0 if somebody else does.
        gather_nbytes: bytes it sends in a step to gather parameters.
    """

    rank: int
    plan: ShardPlan
    layouts: tuple[str, ...]
    parameter_nbytes: int
    owned_nbytes: int
    gradient_nbytes: int
    master_nbytes: int
    state_nbytes: int
    reduce_nbytes: int
    gather_nbytes: int

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank sends in a step."""
        return self.reduce_nbytes + self.gather_nbytes

    def __str__(self) -> str:
        ideal = self._ideal_nbytes
        lines = [str(self.plan), *self.layouts, f"on rank {self.rank}:"]
        rows = [
            ("parameters", self.parameter_nbytes, f"updates {_mb(self.owned_nbytes)} of them"),
            ("gradients", self.gradient_nbytes, "beside param.grad"),
            ("masters", self.master_nbytes, "of 16-bit parameters"),
            ("optimizer state", self.state_nbytes, "as of now"),
            ("sent per step, gradients", self.reduce_nbytes, _against(self.reduce_nbytes, ideal)),
            ("sent per step, parameters", self.gather_nbytes, _against(self.gather_nbytes, ideal)),
        ]
        width = max(len(name) for name, _, _ in rows)
        lines += [f"  {name:<{width}}  {_mb(nbytes):>12}  {note}" for name, nbytes, note in rows]
        return "\n".join(lines)

    @property
    def _ideal_nbytes(self) -> float:
        """What each rank would send in one direction if all had the same share."""
        return self.parameter_nbytes * (self.plan.world_size - 1) / self.plan.world_size


def make_report(
    rank: int,
    plan: ShardPlan,
    layouts: Sequence[str],
    states: Iterable[Any],
    master_nbytes: int,
    gradient_nbytes: int,
    reducing: MixedPrecision | None,
) -> Report:
    """Measure and estimate.

    Args:
        rank: whose report it is.
        plan: the placement.
        layouts: for each group, its layout and how it was come by.
        states: the state that this rank has.
        master_nbytes: bytes of this rank's masters.
        gradient_nbytes: bytes kept for gradients.
        reducing: in which dtypes gradients are sent and added up; None if the optimizer does not
            reduce them itself.
    """
    own = share(plan, rank)
    if reducing is not None:
        own = share(plan, rank, reducing.wire_dtype)
    total = sum(spec.nbytes for spec in plan.specs if spec.trainable)
    return Report(
        rank=rank,
        plan=plan,
        layouts=tuple(layouts),
        parameter_nbytes=total,
        owned_nbytes=own.nbytes,
        gradient_nbytes=gradient_nbytes,
        master_nbytes=master_nbytes,
        state_nbytes=sum(map(tensor_nbytes, states)),
        reduce_nbytes=own.reduce_nbytes_sent if reducing else 0,
        gather_nbytes=own.gather_nbytes_sent,
    )


def tensor_nbytes(value: Any) -> int:
    """Bytes of the tensors in a state of whatever structure."""
    if isinstance(value, torch.Tensor):
        inner: Any = getattr(value, "__tensor_flatten__", None)
        if inner is not None:
            return sum(tensor_nbytes(getattr(value, name)) for name in inner()[0])
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(tensor_nbytes, value.values()))
    return sum(map(tensor_nbytes, value)) if isinstance(value, (list, tuple, deque)) else 0


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.3f} MB"


def _against(nbytes: int, ideal: float) -> str:
    if not ideal:
        return ""
    return f"{nbytes / ideal:.3f} × an even share" if nbytes else "not by this optimizer"
