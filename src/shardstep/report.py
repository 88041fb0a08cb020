"""The result of `ZeroRedundancyOptimizer.report()`: layouts, memory and traffic of one rank."""

from __future__ import annotations

from dataclasses import dataclass

from shardstep.plan import ShardPlan


@dataclass(frozen=True)
class Report:
    """Memory and traffic of one rank, in bytes. Print it.

    Attributes:
        optimizer: the names of the optimizer classes.
        mode: the mode, in words.
        layouts: for each group, its layout and the reason.
        parameter_nbytes: all trainable parameters, which every rank has.
        owned_nbytes: those that this rank updates.
        gradient_nbytes: memory for gradients besides `param.grad`; 0 without `module=`.
        master_nbytes: masters; with stochastic rounding, the copies during a step.
        state_nbytes: the optimizer state that this rank has now.
        reduce_nbytes: sent in a step to reduce gradients; 0 if DDP or the user reduces them.
        gather_nbytes: sent in a step to gather parameters.
    """

    optimizer: str
    mode: str
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
        mean = self.parameter_nbytes / self.plan.world_size
        share = f", {self.owned_nbytes / mean:.3f} × the mean" if mean else ""
        rows = [
            ("trainable parameters", self.parameter_nbytes, "on every rank"),
            ("updated here", self.owned_nbytes, f"of these{share}"),
        ]
        if self.gradient_nbytes:
            note = "of this rank's shard, and messages in flight"
            rows.append(("gradients", self.gradient_nbytes, note))
        if self.master_nbytes:
            rows.append(("masters", self.master_nbytes, "fp32 copies of 16-bit parameters"))
        note = "" if self.state_nbytes else "the first step makes it, if the class keeps any"
        rows.append(("optimizer state", self.state_nbytes, note))
        if self.plan.world_size > 1:
            note = "" if self.reduce_nbytes else "DDP, or your code, sends them"
            rows.append(("gradients sent per step", self.reduce_nbytes, note))
            rows.append(("parameters sent per step", self.gather_nbytes, ""))
        table = [f"  {name:<24} {show_nbytes(n):>10}  {note}".rstrip() for name, n, note in rows]
        head = headline(self.optimizer, self.mode, self.plan)
        return "\n".join([head, *self.layouts, f"rank {self.rank}:", *table])


def headline(optimizer: str, mode: str, plan: ShardPlan) -> str:
    """Return one line: class, ranks, mode, layout and size."""
    trained = sum(spec.numel for spec in plan.specs if spec.trainable)
    frozen = sum(spec.numel for spec in plan.specs if not spec.trainable)
    return (
        f"{optimizer} on {plan.world_size} rank{'' if plan.world_size == 1 else 's'}, {mode}, "
        f"layout {plan.layout}, {trained:,} trainable elements"
        + (f" and {frozen:,} frozen" if frozen else "")
    )


def show_nbytes(nbytes: float) -> str:
    """Return a number of bytes with a unit, such as `12.3 MB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while nbytes >= 1000 and len(units) > 1:
        nbytes /= 1000
        del units[0]
    return f"{nbytes:,.{0 if units[0] == 'B' else 1}f} {units[0]}"
