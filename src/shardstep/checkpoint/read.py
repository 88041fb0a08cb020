"""Reading a checkpoint: any box of any tensor, out of whatever chunks it was stored in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.format import Chunk, Contents, Stored, Tree, read_contents
from shardstep.checkpoint.safetensors import File, Progress, form_of, no_progress
from shardstep.checkpoint.staging import Manifest, check, read_manifest
from shardstep.plan import Box, contiguous
from shardstep.state.limits import memory_nbytes
from shardstep.state.tree import Leaf, decode, wrap

MAX_OPEN = 128
"""Files at a time."""


class Room(Protocol):
    """Makes the memory for a tensor that is read in full, on the CPU."""

    def __call__(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A dense tensor of this form, with anything in it."""


def on_cpu(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Ordinary memory."""
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu")


WRAPPING_PACKAGES = ("torchao",)
"""Whose tensor subclasses, such as quantised state, a file may ask for, if they are imported."""


class Checkpoint:
    """A checkpoint that is open for reading, in one process.

    Args:
        path: the folder.
        room: given shape, stride and dtype, makes the memory for a tensor that is read in full.

    Attributes:
        path: the folder.
        manifest: its files.
        contents: what is in them.

    Raises:
        CheckpointError: if it is not a checkpoint, or not complete, or its lists are damaged. The
            files with tensors are looked at by `verify`, and as they are read.
    """

    def __init__(self, path: Path, room: Room = on_cpu) -> None:
        self.path = path
        self._room = room
        self.manifest: Manifest = read_manifest(path)
        self.contents: Contents = read_contents(path, self.manifest)
        self._files: dict[str, File] = {}
        self._open = ExitStack()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._files.clear()

    def verify(self, names: list[str] | None = None, progress: Progress = no_progress) -> None:
        """Make sure that these files, or all, are as they were written.

        Raises:
            CheckpointError: naming the first that is not.
        """
        for name in sorted(self.manifest.files) if names is None else names:
            check(self.path, name, self.manifest.files[name], progress)

    def check_chunks(self) -> None:
        """Make sure that every chunk is in its file, in the form that the contents say.

        Reads the headers of the files alone. That chunks make up their tensors without gaps is
        known since the contents were read.

        Raises:
            CheckpointError: naming the first that is not.
        """
        for what, stored in self.contents.tensors():
            for chunk in stored.chunks:
                entry = self._file(chunk.file).entries.get(chunk.key)
                if entry is None:
                    raise CheckpointError(
                        f"{self.path / chunk.file}: {what} should have its chunk {chunk.key!r} "
                        "there, and it has not; the file belongs to another checkpoint"
                    )
                if (entry.dtype, entry.shape) != form_of(stored.dtype, chunk.box.sizes):
                    raise CheckpointError(
                        f"{self.path / chunk.file}: chunk {chunk.key!r} of {what} is {entry.dtype} "
                        f"of shape {entry.shape} there, but should be {stored.dtype} of shape "
                        f"{chunk.box.sizes}; the file belongs to another checkpoint"
                    )

    def read(self, stored: Stored, box: Box, target: torch.Tensor) -> None:
        """Copy a box of a tensor to `target`, which has the box's shape, and any dtype and device.

        Raises:
            CheckpointError: if it cannot be read.
        """
        got = 0
        for chunk, there, here in _overlaps(stored, box):
            into = target
            for dim, (start, size) in enumerate(zip(here.offsets, here.sizes, strict=True)):
                into = into.narrow(dim, start, size)
            self._file(chunk.file).read(chunk.key, stored.dtype, chunk.box.sizes, there, into)
            got += there.numel
        if got != box.numel:
            raise CheckpointError(
                f"{self.path}: the chunks of a tensor of shape {stored.shape} overlap or leave gaps"
            )

    def whole(self, stored: Stored) -> torch.Tensor:
        """All of a tensor, on the CPU."""
        tensor = self._make(stored, contiguous(stored.shape))
        self.read(stored, Box.whole(stored.shape), tensor)
        return tensor

    def _make(self, stored: Stored, stride: Sequence[int]) -> torch.Tensor:
        """Room for a tensor, once its files have been seen to hold it."""
        for chunk in stored.chunks:
            self._file(chunk.file).check(chunk.key, stored.dtype, chunk.box.sizes)
        try:
            if stored.nbytes > memory_nbytes():
                raise MemoryError
            return self._room(stored.shape, stride, stored.dtype)
        except (MemoryError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: there is no memory for a tensor of {stored.nbytes:,} bytes, which "
                "it says that it has"
            ) from error

    def value(self, tree: Tree, tensor: Callable[[int, Leaf], torch.Tensor] | None = None) -> Any:
        """A value, with tensors on the CPU, or as `tensor` makes them.

        Args:
            tree: what was stored.
            tensor: given a tensor's number and form, makes it; None for all as they were.
        """
        number = -1

        def make(leaf: Leaf) -> torch.Tensor:
            nonlocal number
            number += 1
            if tensor is not None:
                return tensor(number, leaf)
            return self.leaf(tree, number, leaf)

        return decode(tree.node, make, wrap=self._wrap)

    def _wrap(self, kind: str, inner: Any, context: Any, shape: Any, stride: Any) -> Any:
        """A quantised tensor. A file may name only classes that are known to be harmless."""
        if kind.partition(":")[0].partition(".")[0] not in WRAPPING_PACKAGES:
            raise CheckpointError(
                f"{self.path}: it has a tensor of class {kind!r:.100}, which is not made from a "
                f"file; classes of {', '.join(WRAPPING_PACKAGES)} are"
            )
        try:
            # What was divided is where its parameter is already; the rest of the tensor goes along.
            away = [part.device for part in inner.values() if part.device.type != "cpu"]
            inner = {name: part.to(away[0]) if away else part for name, part in inner.items()}
            return wrap(kind, inner, context, shape, stride)
        except Exception as error:
            raise CheckpointError(
                f"{self.path}: a tensor of class {kind!r:.100} cannot be made of what is there "
                f"({type(error).__name__}: {error})"
            ) from error

    def leaf(self, tree: Tree, number: int, leaf: Leaf) -> torch.Tensor:
        """One tensor of a value, in full, on the CPU."""
        if number not in tree.stored:
            return leaf.empty(torch.device("cpu"))
        made = self._make(tree.stored[number], leaf.stride)
        self.read(tree.stored[number], Box.whole(leaf.shape), made)
        return made

    def _file(self, name: str) -> File:
        if name not in self._files:
            if len(self._files) >= MAX_OPEN:
                # A process may have a thousand open; a checkpoint may have more.
                self.__exit__()
            self._files[name] = self._open.enter_context(File(self.path / name))
        return self._files[name]


def _overlaps(stored: Stored, box: Box) -> list[tuple[Chunk, Box, Box]]:
    """Which chunks have parts of `box`: each with the part as seen in the chunk and in the box."""
    if len(stored.chunks) == 1 and stored.chunks[0].box == box:
        whole = Box.whole(box.sizes)
        return [(stored.chunks[0], whole, whole)]
    found = []
    for chunk in stored.chunks:
        common = chunk.box.intersect(box)
        if common is not None:
            found.append((chunk, common.within(chunk.box), common.within(box)))
    return found
