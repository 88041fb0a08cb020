"""`checkpoint.json`: the list of a checkpoint's files with their digests, and its own digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardstep.checkpoint.files import (
    CheckpointError,
    Digest,
    read_json,
    require,
    status_of,
    write_text,
)
from shardstep.state.tree import MAX_NUMEL

FORMAT = "shardstep checkpoint"
VERSION = 1
MANIFEST = "checkpoint.json"
MAX_TIME = 2**62
"""In nanoseconds: the year 2116."""

FILE_NAME = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*\.(?:safetensors|json)")
"""File names are used as they are, so none may lead out of the folder."""


_run: tuple[int, str] = (0, "")  # process id and run: a forked process is another run


def run_id() -> str:
    """Return the id of the run that this process belongs to."""
    if _run[0] != os.getpid():
        continue_run(uuid.uuid4().hex)
    return _run[1]


def continue_run(run: str) -> None:
    """Let this process continue the run with this id, whose checkpoints it may then remove."""
    global _run
    _run = os.getpid(), run


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of one checkpoint by name. `digest` covers the rest and identifies it."""

    saved_at: int  # nanoseconds since 1970, increasing in a folder
    run: str  # the id of the run that wrote it; empty if it was written before 0.2.0
    files: dict[str, Digest]
    digest: str

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(digest.nbytes for digest in self.files.values())


def write_manifest(folder: Path, saved_at: int, files: Mapping[str, Digest]) -> None:
    """List `files` in the folder's manifest."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "saved_at": min(saved_at, MAX_TIME),
        "run": run_id(),
        "files": {name: asdict(digest) for name, digest in sorted(files.items())},
    }
    write_text(folder / MANIFEST, json.dumps(manifest | {"digest": _digest(manifest)}))


def require_folder(path: Path) -> None:
    """Raise if there is nothing at `path`, or a file."""
    require(os.path.lexists(path), f"{path} does not exist")
    require(path.is_dir(), f"{path} is not a folder; a checkpoint is one")


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the checkpoint at `path`."""
    file = path / MANIFEST
    if status_of(file) is None:
        require_folder(path)
        inside = sorted(each.parent.name for each in path.glob(f"*/{MANIFEST}"))
        listed = f"{', '.join(inside[-5:])}{' and others' if len(inside) > 5 else ''}"
        require(not inside, f"{path} is a folder of checkpoints: name one of them, {listed}")
        raise CheckpointError(
            f"{path} has no {MANIFEST}: it is not a checkpoint, or one that was never completed"
        )
    said = read_json(file)
    known = isinstance(said, dict) and said.get("format") == FORMAT
    require(known, f"{file}: does not say that this is a {FORMAT}")
    version = said.get("version")
    require(
        type(version) is int and version == VERSION,
        f"{file}: was written in version {version!r} of the format, and this library reads version "
        f"{VERSION}; use the library that wrote it",
    )
    try:
        digest = said.pop("digest")
        intact = digest == _digest(said)
    except (KeyError, RecursionError) as error:
        raise CheckpointError(f"{file}: has no digest that it could match") from error
    require(intact, f"{file}: does not match its own digest; it was changed or damaged")
    listed, when, run = said.get("files"), said.get("saved_at"), said.get("run", "")
    complete = isinstance(listed, dict) and type(when) is int and 0 <= when <= MAX_TIME
    complete = complete and isinstance(run, str)
    require(complete, f"{file}: does not say which files there are, or when it was saved")
    files = {name: _read_digest(file, name, each) for name, each in listed.items()}
    return Manifest(when, run, files, digest)


def _read_digest(file: Path, name: str, said: Any) -> Digest:
    valid = FILE_NAME.fullmatch(name) is not None and name != MANIFEST
    require(valid, f"{file}: {name!r} is not a name of a checkpoint's file")
    entry: Any = said if isinstance(said, dict) else {}
    nbytes, sha256 = entry.get("nbytes"), entry.get("sha256")
    valid = type(nbytes) is int and 0 <= nbytes <= MAX_NUMEL and isinstance(sha256, str)
    require(valid, f"{file}: does not say how long {name!r} is, or what is in it")
    return Digest(nbytes, sha256)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
