"""Records of the demo: its configuration, its measurements, and the comparison with DDP."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from demo.gpt import GPTConfig

EQUAL = "equal, bit for bit"


@dataclass(frozen=True)
class DemoConfig:
    """The demo's model and training; `batch_size` is the number of sequences per rank and step."""

    model: GPTConfig = field(default_factory=lambda: GPTConfig(n_embd=256))
    ranks: int = 2
    steps: int = 42
    seed: int = 0
    batch_size: int = 4
    learning_rate: float = 1e-3
    device: str = "cpu"


@dataclass(frozen=True)
class RankRecord:
    """Measurements of one rank in one run.

    Attributes:
        losses: the loss of every step.
        digest: of the final parameters.
        state_nbytes: optimizer state.
        gradient_nbytes: gradients between backward and step, with the buffers they pass through.
        sent_nbytes_per_step: None if the system does not tell.
        ms_per_step: for each round that counts.
    """

    losses: tuple[float, ...]
    digest: str
    state_nbytes: int
    gradient_nbytes: int
    sent_nbytes_per_step: float | None
    ms_per_step: tuple[float, ...]


class Spread(NamedTuple):
    """The median of several rounds, and its extremes."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Summarise the values."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class DemoRecord:
    """All runs of a demo: the records of the ranks, by run; the first run is unsharded."""

    config: DemoConfig
    num_parameters: int
    torch_version: str
    runs: dict[str, list[RankRecord]]

    @property
    def title(self) -> str:
        """The model, the ranks and the device."""
        ranks = f"{self.config.ranks} rank{'s' if self.config.ranks > 1 else ''}"
        return f"GPT with {self.num_parameters:,} parameters, {ranks} on {self.config.device}"

    def verdict(self, run: str) -> str:
        """Compare a run with the unsharded one; `EQUAL` if no bit differs on any rank."""
        pairs = list(zip(self._unsharded, self.runs[run], strict=True))
        for step in range(self.config.steps):
            # As text: two equal NaNs are the same number here, and 0.0 is not -0.0.
            if any(a.losses[step].hex() != b.losses[step].hex() for a, b in pairs):
                return f"different from step {step + 1} on"
        if any(a.digest != b.digest for a, b in pairs):
            return "equal losses, but different final parameters"
        return EQUAL

    def losses(self, run: str) -> list[float]:
        """Return the loss of each step, the mean over ranks."""
        return [fmean(losses) for losses in zip(*(r.losses for r in self.runs[run]), strict=True)]

    def ms_per_step(self, run: str) -> Spread:
        """Return the time per step over rounds, of the slowest rank in each."""
        return Spread.of(_rounds(self.runs[run]))

    def time_ratio(self, run: str) -> Spread:
        """Return the time per step over the unsharded run's in the same round."""
        pairs = zip(_rounds(self.runs[run]), _rounds(self._unsharded), strict=True)
        return Spread.of([ours / theirs for ours, theirs in pairs])

    def as_dict(self) -> dict[str, Any]:
        """Return the record and the comparisons, for JSON."""
        return {
            **asdict(self),
            "verdicts": {run: self.verdict(run) for run in self.runs},
            "time_ratios": {run: self.time_ratio(run)._asdict() for run in self.runs},
        }

    @property
    def _unsharded(self) -> list[RankRecord]:
        return next(iter(self.runs.values()))


def _rounds(ranks: list[RankRecord]) -> list[float]:
    return [max(times) for times in zip(*(rank.ms_per_step for rank in ranks), strict=True)]
