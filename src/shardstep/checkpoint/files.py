"""Single files of a checkpoint: opened safely, digested, parsed as JSON, written durably."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

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
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from error
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
        require(nbytes <= MAX_JSON_NBYTES, f"{path}: is too large to be what it should be")
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
