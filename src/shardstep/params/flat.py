"""Tensors in memory order.

Elements are numbered in the order they have in memory: a channels-last weight is flattened
without a copy, and a state tensor made like it comes back in the same format.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from shardstep.plan import Box


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements of `tensor` fill memory without gaps or overlaps."""
    return fills_memory(tensor.shape, tensor.stride())


def fills_memory(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if a tensor of this form fills memory without gaps or overlaps."""
    if len(shape) != len(stride):
        return False
    expected = 1
    for step, size in sorted(dim for dim in zip(stride, shape, strict=True) if dim[1] != 1):
        if step != expected:
            return 0 in shape
        expected *= size
    return True


def flat(tensor: torch.Tensor, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return a flat view of a dense tensor in memory order, which autograd does not follow.

    If `stride` is given and the tensor has others, a copy in that order.
    """
    tensor = tensor.detach()
    if stride is not None and tensor.stride() != stride:
        like = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = like.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def view_box(piece: torch.Tensor, box: Box, stride: tuple[int, ...], start: int) -> torch.Tensor:
    """Return a box of a tensor with this stride, as a view of its elements from `start` on.

    `piece` has these elements in memory order.
    """
    first = sum(map(operator.mul, box.offsets, stride)) - start
    return piece.as_strided(box.sizes, stride, piece.storage_offset() + first)
