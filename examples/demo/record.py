"""Records of the demo: its configuration and its measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from demo.gpt import GPTConfig

EQUAL = "equal, bit for bit"


@dataclass(frozen=True)
class DemoConfig:
    """The demo's model and training; `batch_size` is the number of sequences per rank and step."""

    model: GPTConfig = field(default_factory=GPTConfig)
    ranks: int = 2
    steps: int = 60
    seed: int = 0
    batch_size: int = 8
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class RankRecord:
    """Measurements of one rank in one run; the system may not tell the bytes sent."""

    losses: tuple[float, ...]
    digest: str
    state_nbytes: int
    sent_nbytes_per_step: float | None
    ms_per_step: float


@dataclass(frozen=True)
class DemoRecord:
    """All runs of a demo: the records of the ranks, by run; the first run is unsharded."""

    config: DemoConfig
    num_parameters: int
    torch_version: str
    runs: dict[str, list[RankRecord]]

    def verdict(self, run: str) -> str:
        """Compare a run with the unsharded one; `EQUAL` if no bit differs on any rank."""
        unsharded = next(iter(self.runs.values()))
        pairs = list(zip(unsharded, self.runs[run], strict=True))
        for step in range(self.config.steps):
            # As text: two equal NaNs are the same number here, and 0.0 is not -0.0.
            if any(a.losses[step].hex() != b.losses[step].hex() for a, b in pairs):
                return f"different from step {step + 1} on"
        if any(a.digest != b.digest for a, b in pairs):
            return "equal losses, but different final parameters"
        return EQUAL

    def as_dict(self) -> dict[str, Any]:
        """Return the record and the verdicts, for JSON."""
        return {**asdict(self), "verdicts": {run: self.verdict(run) for run in self.runs}}
