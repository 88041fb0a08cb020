"""A checkpoint that is open for reading: any box of any tensor, from the chunks that hold it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.files import (
    CheckpointError,
    Manifest,
    Stages,
    check_file,
    no_stages,
    read_manifest,
    require,
)
from shardstep.checkpoint.format import (
    Contents,
    SavedModel,
    SavedOptimizer,
    Stored,
    Tree,
    read_contents,
    split_masters,
)
from shardstep.checkpoint.safetensors import File, Streamed
from shardstep.plan import Box, contiguous
from shardstep.state.tree import Form, Leaf, decode, memory_nbytes, wrap

MAX_OPEN = 128
"""Files open at a time: a process may open a thousand, and a checkpoint may have more."""

WRAPPING_PACKAGES = ("torchao",)
"""Packages whose tensor subclasses, such as quantised state, a file may name, if imported."""

Allocate = Callable[..., torch.Tensor]
"""Returns a dense CPU tensor of a shape, stride and `dtype=`, with any values."""

_ON_CPU = partial(torch.empty_strided, device="cpu")


class Checkpoint:
    """A checkpoint that is open for reading, in one process.

    Files with tensors are checked by `verify`, and when they are read.
    """

    def __init__(self, path: Path, allocate: Allocate = _ON_CPU) -> None:
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

    def verify(self, names: list[str] | None = None, stages: Stages = no_stages) -> None:
        """Compare these files, or all, with their digests."""
        names = sorted(self.manifest.files) if names is None else names
        progress = stages("checking", sum(self.manifest.files[name].nbytes for name in names))
        for name in names:
            check_file(self.path / name, self.manifest.files[name], progress)

    def check_chunks(self, tensors: Iterable[tuple[str, Stored]]) -> None:
        """Compare the headers of files with tensors, given with descriptions."""
        for what, stored in tensors:
            for chunk in stored.chunks:
                form = Form(stored.dtype, chunk.box.sizes)
                self._file(chunk.file).check(chunk.key, form, what)

    def read_box(self, stored: Stored, box: Box, target: torch.Tensor) -> None:
        """Copy a box of a tensor to `target`, of the box's shape and any dtype and device."""
        for chunk in stored.chunks:
            common = chunk.box.intersect(box)
            if common is not None:
                into, there = target[common.within(box).slices], common.within(chunk.box)
                form = Form(stored.dtype, chunk.box.sizes)
                self._file(chunk.file).read(chunk.key, form, there, into)

    def stream(self, stored: Stored, box: Box | None = None) -> Streamed:
        """Return a tensor, or a box of it, that is read when it is written elsewhere."""
        whole = box or Box.whole(stored.shape)
        return Streamed(
            stored.dtype,
            whole.sizes,
            lambda part, target: self.read_box(stored, part.out_of(whole), target),
        )

    def read_tensor(self, stored: Stored, stride: Sequence[int] | None = None) -> torch.Tensor:
        """Read all of a tensor to the CPU. It is contiguous unless `stride` is given."""
        # Nothing is allocated before the files are known to hold the tensor.
        self.check_chunks([("a tensor", stored)])
        stride = contiguous(stored.shape) if stride is None else stride
        try:
            if stored.nbytes > memory_nbytes():
                raise MemoryError
            tensor = self._allocate(stored.shape, tuple(stride), dtype=stored.dtype)
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
                f"{self.path}: a tensor of class {kind!r:.100} cannot be made of its parts "
                f"({type(error).__name__}: {error})"
            ) from error

    def _file(self, name: str) -> File:
        if name not in self._files:
            if len(self._files) >= MAX_OPEN:
                self.__exit__()
            self._files[name] = self._open.enter_context(File(self.path / name))
        return self._files[name]


def state_dict(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the optimizer of a checkpoint as a plain `torch.optim` state dict, on the CPU.

    It loads into an unsharded optimizer with the same parameters in the same groups.

    Raises:
        CheckpointError: if it is not a checkpoint, is damaged, or has no optimizer.

    Example:
        >>> import tempfile, torch, shardstep
        >>> model = torch.nn.Linear(3, 2)
        >>> opt = shardstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        >>> plain = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as run:
        ...     path = shardstep.checkpoint.save(f"{run}/step-0", opt, model)
        ...     plain.load_state_dict(state_dict(path))
        >>> plain.param_groups[0]["lr"]
        0.1
    """
    with Checkpoint(Path(path)) as checkpoint:
        return optimizer_dict(checkpoint)


def weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the model of a checkpoint as a plain state dict, on the CPU.

    Raises:
        CheckpointError: if it is not a checkpoint, is damaged, or has no model.
    """
    with Checkpoint(Path(path)) as checkpoint:
        return model_dict(checkpoint)


def verify(path: str | os.PathLike[str], *, stages: Stages = no_stages) -> tuple[int, int]:
    """Compare every file with its digest, and find every chunk of every tensor.

    Returns:
        The number of bytes and of tensors in files.

    Raises:
        CheckpointError: naming the first file that is wrong.
    """
    with Checkpoint(Path(path)) as checkpoint:
        checkpoint.verify(stages=stages)
        tensors = list(checkpoint.contents.tensors())
        checkpoint.check_chunks(tensors)
        return checkpoint.manifest.nbytes, len(tensors)


def optimizer_dict(checkpoint: Checkpoint, *, named: bool = False) -> dict[str, Any]:
    """Return the optimizer's state dict, keyed by names as in DCP, or by numbers as in torch."""
    saved = saved_optimizer(checkpoint, named=named)
    keys = [param.name if named else number for number, param in enumerate(saved.params)]
    pairs = zip(keys, saved.params, strict=True)
    state, masters = split_masters(
        {key: checkpoint.read_value(param.state) for key, param in pairs if param.state is not None}
    )
    groups, left = [], iter(keys)
    for names, options in saved.groups:
        group = {**checkpoint.read_value(options), "params": list(islice(left, len(names)))}
        if not saved.positional and not named:
            group["param_names"] = list(names)
        groups.append(group)
    found: dict[str, Any] = {
        **checkpoint.read_value(saved.extra_entries),
        "state": {**state, **checkpoint.read_value(saved.global_state)},
        "param_groups": groups,
    }
    if masters:
        found["masters"] = masters
    if saved.rounding_step:
        found["rounding_step"] = saved.rounding_step
    return found


def model_dict(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the model's state dict; several names of one tensor share it."""
    saved = saved_model(checkpoint)
    found = {name: checkpoint.read_tensor(stored) for name, stored in saved.tensors.items()}
    found |= {name: found[other] for name, other in saved.aliases.items()}
    return {**found, **checkpoint.read_value(saved.extra_state)}


def saved_optimizer(checkpoint: Checkpoint, *, named: bool = False) -> SavedOptimizer:
    """Return the optimizer, or raise if it is missing, or lacks names although `named`."""
    saved = checkpoint.contents.optimizer
    if saved is None:
        raise CheckpointError(f"{checkpoint.path}: there is no optimizer in it")
    if named and saved.positional:
        raise CheckpointError(
            f"{checkpoint.path}: its parameters have no names; save with model=, or construct the "
            "optimizer from model.named_parameters()"
        )
    return saved


def saved_model(checkpoint: Checkpoint) -> SavedModel:
    """Return the model, or raise if it is missing."""
    if checkpoint.contents.model is None:
        raise CheckpointError(f"{checkpoint.path}: there is no model in it")
    return checkpoint.contents.model
