"""Batches of bytes from a text that every machine has: Python's standard library."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def stdlib_source(max_bytes: int = 4_000_000) -> Tensor:
    """Return the source of the standard library's top-level modules, as a flat `uint8` tensor.

    Raises:
        RuntimeError: if this Python ships no source files.
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


def make_batch(
    text: Tensor, batch_size: int, block_size: int, *, seed: int, step: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, `(batch_size, block_size)` each: random windows of `text`.

    Example:
        >>> text = torch.arange(100, dtype=torch.uint8)
        >>> inputs, targets = make_batch(text, 2, 8, seed=0, step=0, rank=0)
        >>> bool((targets == inputs + 1).all())
        True
    """
    # A text seeds through SHA-512: neighbouring steps and ranks share no pattern.
    rng = random.Random(f"{seed}/{step}/{rank}")
    starts = [rng.randrange(text.numel() - block_size) for _ in range(batch_size)]
    windows = torch.stack([text[s : s + block_size + 1] for s in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
