"""`CheckpointError`, and the check that raises it."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, of another kind, or does not fit. Names the file."""


def require(holds: bool, problem: str) -> None:
    """Raise `CheckpointError` with this message unless the condition holds."""
    if not holds:
        raise CheckpointError(problem)
