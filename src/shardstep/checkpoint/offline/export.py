"""Write checkpoints in other programs' formats: torch files, and Hugging Face's weights.

An export is atomic and takes bounded memory.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.utils import _pytree as pytree

from shardstep.checkpoint.files import CheckpointError, Progress, Stages, no_stages, write_text
from shardstep.checkpoint.format import Contents
from shardstep.checkpoint.read import (
    Checkpoint,
    model_dict,
    optimizer_dict,
    saved_model,
    saved_optimizer,
)
from shardstep.checkpoint.safetensors import CHUNK_NBYTES, Source, has_name, write
from shardstep.checkpoint.staging import EXPORT, Staging, ctrl_c_held_back
from shardstep.checkpoint.write import HF_INDEX, WEIGHTS, hf_index
from shardstep.state.tree import decode

if TYPE_CHECKING:
    from typing_extensions import Buffer

Form = Literal["torch", "torch-named", "safetensors"]
Part = Literal["all", "model", "optimizer"]

MAX_SHARD_NBYTES = 5 * 10**9
ALIGNMENT_NBYTES = 64


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
    """Write a checkpoint in another format.

    Called in one process. It takes at most the memory of the largest tensor. A torch file also
    takes a temporary file of the size of all tensors, in the folder of `out`.

    Args:
        path: the checkpoint.
        out: the file to make, or for `"safetensors"` the folder; it must not exist.
        to: the format:

            - `"torch"`: a file for `torch.load(..., weights_only=True)`, with the plain
              `torch.optim` state dict.
            - `"torch-named"`: the same with optimizer state under parameter names, as in full
              state dicts of `torch.distributed.checkpoint`.
            - `"safetensors"`: only the model's weights, in files for Hugging Face's libraries.
        part: for a torch file: `"all"` for a dict of `"model"`, `"optimizer"` and `"extra"`, as
            far as they were saved; `"model"` or `"optimizer"` for that state dict itself.
        max_shard_nbytes: for `"safetensors"`: the size at which the next file begins.
        verify: whether to compare every file with its digest first.
        stages: receives progress.

    Returns:
        `out`.

    Raises:
        CheckpointError: if the checkpoint is damaged, lacks the part, or holds a value that the
            format cannot hold.
        FileExistsError: if `out` exists.
        OSError: if it cannot be written.
    """
    if to not in get_args(Form) or part not in get_args(Part):
        raise ValueError(f"there is no export of part {part!r} to {to!r}")
    if to == "safetensors" and part == "optimizer":
        raise ValueError("safetensors has the model's weights; export to torch instead")
    named = to == "torch-named"
    with Checkpoint(Path(path)) as checkpoint:
        if to == "safetensors":
            _check_dtypes(checkpoint)
        else:
            _check_torch(checkpoint, part, named)
        if verify:
            checkpoint.verify(stages=stages)
        goal = Path(out).absolute()
        staging = Staging(goal)
        try:
            staging.create()
            if to == "safetensors":
                _write_weights(checkpoint, staging.path, max_shard_nbytes, stages)
                staging.publish()
            else:
                _write_torch(checkpoint, staging.path, part, named, stages)
                staging.publish(EXPORT)
        finally:
            staging.discard()
    return goal


# ------------------------------------------------------------------------------------- torch


def _check_torch(checkpoint: Checkpoint, part: Part, named: bool) -> None:
    """Raise if a part is missing, or if `torch.load(..., weights_only=True)` would refuse it."""
    if part == "model":
        saved_model(checkpoint)
    elif part == "optimizer" or checkpoint.contents.optimizer is not None:
        saved_optimizer(checkpoint, named=named)
    for kind, owner, tree in _only(checkpoint.contents, part).trees():
        value = decode(tree.node, lambda leaf: torch.empty(0), wrap=lambda *described: None)
        for place, leaf in pytree.tree_leaves_with_path(value, lambda v: isinstance(v, deque)):
            if isinstance(leaf, deque):
                raise CheckpointError(
                    f"{checkpoint.path}: {kind}{owner} has a deque"
                    f"{place and f' at {pytree.keystr(place)}'}, which torch.load(..., "
                    "weights_only=True) does not read; export the other parts alone, or take it "
                    "out of checkpoint.load() or checkpoint.state_dict()"
                )


def _only(contents: Contents, part: Part) -> Contents:
    return contents if part == "all" else Contents(**{part: getattr(contents, part)})


def _write_torch(opened: Checkpoint, folder: Path, part: Part, named: bool, stages: Stages) -> None:
    contents = _only(opened.contents, part)
    sizes = [stored.nbytes for _, stored in contents.tensors()]
    mapped = _MappedFile(folder, sum(sizes), len(sizes), stages("reading", sum(sizes)))
    value: dict[str, Any] = {}
    with Checkpoint(opened.path, mapped.allocate) as checkpoint:
        if contents.model is not None:
            value["model"] = model_dict(checkpoint)
        if contents.optimizer is not None:
            value["optimizer"] = optimizer_dict(checkpoint, named=named)
        if contents.extra is not None:
            value["extra"] = checkpoint.read_value(contents.extra)
    mapped.release()
    # Within torch's own code, Ctrl-C could end the process with a crash.
    with (
        ctrl_c_held_back() as heed,
        _Sink(folder / EXPORT, mapped.release, stages("writing", sum(sizes)), heed) as file,
    ):
        try:
            torch.save(value if part == "all" else value[part], file)
        except RuntimeError as error:
            # After Ctrl-C or on a full disk, torch fails once more as it ends the file.
            raise file.error or error from None
        os.fsync(file.fileno())


class _MappedFile:
    """Memory for tensors in an unnamed file, which the system can take back at any time.

    `torch.save` needs all tensors at once, however large they are.
    """

    def __init__(self, folder: Path, nbytes: int, num_tensors: int, progress: Progress) -> None:
        self._used = 0
        self._progress = progress
        total = nbytes + (num_tensors + 1) * ALIGNMENT_NBYTES
        with tempfile.TemporaryFile(dir=folder) as file:
            # All of it now: a full disk is an error here, but kills the process later.
            os.posix_fallocate(file.fileno(), 0, total)
            self._map = mmap.mmap(file.fileno(), total)

    def allocate(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a dense tensor of this form, with its own storage."""
        self.release()  # the tensor before this one
        numel = math.prod(shape)
        if not numel:
            return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=self._used)
        self._used += math.ceil(flat.nbytes / ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        self._progress(flat.nbytes)
        return flat.as_strided(tuple(shape), tuple(stride))

    def release(self) -> None:
        """Give the memory back to the system; the file keeps the values."""
        self._map.madvise(mmap.MADV_DONTNEED)


class _Sink(io.FileIO):
    """A new file for `torch.save`.

    It calls `heed_ctrl_c` before every chunk, and `release` after every chunk of a tensor.

    Attributes:
        error: the first error of a write.
    """

    def __init__(
        self,
        path: Path,
        release: Callable[[], None],
        progress: Progress,
        heed_ctrl_c: Callable[[], None],
    ) -> None:
        super().__init__(path, "xb")
        self._release = release
        self._progress = progress
        self._heed_ctrl_c = heed_ctrl_c
        self.error: BaseException | None = None

    def write(self, data: Buffer) -> int:
        try:
            return self._write(memoryview(data).cast("B"))
        except BaseException as error:
            self.error = self.error or error
            raise

    def _write(self, view: memoryview) -> int:
        done = 0
        while done < len(view):
            self._heed_ctrl_c()
            written = super().write(view[done : done + CHUNK_NBYTES])
            done += written
            if len(view) > 4096:  # a tensor, not bytes between tensors
                self._release()
                self._progress(written)
        return len(view)


# ------------------------------------------------------------------------------- safetensors


def _check_dtypes(checkpoint: Checkpoint) -> None:
    for name, stored in saved_model(checkpoint).tensors.items():
        if not has_name(stored.dtype):
            raise CheckpointError(
                f"{checkpoint.path}: model tensor {name!r} is {stored.dtype}, which safetensors "
                "has no name for; export to torch instead"
            )


def _write_weights(
    checkpoint: Checkpoint, folder: Path, max_shard_nbytes: int, stages: Stages
) -> None:
    """Write the model's tensors, in as many files as it takes."""
    saved = saved_model(checkpoint)

    shards: list[dict[str, Source]] = [{}]
    nbytes = 0
    for name, stored in saved.tensors.items():
        if shards[-1] and nbytes + stored.nbytes > max_shard_nbytes:
            shards.append({})
            nbytes = 0
        shards[-1][name] = checkpoint.stream(stored)
        nbytes += stored.nbytes
    # Hugging Face's loaders expect a tensor once, and its further names in the metadata.
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
