"""The files of a checkpoint: opened safely, digested, parsed as JSON, written durably.

`checkpoint.json` is the manifest: the list of files with their digests, and its own digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from shardstep.state.tree import MAX_NUMEL

FORMAT = "shardstep checkpoint"
VERSION = 1
MANIFEST = "checkpoint.json"
MAX_TIME = 2**62
"""In nanoseconds: the year 2116."""

FILE_NAME = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*\.(?:safetensors|json)")
"""File names are used as they are, so none may lead out of the folder."""

MAX_JSON_NBYTES = 128 * 2**20

Progress = Callable[[int], None]
"""Called with the number of bytes that were just read or written."""

Stages = Callable[[str, int], Progress]
"""Called with the name and the bytes of a stage that begins; returns its `Progress`."""


def no_progress(nbytes: int) -> None:
    """Ignore progress."""


def no_stages(name: str, nbytes: int) -> Progress:
    """Ignore stages."""
    return no_progress


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, of another kind, or does not fit. Names the file."""


def require(holds: bool, problem: str) -> None:
    """Raise `CheckpointError` with this message unless the condition holds."""
    if not holds:
        raise CheckpointError(problem)


@dataclass(frozen=True, slots=True)
class Digest:
    """Length and SHA-256 of a file."""

    nbytes: int
    sha256: str


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the file's name to an `OSError` that has none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def open_plain(path: Path) -> FileIO:
    """Open a regular file for reading: no link, pipe or device."""
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is not a plain file")
    return os.fdopen(descriptor, "rb", buffering=0)


def digest_of(path: Path, progress: Progress = no_progress) -> Digest:
    """Read a whole file and return its digest."""
    digest = hashlib.sha256()
    nbytes = 0
    buffer = memoryview(bytearray(4 * 2**20))
    with open_plain(path) as file, reading(path):
        while got := file.readinto(buffer):
            digest.update(buffer[:got])
            nbytes += got
            progress(got)
    return Digest(nbytes, digest.hexdigest())


def check_file(file: Path, expected: Digest, progress: Progress = no_progress) -> None:
    """Raise `CheckpointError` if a file is missing, of another length, or changed."""
    nbytes = length_of(file)
    require(nbytes is not None, f"{file}: is missing")
    require(
        nbytes == expected.nbytes,
        f"{file}: is {nbytes} bytes long, not {expected.nbytes}; it was cut short or replaced",
    )
    intact = digest_of(file, progress) == expected
    require(intact, f"{file}: does not match its digest; it was changed or damaged")


def length_of(file: Path) -> int | None:
    """Return the length in bytes of a plain file; None if there is none."""
    found = status_of(file)
    return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of a file or folder; None if there is none. A lack of permission raises."""
    with reading(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.lstat(path)
    return None


def read_json(path: Path) -> Any:
    """Parse a JSON file of bounded size."""
    with open_plain(path) as file, reading(path):
        nbytes = os.fstat(file.fileno()).st_size
        limit = MAX_JSON_NBYTES
        require(nbytes <= limit, f"{path}: has {nbytes:,} bytes; at most {limit:,} are read")
        return parse_json(file.readall(), path)


def parse_json(text: bytes, path: Path) -> Any:
    """Parse JSON that came from `path`."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); it is damaged") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict. Readers disagree on which of two equal keys counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object repeats a key")
    return found


def write_text(path: Path, text: str) -> Digest:
    """Write a new file and flush it to disk."""
    data = text.encode()
    with writing(path), open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Digest(len(data), hashlib.sha256(data).hexdigest())


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        require(not inside, f"{path} is a folder of checkpoints; name one of them: {listed}")
        raise CheckpointError(
            f"{path} has no {MANIFEST}: it is not a checkpoint, or one that was never completed"
        )
    data = read_json(file)
    known = isinstance(data, dict) and data.get("format") == FORMAT
    require(known, f"{file}: does not say that this is a {FORMAT}")
    version = data.get("version")
    require(
        type(version) is int and version == VERSION,
        f"{file}: was written in version {version!r} of the format, and this library reads version "
        f"{VERSION}; use the library that wrote it",
    )
    try:
        digest = data.pop("digest")
        intact = digest == _digest(data)
    except (KeyError, RecursionError) as error:
        raise CheckpointError(f"{file}: has no digest; it was changed or damaged") from error
    require(intact, f"{file}: does not match its own digest; it was changed or damaged")
    listed, when, run = data.get("files"), data.get("saved_at"), data.get("run", "")
    complete = isinstance(listed, dict) and type(when) is int and 0 <= when <= MAX_TIME
    complete = complete and isinstance(run, str)
    require(complete, f"{file}: does not say which files there are, or when it was saved")
    files = {name: _read_digest(file, name, each) for name, each in listed.items()}
    return Manifest(when, run, files, digest)


def _read_digest(file: Path, name: str, data: Any) -> Digest:
    valid = FILE_NAME.fullmatch(name) is not None and name != MANIFEST
    require(valid, f"{file}: {name!r} is not a name of a checkpoint's file")
    entry: Any = data if isinstance(data, dict) else {}
    nbytes, sha256 = entry.get("nbytes"), entry.get("sha256")
    valid = type(nbytes) is int and 0 <= nbytes <= MAX_NUMEL and isinstance(sha256, str)
    require(valid, f"{file}: lacks the length or the digest of {name!r}")
    return Digest(nbytes, sha256)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
