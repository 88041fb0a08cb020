"""How much a description may claim: what somebody else wrote must not cost more than it can hold.

Descriptions come from files and from other ranks. Nothing is allocated, multiplied or walked
through on their word alone.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any

MAX_DIMS = 64
"""As many as torch's own functions take."""

MAX_DEPTH = 64
"""Of dicts and lists in one another, far from where Python gives up."""

MAX_NUMEL = 2**58

STATE_NBYTES = 64 * 2**20
STATE_RATIO = 64
"""State that is not per element may have so many bytes, and so many times the bytes of all
parameters, in one tensor: room for a vector of history or a square factor, not for gigabytes beside
a scalar."""


def is_counts(value: Any) -> bool:
    """Whether this is a list of a few numbers that can be sizes or places."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMS
        and all(type(each) is int and 0 <= each <= MAX_NUMEL for each in value)
    )


def is_sizes(value: Any) -> bool:
    """Whether this is a list of numbers that can be the sizes of one tensor."""
    return is_counts(value) and math.prod(max(1, each) for each in value) <= MAX_NUMEL


def memory_nbytes() -> int:
    """How much memory this process could have if nobody else had any."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):
        # A container's own limit, in the second version of control groups.
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found)
