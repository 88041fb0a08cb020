"""Steps that offline commands share: verify all files, write those of all ranks."""

from __future__ import annotations

import os
from pathlib import Path

from shardstep.checkpoint.file_layout import FileLayout, json_files
from shardstep.checkpoint.files import Stages
from shardstep.checkpoint.format import Contents
from shardstep.checkpoint.read import Checkpoint
from shardstep.checkpoint.write import SaveJob, write_checkpoint
from shardstep.comm import SoloComm


def verify_files(checkpoint: Checkpoint, stages: Stages) -> int:
    """Compare every file with its digest, and return their bytes."""
    nbytes = checkpoint.manifest.nbytes
    checkpoint.verify(progress=stages("checking", nbytes))
    return nbytes


def write_alone(
    path: str | os.PathLike[str], files: FileLayout, contents: Contents, stages: Stages
) -> Path:
    """Write the files of all ranks from one process, and return the checkpoint."""
    job = SaveJob(Path(path).absolute(), files.own_files, json_files(contents), keep_last=None)
    total = sum(stored.nbytes for _, stored in contents.tensors())
    return write_checkpoint(SoloComm(), job, stages("writing", total))
