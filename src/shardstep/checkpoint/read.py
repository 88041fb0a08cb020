"""A checkpoint that is open for reading: any box of any tensor, from the chunks that hold it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.files import (
    CheckpointError,
    Manifest,
    Progress,
    check_file,
    no_progress,
    read_manifest,
    require,
)
from shardstep.checkpoint.format import Contents, Stored, Tree, read_contents
from shardstep.checkpoint.safetensors import File
from shardstep.plan import Box, contiguous
from shardstep.state.tree import Leaf, decode, memory_nbytes, wrap

MAX_OPEN = 128
"""Files open at a time: a process may open a thousand, and a checkpoint may have more."""

WRAPPING_PACKAGES = ("torchao",)
"""Packages whose tensor subclasses, such as quantised state, a file may name, if imported."""

Allocate = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]
"""Returns a dense CPU tensor of this shape, stride and dtype, with any values."""


def _on_cpu(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu")


class Checkpoint:
    """A checkpoint that is open for reading, in one process.

    Files with tensors are checked by `verify`, and when they are read.
    """

    def __init__(self, path: Path, allocate: Allocate = _on_cpu) -> None:
        self.path = path
        self._allocate = allocate
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
        """Compare these files, or all, with their digests."""
        for name in sorted(self.manifest.files) if names is None else names:
            check_file(self.path / name, self.manifest.files[name], progress)

    def check_chunks(self, tensors: Iterable[tuple[str, Stored]]) -> None:
        """Compare the headers of files with tensors, given with descriptions."""
        for what, stored in tensors:
            for chunk in stored.chunks:
                self._file(chunk.file).check(chunk.key, stored.dtype, chunk.box.sizes, what)

    def read_box(self, stored: Stored, box: Box, target: torch.Tensor) -> None:
        """Copy a box of a tensor to `target`, of the box's shape and any dtype and device."""
        for chunk in stored.chunks:
            common = chunk.box.intersect(box)
            if common is not None:
                into, there = target[common.within(box).slices], common.within(chunk.box)
                self._file(chunk.file).read(chunk.key, stored.dtype, chunk.box.sizes, there, into)

    def read_tensor(self, stored: Stored, stride: Sequence[int] | None = None) -> torch.Tensor:
        """Read all of a tensor to the CPU. It is contiguous unless `stride` is given."""
        # Nothing is allocated before the files are known to hold the tensor.
        self.check_chunks([("a tensor", stored)])
        stride = contiguous(stored.shape) if stride is None else stride
        try:
            if stored.nbytes > memory_nbytes():
                raise MemoryError
            tensor = self._allocate(stored.shape, stride, stored.dtype)
        except (MemoryError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: there is no memory for a tensor of {stored.nbytes:,} bytes"
            ) from error
        self.read_box(stored, Box.whole(stored.shape), tensor)
        return tensor

    def read_leaf(self, tree: Tree, number: int, leaf: Leaf) -> torch.Tensor:
        """Read one tensor of a value to the CPU."""
        if number not in tree.stored:
            return leaf.empty(torch.device("cpu"))
        return self.read_tensor(tree.stored[number], leaf.stride)

    def read_value(
        self, tree: Tree, read_leaf: Callable[[int, Leaf], torch.Tensor] | None = None
    ) -> Any:
        """Read a nested value, its tensors with `read_leaf(number, leaf)` or to the CPU."""
        numbers = count()
        read = partial(self.read_leaf, tree) if read_leaf is None else read_leaf
        return decode(tree.node, lambda leaf: read(next(numbers), leaf), wrap=self._wrap)

    def _wrap(self, kind: str, inner: Any, context: Any, shape: Any, stride: Any) -> Any:
        """Construct a tensor subclass. A file may name only classes that are known to be safe."""
        require(
            re.split("[:.]", kind)[0] in WRAPPING_PACKAGES,
            f"{self.path}: it has a tensor of class {kind!r:.100}, which is not made from a file; "
            f"classes of {', '.join(WRAPPING_PACKAGES)} are",
        )
        try:
            # Sharded parts are on their parameter's device already. The others follow.
            away = [part.device for part in inner.values() if part.device.type != "cpu"]
            inner = {name: part.to(away[0]) if away else part for name, part in inner.items()}
            return wrap(kind, inner, context, shape, stride)
        except Exception as error:
            raise CheckpointError(
                f"{self.path}: a tensor of class {kind!r:.100} cannot be made of what is there "
                f"({type(error).__name__}: {error})"
            ) from error

    def _file(self, name: str) -> File:
        if name not in self._files:
            if len(self._files) >= MAX_OPEN:
                self.__exit__()
            self._files[name] = self._open.enter_context(File(self.path / name))
        return self._files[name]
