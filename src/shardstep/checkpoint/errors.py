"""`CheckpointError`."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, of another kind, or does not fit. Names the file."""
