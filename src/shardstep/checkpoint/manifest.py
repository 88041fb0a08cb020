"""`checkpoint.json`: the list of a checkpoint's files with their digests, and its own digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.files import Digest, read_json, write_text
from shardstep.state.limits import MAX_NUMEL

FORMAT = "shardstep checkpoint"
VERSION = 1
MANIFEST = "checkpoint.json"
MAX_TIME = 2**62
"""In nanoseconds: the year 2116."""

FILE_NAME = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*\.(?:safetensors|json)")
"""File names are used as they are, so none may lead out of the folder."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of one checkpoint.

    Attributes:
        saved_at: nanoseconds since 1970, greater than that of every older checkpoint in the folder.
        files: digests by file name.
        digest: SHA-256 of the rest, which identifies the checkpoint.
    """

    saved_at: int
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
        "files": {
            name: {"nbytes": digest.nbytes, "sha256": digest.sha256}
            for name, digest in sorted(files.items())
        },
    }
    write_text(folder / MANIFEST, json.dumps(manifest | {"digest": _digest(manifest)}))


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the checkpoint at `path`.

    Raises:
        CheckpointError: if there is none, or it is damaged or of another format.
    """
    file = path / MANIFEST
    if not os.path.isdir(path):
        raise CheckpointError(f"{path} is not a folder; a checkpoint is one")
    if not os.path.lexists(file):
        raise CheckpointError(
            f"{path} has no {MANIFEST}: it is not a checkpoint, or one that was never completed"
        )
    said = read_json(file)
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise CheckpointError(f"{file}: does not say that this is a {FORMAT}")
    if type(said.get("version")) is not int or said["version"] != VERSION:
        raise CheckpointError(
            f"{file}: was written in version {said.get('version')!r} of the format, and this "
            f"library reads version {VERSION}; use the library that wrote it"
        )
    try:
        digest = said.pop("digest")
        intact = digest == _digest(said)
    except (KeyError, RecursionError) as error:
        raise CheckpointError(f"{file}: has no digest that it could match") from error
    if not intact:
        raise CheckpointError(f"{file}: does not match its own digest; it was changed or damaged")
    listed, when = said.get("files"), said.get("saved_at")
    if not isinstance(listed, dict) or type(when) is not int or not 0 <= when <= MAX_TIME:
        raise CheckpointError(f"{file}: does not say which files there are, or when it was saved")
    files = {name: _read_digest(file, name, each) for name, each in listed.items()}
    return Manifest(when, files, digest)


def _read_digest(file: Path, name: str, said: Any) -> Digest:
    if not FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise CheckpointError(f"{file}: {name!r} is not a name of a checkpoint's file")
    entry = said if isinstance(said, dict) else {}
    nbytes, sha256 = entry.get("nbytes"), entry.get("sha256")
    if type(nbytes) is not int or not 0 <= nbytes <= MAX_NUMEL or not isinstance(sha256, str):
        raise CheckpointError(f"{file}: does not say how long {name!r} is, or what is in it")
    return Digest(nbytes, sha256)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
