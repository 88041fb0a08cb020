"""Placeholder for a sharded tensor in a state dict of `torch.distributed.checkpoint`.

It has the logical shape of the whole tensor and no memory. DCP asks it for the boxes that this rank
holds, to write or to fill them, and may copy it to write it later. All other operations raise: one
rank cannot do them alone, and a pickled placeholder would look like saved state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from shardstep.params.flat import view_box
from shardstep.plan import Box, Interval, ParamSpec, boxes

aten = torch.ops.aten

Cut = tuple[Interval, ParamSpec]
"""The elements of a parameter that this rank holds."""


class Placeholder(torch.Tensor):
    """A tensor of the optimizer state that is sharded across ranks.

    All data is in attributes, because staging for an asynchronous save copies them one by one.
    """

    label: str
    started: bool  # or the optimizer has no such tensor yet, which is saved as its absence
    home: str  # the device of this rank's part
    part: torch.Tensor | None = None
    form: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # shape and stride of the part
    boxes: Sequence[Box] = ()  # of the part
    cut: tuple[tuple[int, ...], int] = ((), 0)  # the tensor's stride, and the part's first element
    reading: bool = False
    room: torch.Tensor | None = None  # to read into; not `part`, since a read may fail half way
    taken: bool = False

    @staticmethod
    def __new__(
        cls,
        label: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        started: bool,
        part: torch.Tensor | None = None,
        cut: Cut | None = None,
    ) -> Placeholder:
        """Make a placeholder with this rank's part, if it has one.

        That is the entire tensor, or the interval `cut` out of a parameter. Before the tensor is
        started, only the form of `part` is kept.
        """
        self: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        self.label, self.started, self.home = label, started, str(device)
        if part is not None:
            self.part = part if started else None
            self.form = (tuple(part.shape), tuple(part.stride()))
            self.home = str(part.device)
            self.boxes, self.cut = [Box.whole(shape)], (tuple(part.stride()), 0)
        if part is not None and cut is not None and cut[0] != cut[1].whole:
            interval, spec = cut
            self.boxes = [box for _, box in boxes(interval, spec.shape, spec.stride)]
            self.cut = spec.stride, interval.start
        return self

    def take_part(self) -> torch.Tensor | None:
        """Return this rank's part as it was read, once, or a copy of `part` if nothing was read."""
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
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor | None:
        """Return the box at `index.offset`, or None, to be written for a tensor not started."""
        if index.offset is None:
            return None
        tensor = self._make_room() if self.reading else self.part
        for box in self.boxes:
            if box.offsets == tuple(index.offset) and tensor is not None:
                return view_box(tensor, box, *self.cut)
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
        operation = func.overloadpacket
        tensors: list[Any] = [arg for arg in args if isinstance(arg, torch.Tensor)]
        device = (kwargs or {}).get("device")
        if all(isinstance(tensor, cls) for tensor in tensors):
            if operation is aten.detach:
                return tensors[0]
            if operation is aten.copy_:
                copy, source = tensors
                if copy.part is not None and source.part is not None:
                    copy.part.copy_(source.part)
                return copy
            if operation in (aten.new_empty, aten.empty_like, aten.zeros_like):
                return tensors[0].make_like(device, with_part=operation is not aten.new_empty)
        found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        found[0].refuse(operation.__name__)

    def make_like(self, device: torch.device | None, with_part: bool) -> Placeholder:
        """Make a placeholder for the same tensor, with memory for its part or without a part."""
        made = Placeholder(self.label, self.shape, self.dtype, device or self.device, self.started)
        if with_part:
            made.form, made.boxes, made.cut = self.form, self.boxes, self.cut
            if self.part is not None:
                made.part = torch.empty_like(self.part, device=device)
                made.home = str(made.part.device)
        return made
