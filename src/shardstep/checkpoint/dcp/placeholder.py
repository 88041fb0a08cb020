"""Placeholder for a sharded tensor in a state dict of `torch.distributed.checkpoint`.

It has the logical shape of the whole tensor and no memory. DCP asks it for the boxes that this rank
holds, to write or to fill them, and may copy it to write it later. All other operations raise: one
rank cannot do them alone, and a pickled placeholder would look like saved state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from shardstep.plan import Box, Interval, ParamSpec, boxes

aten = torch.ops.aten

_Chunk = tuple[int | None, tuple[int, ...], tuple[int, ...]]
"""A box of the logical tensor: its first element in this rank's part, or None for the entire part;
its offsets; its sizes."""


class Placeholder(torch.Tensor):
    """A tensor of the optimizer state that is sharded across ranks.

    All data is in attributes, because staging for an asynchronous save copies them one by one.

    Attributes:
        label: description of the tensor for messages.
        started: whether the optimizer has the tensor yet. If not, its absence is saved.
        part: this rank's part, in use; None if it holds none.
        form: shape and stride of this rank's part; None if it holds none.
        home: device of this rank's part.
        cut_stride: strides of the parameter that the part is cut from.
        chunks: the boxes that make up the part.
        reading: whether DCP is about to read into it.
        room: memory to read into. It is not `part`, since a read may fail half way.
        taken: whether `take_part` returned what was read.
    """

    label: str
    started: bool
    part: torch.Tensor | None
    form: tuple[tuple[int, ...], tuple[int, ...]] | None
    home: str
    cut_stride: tuple[int, ...]
    chunks: list[_Chunk]
    reading: bool
    room: torch.Tensor | None
    taken: bool

    @staticmethod
    def __new__(
        cls,
        label: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        started: bool,
    ) -> Placeholder:
        """Make a placeholder for a tensor of which this rank holds nothing."""
        self: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        self.label = label
        self.started = started
        self.part = self.room = self.form = None
        self.home = str(device)
        self.cut_stride = ()
        self.chunks = []
        self.reading = self.taken = False
        return self

    def hold(self, part: torch.Tensor, cut: tuple[Interval, ParamSpec] | None = None) -> None:
        """Set this rank's part: the entire tensor, or the interval `cut` out of a parameter.

        Before the tensor is started, only the form of `part` is kept.
        """
        self.part = part if self.started else None
        self.form = (tuple(part.shape), tuple(part.stride()))
        self.home = str(part.device)
        if cut is None:
            whole = Box.whole(self.shape)
            self.chunks = [(None, whole.offsets, whole.sizes)]
        else:
            interval, spec = cut
            self.cut_stride = spec.stride
            self.chunks = [
                (stretch.start - interval.start, box.offsets, box.sizes)
                for stretch, box in boxes(interval, spec.shape, spec.stride)
            ]

    def take_part(self) -> torch.Tensor | None:
        """Return this rank's part as it was read, or a copy of `part` if nothing was read.

        Raises:
            RuntimeError: if it was taken before.
        """
        if self.taken:
            raise RuntimeError(f"{self.label} was already taken from this dict; read it again")
        if not self.reading or self.form is None:
            return None if self.part is None else self.part.clone()
        read = self._make_room()
        self.room = None
        self.taken = True
        return read

    def _make_room(self) -> torch.Tensor:
        if self.room is None:
            assert self.form is not None
            shape, stride = self.form
            self.room = torch.empty_strided(shape, stride, dtype=self.dtype, device=self.home)
            # An element that the checkpoint lacks must not pass for a number.
            if self.dtype.is_floating_point and self.dtype.itemsize > 1:
                self.room.fill_(torch.nan)
        return self.room

    # --------------------------------------------------- called by torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """Return what this rank has to write."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self.started:
            return [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)]
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size=self.size()),
            )
            for chunk in self._chunk_metadata()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Return what this rank has to read. From now on, boxes are memory to read into."""
        self.reading = True
        return self._chunk_metadata()

    def _chunk_metadata(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for _, offsets, sizes in self.chunks
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor | None:
        """Return the box at `index.offset`, or None, to be written for a tensor not started."""
        if index.offset is None:
            return None
        tensor = self._make_room() if self.reading else self.part
        for start, offsets, sizes in self.chunks:
            if offsets == tuple(index.offset) and tensor is not None:
                if start is None:
                    return tensor
                first = tensor.storage_offset() + start
                return tensor.as_strided(sizes, self.cut_stride, first)
        raise ValueError(f"{self.label} has no box at {tuple(index.offset)} on this rank")

    # ------------------------------------------------------------------------------ all other uses

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder({self.label}, shape={tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse("pickling")

    def refuse(self, operation: str) -> NoReturn:
        """Raise: this tensor is sharded."""
        raise RuntimeError(
            f"{operation} cannot be done on {self.label}: it is sharded across ranks, and this is "
            "a placeholder for torch.distributed.checkpoint. For the whole tensor, call "
            "consolidate_state_dict() on every rank and then state_dict(); to save it sharded, use "
            "torch.distributed.checkpoint.save or shardstep.checkpoint.save"
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Copy it, to be written later; refuse all other operations."""
        operation = _OPERATIONS.get(func.overloadpacket)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if operation is None or not all(isinstance(tensor, Placeholder) for tensor in tensors):
            found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
            found[0].refuse(func.overloadpacket.__name__)
        return operation(*tensors, device=(kwargs or {}).get("device"))


def _blank(source: Placeholder, device: torch.device | None) -> Placeholder:
    """Make a placeholder for the same tensor; the caller sets its attributes."""
    return Placeholder(
        source.label, source.shape, source.dtype, device or source.device, source.started
    )


def _empty_like(source: Placeholder, device: torch.device | None) -> Placeholder:
    """Make a placeholder for the same tensor, with memory for its part."""
    made = _blank(source, device)
    made.form, made.cut_stride, made.chunks = source.form, source.cut_stride, source.chunks
    if source.part is not None:
        made.part = torch.empty_like(source.part, device=device)
        made.home = str(made.part.device)
    return made


def _copy(target: Placeholder, source: Placeholder, device: object) -> Placeholder:
    """Copy the part of `source` into that of `target`, which was made like it."""
    if target.part is not None and source.part is not None:
        target.part.copy_(source.part)
    return target


_OPERATIONS: dict[Any, Callable[..., Placeholder]] = {
    aten.new_empty: _blank,
    aten.empty_like: _empty_like,
    aten.zeros_like: _empty_like,
    aten.copy_: _copy,
    aten.detach: lambda source, device: source,
}
