"""What the demo was asked to do and what it measured, as plain frozen records."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from shardstep.demo.gpt import GPTConfig

WARMUP_STEPS = 2
"""Steps left out of times and traffic: DDP rebuilds its buckets, state is allocated."""


@dataclass(frozen=True)
class DemoConfig:
    """What the demo trains, and for how long.

    Attributes:
        model: The shape of the GPT.
        ranks: Number of local processes.
        steps: Training steps of each run.
        seed: Chooses the initial weights and the batches.
        batch_size: Sequences per rank and step.
        learning_rate: AdamW's.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    ranks: int = 2
    steps: int = 60
    seed: int = 0
    batch_size: int = 8
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse numbers that would leave nothing to train or to measure."""
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {self.ranks}")
        if self.steps <= WARMUP_STEPS:
            raise ValueError(
                f"steps must be more than the {WARMUP_STEPS} warm-up steps, got {self.steps}"
            )
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")


@dataclass(frozen=True)
class RankRecord:
    """What one rank measured in one run.

    Attributes:
        losses: This rank's loss at every step.
        digest: SHA-256 of the final parameters.
        state_nbytes: Bytes of optimizer state this rank holds.
        sent_nbytes_per_step: Bytes this rank sent per step, or None where that cannot be read.
        ms_per_step: Median time of a step.
    """

    losses: tuple[float, ...]
    digest: str
    state_nbytes: int
    sent_nbytes_per_step: float | None
    ms_per_step: float


@dataclass(frozen=True)
class RunRecord:
    """One of the demo's training runs.

    Attributes:
        name: What was trained with, for people.
        ranks: What each rank measured, in rank order.
    """

    name: str
    ranks: tuple[RankRecord, ...]

    @property
    def final_loss(self) -> float:
        """The last step's loss over the global batch."""
        return statistics.fmean(rank.losses[-1] for rank in self.ranks)

    @property
    def ms_per_step(self) -> float:
        """The slowest rank's median step."""
        return max(rank.ms_per_step for rank in self.ranks)

    @property
    def sent_nbytes_per_step(self) -> float | None:
        """Bytes sent per rank and step, or None where they cannot be read."""
        sent = [rank.sent_nbytes_per_step for rank in self.ranks]
        known = [nbytes for nbytes in sent if nbytes is not None]
        return statistics.fmean(known) if len(known) == len(sent) else None


@dataclass(frozen=True)
class DemoRecord:
    """The demo's outcome.

    Attributes:
        config: What was asked for.
        num_parameters: Parameters of the model.
        torch_version: The torch that ran it.
        unsharded: DDP with the plain optimizer.
        sharded: The runs with the sharded one.
    """

    config: DemoConfig
    num_parameters: int
    torch_version: str
    unsharded: RunRecord
    sharded: tuple[RunRecord, ...]

    def first_differing_step(self, run: RunRecord) -> int | None:
        """The first step, counted from 1, whose loss differs on some rank; None if none does."""
        pairs = list(zip(self.unsharded.ranks, run.ranks, strict=True))
        for step in range(self.config.steps):
            # As text, because two equal NaNs are the same number here and 0.0 is not -0.0.
            if any(a.losses[step].hex() != b.losses[step].hex() for a, b in pairs):
                return step + 1
        return None

    def equal(self, run: RunRecord) -> bool:
        """Whether every loss and the final parameters agree bit for bit, on every rank."""
        return self.first_differing_step(run) is None and self._equal_parameters(run)

    def verdict(self, run: RunRecord) -> str:
        """The comparison of a run with the unsharded one in a few words."""
        first = self.first_differing_step(run)
        if first is not None:
            return f"different from step {first} on"
        if not self._equal_parameters(run):
            return "equal losses, but different final parameters"
        return "equal, bit for bit"

    def _equal_parameters(self, run: RunRecord) -> bool:
        pairs = zip(self.unsharded.ranks, run.ranks, strict=True)
        return all(a.digest == b.digest for a, b in pairs)

    def as_dict(self) -> dict[str, Any]:
        """Return the record with its conclusions, ready for JSON."""
        sharded = [
            {
                **_with_means(run),
                "equal": self.equal(run),
                "verdict": self.verdict(run),
                "first_differing_step": self.first_differing_step(run),
            }
            for run in self.sharded
        ]
        return asdict(self) | {"unsharded": _with_means(self.unsharded), "sharded": sharded}


def _with_means(run: RunRecord) -> dict[str, Any]:
    return {
        **asdict(run),
        "final_loss": run.final_loss,
        "ms_per_step": run.ms_per_step,
        "sent_nbytes_per_step": run.sent_nbytes_per_step,
    }
