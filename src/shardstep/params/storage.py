"""Flat buffers, and the views of parameters and gradients in them.

Elements are numbered in the order they have in memory: a channels-last weight is flattened as it
lies, without a copy, and a state tensor made like it comes back in the same format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from shardstep.params.dtensor import is_dtensor, local_part
from shardstep.plan import Bucket, Piece, ShardPlan


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of `tensor` fill a stretch of memory without gaps or overlaps."""
    return fills_memory(tensor.shape, tensor.stride())


def fills_memory(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor of this form has its elements without gaps or overlaps."""
    if len(shape) != len(stride):
        return False
    expected = 1
    for step, size in sorted(dim for dim in zip(stride, shape, strict=True) if dim[1] != 1):
        if step != expected:
            return 0 in shape
        expected *= size
    return True


def flat(tensor: torch.Tensor, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    """The elements of a dense tensor in memory order, as a view that autograd does not follow.

    Args:
        tensor: the tensor.
        stride: if given, the order is that of a tensor with these strides; a copy is made only
            if `tensor` has others.
    """
    tensor = tensor.detach()
    if stride is not None and tensor.stride() != stride:
        like = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = like.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class ParamStorage(Protocol):
    """Where the elements of the parameters live between steps.

    Attributes:
        depth: how many buckets may be loaded and not yet stored; None for any number.
        nbytes: bytes held beyond the parameters themselves.
    """

    depth: int | None
    nbytes: int

    def attach(self) -> None:
        """Take the parameters in. May replace `param.data`, never the parameter itself."""

    def detach(self, params: Iterable[int]) -> None:
        """Give these parameters storage of their own, if they lie in a shared buffer."""

    def intact(self) -> bool:
        """Whether every parameter still lies where `attach` left it."""

    def load(self, bucket: Bucket) -> torch.Tensor:
        """A flat buffer for `bucket` in which this rank's segment is up to date."""

    def store(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Put what the other ranks own, now in `buffer`, where the parameters read it."""


class OwnStorage:
    """Parameters stay in the storage they came with; buckets are packed to be sent.

    Two buffers of the largest bucket's size are kept per device and used in turn: one is packed or
    unpacked while the other travels.
    """

    depth: int | None = 2

    def __init__(self, plan: ShardPlan, params: Sequence[torch.Tensor], group_rank: int) -> None:
        self._plan = plan
        self._params = params
        self._group_rank = group_rank
        self._places: list[Place] = []
        self._divided = any(map(is_dtensor, params))
        self._buffers: dict[int, torch.Tensor] = {}
        self._packing: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._unpacking: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self.nbytes = 0

    def attach(self) -> None:
        """Allocate the buffers and remember what is copied between them and the parameters."""
        self._places = _places(self._params, self._divided)
        # One rank has everything already and sends nothing.
        buckets = self._plan.training_buckets if self._plan.world_size > 1 else ()
        self.nbytes = 0
        for device in sorted({bucket.device for bucket in buckets}):
            alike = [bucket for bucket in buckets if bucket.device == device]
            pool = [
                torch.zeros(
                    max(bucket.nbytes for bucket in alike),
                    dtype=torch.uint8,
                    device=self._params[alike[0].slots[0].param].device,
                )
                for _ in alike[: self.depth]
            ]
            self.nbytes += sum(buffer.nbytes for buffer in pool)
            for number, bucket in enumerate(alike):
                self._take(bucket, pool[number % len(pool)])

    def _take(self, bucket: Bucket, pooled: torch.Tensor) -> None:
        buffer = pooled[: bucket.nbytes].view(bucket.dtype)
        self._buffers[bucket.index] = buffer
        own: list[Piece] = []
        others: list[Piece] = []
        for group_rank in range(self._plan.world_size):
            (own if group_rank == self._group_rank else others).extend(bucket.pieces(group_rank))

        def in_params(pieces: list[Piece]) -> list[torch.Tensor]:
            # `.data`, so that autograd does not take a parameter that is written back unchanged
            # for one that has changed.
            return [
                flat(local_part(self._params[p.param]).data)[p.param_interval.slice] for p in pieces
            ]

        def in_buffer(pieces: list[Piece]) -> list[torch.Tensor]:
            return [buffer[p.bucket_interval.slice] for p in pieces]

        self._packing[bucket.index] = (in_buffer(own), in_params(own))
        self._unpacking[bucket.index] = (in_params(others), in_buffer(others))

    def detach(self, params: Iterable[int]) -> None:
        """Nothing: they have it."""

    def intact(self) -> bool:
        """Whether every parameter still lies where `attach` found it."""
        return self._places == _places(self._params, self._divided)

    def load(self, bucket: Bucket) -> torch.Tensor:
        """Pack this rank's pieces."""
        _copy_all(*self._packing[bucket.index])
        return self._buffers[bucket.index]

    def store(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Unpack the other ranks' pieces."""
        _copy_all(*self._unpacking[bucket.index])


class BucketViews:
    """Parameters live in the buckets: `param.data` is a view, and nothing is packed to be sent."""

    depth: int | None = None
    nbytes: int = 0

    def __init__(self, plan: ShardPlan, params: Sequence[torch.Tensor], group_rank: int) -> None:
        self._plan = plan
        self._params = params
        self._places: list[Place] = []
        self._divided = any(map(is_dtensor, params))
        self._buffers: dict[int, torch.Tensor] = {}

    def attach(self) -> None:
        """Move every trainable parameter that is elsewhere into its bucket."""
        for bucket in self._plan.training_buckets:
            device = self._params[bucket.slots[0].param].device
            if bucket.index not in self._buffers:
                # Zeros, not garbage: padding is sent too, and must not differ from run to run.
                self._buffers[bucket.index] = torch.zeros(
                    bucket.numel, dtype=bucket.dtype, device=device
                )
            buffer = self._buffers[bucket.index]
            for slot in bucket.slots:
                param = local_part(self._params[slot.param])
                view = buffer.as_strided(param.shape, param.stride(), slot.bucket_offset)
                if param.data_ptr() != view.data_ptr():
                    view.copy_(param.detach())
                    param.data = view
        self._places = _places(self._params, self._divided)

    def detach(self, params: Iterable[int]) -> None:
        """Copy these out, so that nothing keeps the buffers alive."""
        for index in params:
            part = local_part(self._params[index])
            part.data = part.detach().clone()

    def intact(self) -> bool:
        """Whether every parameter still lies where `attach` put it."""
        return self._places == _places(self._params, self._divided)

    def load(self, bucket: Bucket) -> torch.Tensor:
        """The bucket itself."""
        return self._buffers[bucket.index]

    def store(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Nothing: the parameters are views of the buffer."""


Place = tuple[int, tuple[int, ...]]
"""Where a parameter starts, and in which order its elements follow."""


def _places(params: Iterable[torch.Tensor], divided: bool) -> list[Place]:
    """Where each lies; they are asked several times a step, so who is a DTensor is asked before."""
    parts = map(local_part, params) if divided else params
    return [(part.data_ptr(), part.stride()) for part in parts]


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
