"""Byte-level training batches from text every machine has: Python's own standard library."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 4_000_000
"""How much source `stdlib_source` reads: plenty for a demo, quick to load."""


def stdlib_source(max_bytes: int = MAX_BYTES) -> Tensor:
    """Read the standard library's top-level modules, in the order of their names.

    Args:
        max_bytes: Where to stop.

    Returns:
        The text as a flat `uint8` tensor; the same on every process of a machine.

    Raises:
        RuntimeError: If this Python ships its standard library without source files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise RuntimeError(
            f"expected Python source files in {folder} to train on, found none; "
            "run with a Python that ships its standard library as source"
        )
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


class ByteBatches:
    """Batches of random windows of a text, each a function of (seed, step, rank) alone.

    Args:
        text: A flat `uint8` tensor, longer than `block_size`.
        batch_size: Windows per batch.
        block_size: Bytes per window.
        seed: Chooses the sequence of batches.
        rank: Chooses this rank's part of each step's global batch.

    Example:
        >>> text = torch.arange(100, dtype=torch.uint8)
        >>> inputs, targets = ByteBatches(text, 2, 8, seed=0, rank=0).batch(step=0)
        >>> bool((targets == inputs + 1).all())
        True
    """

    def __init__(
        self, text: Tensor, batch_size: int, block_size: int, *, seed: int, rank: int
    ) -> None:
        if text.numel() <= block_size:
            raise ValueError(
                f"a text must be longer than block_size={block_size} bytes, got {text.numel()}"
            )
        self._text = text
        self._batch_size = batch_size
        self._block_size = block_size
        self._seed = seed
        self._rank = rank

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of one step, `(batch_size, block_size)` each.

        Args:
            step: Which batch; asking twice gives the same one.
        """
        # A string is seeded through SHA-512: neighbouring steps and ranks share no pattern.
        rng = random.Random(f"{self._seed}/{step}/{self._rank}")
        starts = [
            rng.randrange(self._text.numel() - self._block_size) for _ in range(self._batch_size)
        ]
        windows = torch.stack([self._text[s : s + self._block_size + 1] for s in starts]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
