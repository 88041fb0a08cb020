"""Buffers cut into segments of all kinds of lengths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardstep.comm import Comm

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool]

MIB = 2**20

#: Lengths of the segments of ranks 0, 1, 2, ...; the first `world_size` of each are used.
CUTS = {
    "even": [64, 64, 64, 64],
    "one element each": [1, 1, 1, 1],
    "uneven": [128, 64, 192, 320],
    "first empty": [0, 64, 128, 64],
    "last empty": [64, 64, 64, 0],
    "more ranks than data": [0, 64, 0, 0],
    "nothing at all": [0, 0, 0, 0],
    "long, uneven": [3 * MIB // 2, 64, MIB, MIB + 1],
}


def cuts_of(case: str, world_size: int) -> Sequence[int]:
    if case == "even":
        return range(0, 64 * world_size + 1, 64)  # as an even bucket has them
    return list(accumulate(CUTS[case][:world_size], initial=0))


def random_bits(dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    """Random bytes, so that every one counts (NaNs among them)."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    size = (numel * dtype.itemsize,)
    return torch.randint(high, size, dtype=torch.uint8, generator=generator).view(dtype)


def make_buffer(
    comm: Comm, dtype: torch.dtype, cuts: Sequence[int], seed: int
) -> tuple[Tensor, Tensor]:
    """A buffer with only this rank's segment filled in, and what it is to become."""
    expected = torch.cat(
        [
            random_bits(dtype, stop - start, 10 * seed + rank)
            for rank, (start, stop) in enumerate(pairwise(cuts))
        ]
    )
    buffer = torch.zeros_like(expected)
    own = slice(cuts[comm.group_rank], cuts[comm.group_rank + 1])
    buffer[own] = expected[own]
    return buffer, expected
