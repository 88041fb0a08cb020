"""Checkpoints in other programs' formats: torch files, and weights as Hugging Face keeps them.

What is exported is complete or not there, and takes a bounded amount of memory.
"""

from __future__ import annotations

import io
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.file_layout import HF_INDEX, WEIGHTS, hf_index
from shardstep.checkpoint.format import Contents, Tree
from shardstep.checkpoint.offline.dicts import (
    model_dict,
    optimizer_dict,
    saved_model,
    saved_optimizer,
)
from shardstep.checkpoint.offline.scratch import Scratch
from shardstep.checkpoint.read import Checkpoint
from shardstep.checkpoint.safetensors import (
    CHUNK_NBYTES,
    Progress,
    Source,
    Stages,
    Streamed,
    form_of,
    no_stages,
    write,
)
from shardstep.checkpoint.staging import EXPORT, Staging, write_text
from shardstep.state.tree import decode

if TYPE_CHECKING:
    from typing_extensions import Buffer

Form = Literal["torch", "torch-named", "safetensors"]
Part = Literal["all", "model", "optimizer"]

MAX_SHARD_NBYTES = 5 * 10**9


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: Form = "torch",
    *,
    part: Part = "all",
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    verify: bool = True,
    stages: Stages = no_stages,
) -> Path:
    """Write what is in a checkpoint in another format.

    Called in one process. The memory it takes is that of the largest tensor at most. For torch
    files, a temporary file of the size of all tensors lies beside `out` meanwhile.

    Args:
        path: the checkpoint.
        out: what to make, a file for torch's formats and a folder for `"safetensors"`; there must
            be nothing yet.
        to: `"torch"` for a file that `torch.load(..., weights_only=True)` reads, with the plain
            `torch.optim` state dict; `"torch-named"` for one whose optimizer state is keyed by
            parameter names, as in the full state dicts of `torch.distributed.checkpoint`;
            `"safetensors"` for the model's weights alone, in the files that Hugging Face's
            libraries read.
        part: for torch's formats: `"all"` for a dict of what there is of `"model"`, `"optimizer"`
            and `"extra"`; `"model"` or `"optimizer"` for that state dict itself.
        max_shard_nbytes: for `"safetensors"`: how large a file may grow before another is begun.
        verify: whether every file is compared with its digest first.
        stages: told what is done.

    Returns:
        `out`.

    Raises:
        CheckpointError: if the checkpoint is damaged, lacks what was asked for, or has what the
            format cannot hold.
        FileExistsError: if there is something at `out`.
        OSError: if it cannot be written there.
    """
    if to not in get_args(Form) or part not in get_args(Part):
        raise ValueError(f"there is no export of part {part!r} to {to!r}")
    goal = Path(out).absolute()
    with Checkpoint(Path(path)) as checkpoint:
        # Before anything is read or made: what was asked for has to be there.
        if to == "safetensors":
            if part == "optimizer":
                raise ValueError("safetensors has the model's weights; export to torch instead")
            _check_dtypes(checkpoint)
        elif part == "model":
            saved_model(checkpoint)
        elif part == "optimizer" or checkpoint.contents.optimizer is not None:
            saved_optimizer(checkpoint, named=to == "torch-named")
        if to != "safetensors":
            _check_values(checkpoint, part)
        if verify:
            total = sum(digest.nbytes for digest in checkpoint.manifest.files.values())
            checkpoint.verify(progress=stages("checking", total))
    staging = Staging(goal)
    try:
        if to == "safetensors":
            with Checkpoint(Path(path)) as checkpoint:
                _write_weights(checkpoint, staging.path, max_shard_nbytes, stages)
            staging.publish()
        else:
            _write_torch(Path(path), staging.path, part, to == "torch-named", stages)
            staging.publish(EXPORT)
    finally:
        staging.discard()
    return goal


# ------------------------------------------------------------------------------------- torch


def _check_values(checkpoint: Checkpoint, part: Part) -> None:
    """Make sure that `torch.load(..., weights_only=True)` will take everything that is written."""
    for what, tree in _trees(_only(checkpoint.contents, part)):
        value = decode(tree.node, lambda leaf: torch.empty(0), wrap=lambda *described: None)
        place = _place_of_deque(value)
        if place is not None:
            raise CheckpointError(
                f"{checkpoint.path}: {what} has a deque{place and f' at {place!r}'}, which "
                "torch.load(..., weights_only=True) does not read; export the other parts alone, "
                "or take it out of checkpoint.load() or checkpoint.state_dict()"
            )


def _trees(contents: Contents) -> Iterator[tuple[str, Tree]]:
    """All values, each with a name to speak of it by."""
    if contents.optimizer is not None:
        for param in contents.optimizer.params:
            if param.state is not None:
                yield f"the state of parameter {param.name!r}", param.state
        for number, (_, options) in enumerate(contents.optimizer.groups):
            yield f"group {number}", options
        yield "the optimizer's state", contents.optimizer.loose
        yield "what the optimizer keeps beside its state", contents.optimizer.beside
    if contents.model is not None:
        yield "the model", contents.model.rest
    if contents.extra is not None:
        yield "extra", contents.extra


def _place_of_deque(value: Any, path: str = "") -> str | None:
    """How to get to the first deque in a value; None if there is none."""
    if isinstance(value, deque):
        return path
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    inner = (_place_of_deque(item, f"{path}.{key}" if path else str(key)) for key, item in items)
    return next((place for place in inner if place is not None), None)


def _write_torch(path: Path, folder: Path, part: Part, named: bool, stages: Stages) -> None:
    """Write the file for torch into a folder."""
    with Checkpoint(path) as plain:
        sizes = [stored.nbytes for _, stored in _only(plain.contents, part).tensors()]
    scratch = Scratch(folder, sum(sizes), len(sizes))
    reading = stages("reading", sum(sizes))

    def room(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = scratch.room(shape, stride, dtype)
        reading(tensor.nbytes)
        return tensor

    with Checkpoint(path, room) as checkpoint:
        value = _value(checkpoint, part, named)
    scratch.rest()
    with _Sink(folder / EXPORT, scratch.rest, stages("writing", sum(sizes))) as file:
        torch.save(value, file)
        os.fsync(file.fileno())


def _only(contents: Contents, part: Part) -> Contents:
    if part == "model":
        return Contents(model=contents.model)
    if part == "optimizer":
        return Contents(optimizer=contents.optimizer)
    return contents


def _value(checkpoint: Checkpoint, part: Part, named: bool) -> Any:
    if part == "model":
        return model_dict(checkpoint)
    if part == "optimizer":
        return optimizer_dict(checkpoint, named=named)
    contents = checkpoint.contents
    value: dict[str, Any] = {}
    if contents.model is not None:
        value["model"] = model_dict(checkpoint)
    if contents.optimizer is not None:
        value["optimizer"] = optimizer_dict(checkpoint, named=named)
    if contents.extra is not None:
        value["extra"] = checkpoint.value(contents.extra)
    return value


class _Sink(io.FileIO):
    """A new file for torch to write to, which lets go of memory as it goes.

    Args:
        path: where to.
        rest: called after every chunk.
        progress: told of every chunk.
    """

    def __init__(self, path: Path, rest: Callable[[], None], progress: Progress) -> None:
        super().__init__(path, "xb")
        self._rest = rest
        self._progress = progress

    def write(self, data: Buffer) -> int:
        """Write all of it."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            written = super().write(view[done : done + CHUNK_NBYTES])
            done += written
            # What torch writes around the tensors is not worth a word.
            if len(view) > 4096:
                self._rest()
                self._progress(written)
        return len(view)


# ------------------------------------------------------------------------------- safetensors


def _check_dtypes(checkpoint: Checkpoint) -> None:
    for name, stored in saved_model(checkpoint).tensors.items():
        if form_of(stored.dtype, stored.shape) != (stored.dtype, stored.shape):
            raise CheckpointError(
                f"{checkpoint.path}: model tensor {name!r} is {stored.dtype}, which safetensors "
                "has no name for; export to torch instead"
            )


def _write_weights(
    checkpoint: Checkpoint, folder: Path, max_shard_nbytes: int, stages: Stages
) -> None:
    """Write the model's tensors, in as many files as it takes."""
    saved = saved_model(checkpoint)

    def source(name: str) -> Source:
        stored = saved.tensors[name]
        return Streamed(
            stored.dtype, stored.shape, lambda box, target: checkpoint.read(stored, box, target)
        )

    shards: list[dict[str, Source]] = [{}]
    nbytes = 0
    for name, stored in saved.tensors.items():
        if shards[-1] and nbytes + stored.nbytes > max_shard_nbytes:
            shards.append({})
            nbytes = 0
        shards[-1][name] = source(name)
        nbytes += stored.nbytes
    # A tensor with several names is in the file once. That is how their loaders expect it, and the
    # further names are where their own writer would put them.
    metadata = {**saved.aliases, "format": "pt"}
    total = sum(stored.nbytes for stored in saved.tensors.values())
    progress = stages("writing", total)
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        write(folder / file, shard, metadata, progress)
        file_of |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        write_text(folder / HF_INDEX, hf_index(file_of, total))


def parse_nbytes(text: str) -> int:
    """A number of bytes such as `5GB`, `500MB` or `2GiB`.

    Raises:
        ValueError: if it is none.

    Example:
        >>> parse_nbytes("5GB"), parse_nbytes("2 KiB")
        (5000000000, 2048)
    """
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
    number = text.strip().rstrip("BIKMGTbikmgt ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        nbytes = float(number) * units[unit]
    except (ValueError, KeyError):
        nbytes = 0
    if not 1 <= nbytes < math.inf:
        raise ValueError(f"{text!r} is not a number of bytes such as 5GB")
    return int(nbytes)
