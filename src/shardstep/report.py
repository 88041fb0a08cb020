"""The result of `ZeroRedundancyOptimizer.report()`: layouts, memory and traffic of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardstep.layouts.state_size import tensor_nbytes
from shardstep.plan import ShardPlan, share
from shardstep.precision import MixedPrecision


@dataclass(frozen=True)
class Report:
    """Memory and traffic of one rank, in bytes. Print it.

    Attributes:
        layouts: for each group, its layout and the reason.
        parameter_nbytes: all trainable parameters, which every rank has.
        owned_nbytes: those that this rank updates.
        gradient_nbytes: memory for gradients besides `param.grad`; 0 without `module=`.
        master_nbytes: masters; with stochastic rounding, the copies during a step.
        state_nbytes: the optimizer state that this rank has now.
        reduce_nbytes: sent in a step to reduce gradients; 0 if DDP or the user reduces them.
        gather_nbytes: sent in a step to gather parameters.
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
        """The bytes that this rank sends in a step."""
        return self.reduce_nbytes + self.gather_nbytes

    def __str__(self) -> str:
        even_share = self.parameter_nbytes * (self.plan.world_size - 1) / self.plan.world_size

        def against(nbytes: int) -> str:
            ratio = f"{nbytes / (even_share or 1):.3f} × an even share"
            return "" if not even_share else ratio if nbytes else "not by this optimizer"

        rows = [
            ("parameters", self.parameter_nbytes, f"updates {_mb(self.owned_nbytes)} of them"),
            ("gradients", self.gradient_nbytes, "besides param.grad"),
            ("masters", self.master_nbytes, "of 16-bit parameters"),
            ("optimizer state", self.state_nbytes, "as of now"),
            ("sent per step, gradients", self.reduce_nbytes, against(self.reduce_nbytes)),
            ("sent per step, parameters", self.gather_nbytes, against(self.gather_nbytes)),
        ]
        table = [f"  {name:<25}  {_mb(nbytes):>12}  {note}" for name, nbytes, note in rows]
        return "\n".join([str(self.plan), *self.layouts, f"on rank {self.rank}:", *table])


def make_report(
    rank: int,
    plan: ShardPlan,
    layouts: Sequence[str],
    states: Iterable[Any],
    master_nbytes: int,
    gradient_nbytes: int,
    reducing: MixedPrecision | None,
) -> Report:
    """Measure this rank's memory and estimate its traffic.

    `reducing` has the dtypes in which this optimizer reduces gradients; None if it does not.
    """
    own = share(plan, rank, reducing)
    return Report(
        rank=rank,
        plan=plan,
        layouts=tuple(layouts),
        parameter_nbytes=sum(spec.nbytes for spec in plan.specs if spec.trainable),
        owned_nbytes=own.nbytes,
        gradient_nbytes=gradient_nbytes,
        master_nbytes=master_nbytes,
        state_nbytes=tensor_nbytes(list(states)),
        reduce_nbytes=own.reduce_nbytes_sent if reducing else 0,
        gather_nbytes=own.gather_nbytes_sent,
    )


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.3f} MB"
