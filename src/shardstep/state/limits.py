"""Limits for descriptions of tensors from files and other ranks, checked before any allocation."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any

MAX_DIMS = 64
"""The limit of torch's own functions."""

MAX_DEPTH = 64
"""The limit for nested containers, far below Python's recursion limit."""

MAX_NUMEL = 2**58

STATE_NBYTES = 64 * 2**20
STATE_RATIO = 64
"""The limits for one tensor of state that is not per element: bytes, and times the bytes of all
parameters. A vector of history or a square factor fits; gigabytes for a scalar do not."""


def is_counts(value: Any) -> bool:
    """Return whether this is a short list of numbers that can be sizes or offsets."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMS
        and all(type(each) is int and 0 <= each <= MAX_NUMEL for each in value)
    )


def is_sizes(value: Any) -> bool:
    """Return whether this is a list of numbers that can be the sizes of one tensor."""
    return is_counts(value) and math.prod(max(1, each) for each in value) <= MAX_NUMEL


def memory_nbytes() -> int:
    """Return the memory of this machine, or the limit of its container."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):
        # The container's limit, with control groups version 2.
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found)
