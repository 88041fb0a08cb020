"""Share steps among offline commands: verify files, place tensors, write from one process."""

from __future__ import annotations

import os
from pathlib import Path

from shardstep.checkpoint.file_layout import FileLayout, texts_of
from shardstep.checkpoint.format import Contents, Stored
from shardstep.checkpoint.read import Checkpoint
from shardstep.checkpoint.safetensors import Source, Stages
from shardstep.checkpoint.write import Job, write_out
from shardstep.comm import SoloComm
from shardstep.plan import Box


def verify_files(checkpoint: Checkpoint, stages: Stages) -> int:
    """Compare every file with its digest, and return their bytes.

    Raises:
        CheckpointError: naming the first file that differs.
    """
    nbytes = sum(digest.nbytes for digest in checkpoint.manifest.files.values())
    checkpoint.verify(progress=stages("checking", nbytes))
    return nbytes


def put_whole(files: FileLayout, kind: str, group_rank: int, key: str, tensor: Source) -> Stored:
    """Place a tensor in one chunk."""
    chunk = files.put(kind, group_rank, key, Box.whole(tensor.shape), tensor)
    return Stored(tensor.dtype, tuple(tensor.shape), (chunk,))


def write_alone(
    path: str | os.PathLike[str], files: FileLayout, contents: Contents, stages: Stages
) -> Path:
    """Write the files of all ranks from one process, and return the checkpoint."""
    job = Job(Path(path).absolute(), files.own, texts_of(contents), keep=None)
    total = sum(stored.nbytes for _, stored in contents.tensors())
    return write_out(SoloComm(), job, stages("writing", total))
