"""Memory that is a file: for values that have to be there all at once, however large they are.

What lies in a mapped file takes no memory of the process for longer than the system likes: it can
be written to the disk and read back at any time.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

ALIGNMENT_NBYTES = 64


class Scratch:
    """Room for tensors in a file without a name, which is gone when they are.

    Args:
        folder: where there is space for it.
        nbytes: bytes of all the tensors that will be asked for.
        num_tensors: how many there will be.

    Raises:
        OSError: if there is no space.
    """

    def __init__(self, folder: Path, nbytes: int, num_tensors: int) -> None:
        self._used = 0
        total = nbytes + (num_tensors + 1) * ALIGNMENT_NBYTES
        with tempfile.TemporaryFile(dir=folder) as file:
            # All of it now: a full disk is an error here, and the end of the process later.
            os.posix_fallocate(file.fileno(), 0, total)
            self._map = mmap.mmap(file.fileno(), total)

    def room(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A dense tensor of this form, with a storage of its own."""
        # Between two large tensors is when it costs nothing to let go of the last one.
        self.rest()
        numel = math.prod(shape)
        if not numel:
            return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=self._used)
        self._used += math.ceil(flat.nbytes / ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        return flat.as_strided(tuple(shape), tuple(stride))

    def rest(self) -> None:
        """Let the system take back the memory; the file has what was in it."""
        self._map.madvise(mmap.MADV_DONTNEED)
