"""What is raised for a checkpoint that cannot be read."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, of another kind, or does not fit; the message says which
    file and what about it."""
