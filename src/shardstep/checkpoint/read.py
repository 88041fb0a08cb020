"""Reading a checkpoint: any box of any tensor, out of whatever chunks it was stored in."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.contents import Contents, Stored, Tree, read_contents
from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.folder import Manifest, check, read_manifest
from shardstep.checkpoint.safetensors import File, Progress, no_progress
from shardstep.checkpoint.tree import Leaf, decode
from shardstep.plan import Box


class Checkpoint:
    """A checkpoint that is open for reading, in one process.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        manifest: its files.
        contents: what is in them.

    Raises:
        CheckpointError: if it is not a checkpoint, or not complete, or its lists are damaged. The
            files with tensors are looked at by `verify`, and as they are read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self.read(stored, Box.whole(stored.shape), tensor)
        return tensor

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

        return decode(tree.node, make)

    def leaf(self, tree: Tree, number: int, leaf: Leaf) -> torch.Tensor:
        """One tensor of a value, in full, on the CPU."""
        cpu = torch.device("cpu")
        if number not in tree.stored:
            return leaf.empty(cpu)
        made = leaf.empty(cpu)
        self.read(tree.stored[number], Box.whole(leaf.shape), made)
        return made

    def _file(self, name: str) -> File:
        if name not in self._files:
            self._files[name] = self._open.enter_context(File(self.path / name))
        return self._files[name]


def _overlaps(stored: Stored, box: Box) -> list[tuple[Any, Box, Box]]:
    """Which chunks have parts of `box`: each with the part as seen in the chunk and in the box."""
    if len(stored.chunks) == 1 and stored.chunks[0].box == box:
        whole = Box.whole(box.sizes)
        return [(stored.chunks[0], whole, whole)]
    if not math.prod(box.sizes):
        return []
    # Imported here: it takes half a second, and not everybody loads a checkpoint.
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def chunk(box: Box) -> metadata.ChunkStorageMetadata:
        return metadata.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))

    saved = metadata.TensorStorageMetadata(
        metadata.TensorProperties(dtype=stored.dtype),
        torch.Size(stored.shape),
        [chunk(each.box) for each in stored.chunks],
    )
    return [
        (
            stored.chunks[item.storage_index.index or 0],
            Box(tuple(item.storage_offsets), tuple(item.lengths)),
            Box(tuple(item.dest_offsets), tuple(item.lengths)),
        )
        for item in create_read_items_for_chunk_list("", saved, [chunk(box)])
    ]
