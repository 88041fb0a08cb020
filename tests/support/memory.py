"""The memory that this process's tensors hold."""

from __future__ import annotations

import gc

import torch

from shardstep.gradients.sharded_grad import ShardedGrad


def held_memory() -> dict[int, int]:
    """Return the bytes of every stretch of memory that Python can reach, by its address.

    Storages that overlap are one stretch: parameters have storages of their own in their buckets.
    """
    gc.collect()
    ends: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not isinstance(thing, ShardedGrad):
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
                start = storage.data_ptr()
                if start:
                    ends[start] = max(ends.get(start, 0), start + storage.nbytes())
    held: dict[int, int] = {}
    first = stop = 0
    for start, end in sorted(ends.items()):
        if start >= stop:
            first = start
        stop = max(stop, end)
        held[first] = stop - first
    return held
