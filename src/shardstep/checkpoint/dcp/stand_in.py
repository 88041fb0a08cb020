"""What stands in a sharded state dict for a tensor of which this rank has at most a part.

It has the logical shape of the whole and no memory. `torch.distributed.checkpoint` asks it for the
boxes that this rank holds, to write them or to have them filled, and may copy it to write it later.
Everything else that could be done with a tensor is refused: no rank can do it alone, and a stand-in
that was pickled would look like a saved state without being one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from shardstep.gradients.sharded_grad import flatten
from shardstep.plan import Box, Interval, ParamSpec, boxes

aten = torch.ops.aten

_Chunk = tuple[int | None, tuple[int, ...], tuple[int, ...]]
"""A box of the logical tensor: the number of its first element in this rank's part, or None if it
is all of that; its offsets; its sizes."""


class StandIn(torch.Tensor):
    """A tensor of the optimizer state, divided among the ranks.

    All that it knows is in attributes, which staging for an asynchronous save copies one by one.

    Attributes:
        what: which tensor it is, for error messages.
        started: whether the optimizer has it yet, on the ranks that hold it. If not, that is what
            is written: this tensor is not there.
        part: this rank's part, as the optimizer has it; None if there is none.
        form: shape and stride of this rank's part; None if this rank holds nothing of it.
        home: device of this rank's part.
        cut_stride: strides of the parameter that the part is cut from.
        chunks: the boxes that the part consists of.
        asked: whether somebody is about to read into it.
        room: what is read into, apart from `part`: reading may fail half way.
        taken: whether what was read has been handed over.
    """

    what: str
    started: bool
    part: torch.Tensor | None
    form: tuple[tuple[int, ...], tuple[int, ...]] | None
    home: str
    cut_stride: tuple[int, ...]
    chunks: list[_Chunk]
    asked: bool
    room: torch.Tensor | None
    taken: bool

    @staticmethod
    def __new__(
        cls,
        what: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        started: bool,
    ) -> StandIn:
        """A stand-in for a tensor of which this rank holds nothing."""
        self: StandIn = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        self.what = what
        self.started = started
        self.part = self.room = None
        self.form = None
        self.home = str(device)
        self.cut_stride = ()
        self.chunks = []
        self.asked = self.taken = False
        return self

    def hold(self, part: torch.Tensor, cut: tuple[Interval, ParamSpec] | None = None) -> None:
        """Let this rank hold `part`: all of the tensor, or what is `cut` out of a parameter's.

        If the tensor is not there yet, only the form of `part` is kept.
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

    def hand_over(self) -> torch.Tensor | None:
        """This rank's part as it was read; a copy of the optimizer's own if nothing was read.

        Raises:
            RuntimeError: if it was taken before.
        """
        if self.taken:
            raise RuntimeError(f"{self.what} was taken out of this dict already; read it anew")
        if not self.asked or self.form is None:
            return None if self.part is None else self.part.clone()
        read = self._room()
        self.room = None
        self.taken = True
        return read

    def _room(self) -> torch.Tensor:
        if self.room is None:
            assert self.form is not None
            shape, stride = self.form
            self.room = torch.empty_strided(shape, stride, dtype=self.dtype, device=self.home)
            # An element that the checkpoint turns out not to have must not pass for a number.
            if self.dtype.is_floating_point and self.dtype.itemsize > 1:
                self.room.fill_(torch.nan)
        return self.room

    # ----------------------------------------------------- asked by torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """What this rank has to write."""
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self.started:
            return [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)]
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.size(),
                ),
            )
            for _, offsets, sizes in self.chunks
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """What this rank has to read. From now on, boxes are room to read into."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self.asked = True
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for _, offsets, sizes in self.chunks
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor | None:
        """The box at `index.offset`; None, to be written, for a tensor that is not there yet."""
        if index.offset is None:
            return None
        tensor = self._room() if self.asked else self.part
        for start, offsets, sizes in self.chunks:
            if offsets == tuple(index.offset) and tensor is not None:
                if start is None:
                    return tensor
                first = tensor.storage_offset() + start
                return tensor.as_strided(sizes, self.cut_stride, first)
        raise ValueError(f"{self.what} has no box at {tuple(index.offset)} on this rank")

    # ------------------------------------------------------------------------ all other uses

    def __repr__(self) -> str:  # type: ignore[override]
        """Says what it stands for; there are no numbers to show."""
        return f"StandIn({self.what}, shape={tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused: it would be pickled without what it stands for."""
        self._refuse("pickling")

    def _refuse(self, act: str) -> NoReturn:
        raise RuntimeError(
            f"{act} cannot be done on {self.what}: it lies divided among the ranks, and this is "
            "only what torch.distributed.checkpoint needs to save and load it. To have it whole, "
            "call consolidate_state_dict() on every rank and then state_dict(); to save it as it "
            "lies, use torch.distributed.checkpoint.save or shardstep.checkpoint.save"
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
        """Let it be copied to be written later, and refuse the rest."""
        act = _ACTS.get(func.overloadpacket)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if act is None or not all(isinstance(tensor, StandIn) for tensor in tensors):
            found = next(leaf for leaf in flatten((args, kwargs)) if isinstance(leaf, StandIn))
            found._refuse(func.overloadpacket.__name__)
        return act(*tensors, device=(kwargs or {}).get("device"))


def _blank(source: StandIn, device: torch.device | None) -> StandIn:
    """Another for the same tensor; whoever asked for it fills in the attributes."""
    return StandIn(source.what, source.shape, source.dtype, device or source.device, source.started)


def _like(source: StandIn, device: torch.device | None) -> StandIn:
    """Another for the same tensor, with memory for its part."""
    made = _blank(source, device)
    made.form, made.cut_stride, made.chunks = source.form, source.cut_stride, source.chunks
    if source.part is not None:
        made.part = torch.empty_like(source.part, device=device)
        made.home = str(made.part.device)
    return made


def _copy(target: StandIn, source: StandIn, device: object) -> StandIn:
    """Copy the part of `source` into that of `target`, which was made like it."""
    if target.part is not None and source.part is not None:
        target.part.copy_(source.part)
    return target


def _same(source: StandIn, device: object) -> StandIn:
    return source


_ACTS: dict[Any, Callable[..., StandIn]] = {
    aten.new_empty: _blank,
    aten.empty_like: _like,
    aten.zeros_like: _like,
    aten.copy_: _copy,
    aten.detach: _same,
}
