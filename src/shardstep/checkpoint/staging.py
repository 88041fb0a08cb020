"""A checkpoint as a folder that is complete or not there.

Files are written into a hidden folder beside the path that was asked for, and one rename makes them
a checkpoint. A folder whose name begins with a dot is never taken for one. Whoever writes keeps a
lock on the hidden folder, which ends with the process however that ends: what is found unlocked was
left by a save that did not finish, and is cleared away by the next.

The file `checkpoint.json` lists all others with their lengths and digests, and has a digest itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.safetensors import (
    Digest,
    Progress,
    digest_of,
    naming,
    naming_written,
    no_progress,
    open_plain,
    parse_json,
)
from shardstep.state.limits import MAX_NUMEL

FORMAT = "shardstep checkpoint"
VERSION = 1
MANIFEST = "checkpoint.json"
MAX_JSON_NBYTES = 128 * 2**20
MAX_TIME = 2**62
"""In nanoseconds: the year 2116."""

SWEEP_SECONDS = 0.5
"""How long another save's sweep may keep its hands on a folder that was made this moment."""

EXPORT = "export.pt"
"""The name of a file for torch in the making, which is no file of a checkpoint."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*\.(?:safetensors|json)")
_LEFT_OVER = re.compile(r"\..+\.(?:saving|removing)")


class Staging:
    """A folder in the making, on the rank that makes it.

    Args:
        path: where the checkpoint is to be.

    Attributes:
        path: the hidden folder.

    Raises:
        FileExistsError: if there is something at `path` already.
        BlockingIOError: if a save to `path` is under way.
        OSError: if the folder cannot be made.
        ValueError: if `path` is called as what did not finish is.
    """

    def __init__(self, path: Path) -> None:
        self._goal = path
        if path.name.startswith(".") or not path.name:
            raise ValueError(
                f"{path} cannot be a checkpoint: folders whose names begin with a dot are taken "
                "for left-overs; save to another path, such as step-1000"
            )
        if os.path.lexists(path):
            raise FileExistsError(f"{path} exists already; save to a new path, such as step-1000")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path.parent / f".{path.name}.saving"
        self._lock: int | None = None
        deadline = time.monotonic() + SWEEP_SECONDS
        while self._lock is None:
            sweep(path.parent)
            try:
                self.path.mkdir()
            except FileExistsError:
                if time.monotonic() > deadline:
                    raise BlockingIOError(
                        f"a save to {path} is under way; wait for it, or save to another path. If "
                        f"there is none, remove {self.path}, which has other things in it than a "
                        "save leaves behind"
                    ) from None
                time.sleep(0.05)
                continue
            # Whoever sweeps at this very moment takes the folder for a left-over.
            self._lock = _lock(self.path, where_unsupported=True)

    def commit(self, files: Mapping[str, Digest]) -> None:
        """Make what was written a checkpoint.

        Args:
            files: all files that were written, by any rank.

        Raises:
            CheckpointError: if a file is not here as it was written.
        """
        for name, digest in files.items():
            try:
                nbytes = (self.path / name).stat().st_size
            except OSError as error:
                raise CheckpointError(
                    f"{self.path / name} was written by a rank but is not here: all ranks have to "
                    "save to one folder on a file system that they share"
                ) from error
            if nbytes != digest.nbytes:
                raise CheckpointError(
                    f"{self.path / name} is {nbytes:,} bytes long, not as written"
                )
        newest = max((when for when, _ in _complete(self._goal.parent)), default=0)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            # Later than every other here, even where a clock was set back.
            "saved_at": min(max(time.time_ns(), newest + 1), MAX_TIME),
            "files": {
                name: {"nbytes": digest.nbytes, "sha256": digest.sha256}
                for name, digest in sorted(files.items())
            },
        }
        write_text(self.path / MANIFEST, json.dumps(manifest | {"digest": _digest(manifest)}))
        self.publish()

    def publish(self, name: str | None = None) -> None:
        """Give the folder, or one file in it alone, the path that was asked for.

        Args:
            name: the file, if it is only one that was wanted.
        """
        sync_folder(self.path)
        if os.path.lexists(self._goal):
            raise FileExistsError(f"{self._goal} came into being while it was saved to")
        os.rename(self.path if name is None else self.path / name, self._goal)
        try:
            sync_folder(self._goal.parent)
        except OSError:
            # Whether it is on the disk is not known, and it is going to be called failed.
            os.rename(self._goal, self.path if name is None else self.path / name)
            raise
        if name is None:
            self._unlock()

    def discard(self) -> None:
        """Give up: leave nothing behind. After `commit` there is nothing to give up."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None


def _lock(folder: Path, where_unsupported: bool = False) -> int | None:
    """A descriptor that holds the lock on `folder`, if nobody else does and it is still there.

    Args:
        folder: the folder.
        where_unsupported: what to take it for if the file system knows no locks.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    except OSError as error:
        if where_unsupported and error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            return descriptor
    os.close(descriptor)
    return None


def sweep(parent: Path) -> None:
    """Clear away what saves and removals that did not finish have left in `parent`."""
    for folder in _hidden(parent):
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def left_overs(parent: Path) -> list[tuple[Path, bool]]:
    """The hidden folders of saves and removals in `parent`, each with whether one is under way."""
    found = []
    for folder in sorted(_hidden(parent)):
        with contextlib.suppress(FileNotFoundError):
            # A save that has just begun may not hold its lock yet, and must find it free.
            young = time.time() - folder.lstat().st_mtime < 2
            lock = None if young else _lock(folder)
            if lock is not None:
                os.close(lock)
            found.append((folder, lock is None))
    return found


def _hidden(parent: Path) -> Iterator[Path]:
    """The folders in `parent` that saves and removals work in."""
    for folder in map(Path, _entries(parent) or ()):
        if not _LEFT_OVER.fullmatch(folder.name) or folder.is_symlink():
            continue
        # Somebody else's folder with such a name has other things in it, or cannot be looked into.
        # One that another process is done with may be gone by now.
        within = _entries(folder)
        if within is not None and all(
            _PLAIN_NAME.fullmatch(entry.name) or entry.name == EXPORT for entry in within
        ):
            yield folder


def remove(path: Path) -> None:
    """Remove a checkpoint, in one step as far as anybody can see."""
    hidden = path.parent / f".{path.name}.removing"
    os.rename(path, hidden)
    # Another save may be sweeping the same folder; and what is left now is swept by the next.
    shutil.rmtree(hidden, ignore_errors=True)


def keep_last(parent: Path, count: int) -> list[Path]:
    """Remove all complete checkpoints in `parent` but the newest `count`; say which.

    One that cannot be removed is warned of: what has just been saved is none the worse for it.
    """
    old = [path for path in checkpoints(parent) if not path.is_symlink()][:-count]
    gone = []
    for path in old:
        try:
            remove(path)
            gone.append(path)
        except FileNotFoundError:
            continue  # another save has removed it
        except OSError as error:
            warnings.warn(f"{path} is to be removed, but cannot be: {error}", stacklevel=2)
    return gone


def checkpoints(parent: Path) -> list[Path]:
    """The complete checkpoints in `parent`, oldest first."""
    return [path for _, path in sorted(_complete(parent))]


def _complete(parent: Path) -> Iterator[tuple[int, Path]]:
    """The complete checkpoints in `parent`, and when each was saved."""
    for path in map(Path, _entries(parent) or ()):
        if path.name.startswith(".") or not os.path.isfile(path / MANIFEST):
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        if all(_length(path / name) == each.nbytes for name, each in manifest.files.items()):
            yield manifest.saved_at, path


def _entries(folder: Path) -> list[os.DirEntry[str]] | None:
    """What is in a folder; None if it is none, or not one that may be looked into."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return None


def _length(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def latest(parent: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint among the folders in `parent`; None if there is none."""
    found = checkpoints(Path(parent))
    return found[-1] if found else None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        saved_at: when, in nanoseconds since 1970; later ones beside it have greater numbers.
        files: its files, by name.
        digest: what tells it from every other.
    """

    saved_at: int
    files: dict[str, Digest]
    digest: str


def read_manifest(path: Path) -> Manifest:
    """Read the list of a checkpoint's files.

    Raises:
        CheckpointError: if there is none, or it is damaged or not of this kind.
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
    return Manifest(
        when, {name: _listed(file, name, each) for name, each in listed.items()}, digest
    )


def _listed(file: Path, name: str, said: Any) -> Digest:
    """What the list of files says of one."""
    # Names are used as they are: nothing that could lead out of the folder.
    if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
        raise CheckpointError(f"{file}: {name!r} is not a name of a checkpoint's file")
    nbytes, sha256 = (
        (said.get("nbytes"), said.get("sha256")) if isinstance(said, dict) else (None, None)
    )
    if type(nbytes) is not int or not 0 <= nbytes <= MAX_NUMEL or not isinstance(sha256, str):
        raise CheckpointError(f"{file}: does not say how long {name!r} is, or what is in it")
    return Digest(nbytes, sha256)


def check(path: Path, name: str, expected: Digest, progress: Progress = no_progress) -> None:
    """Make sure that a file of a checkpoint is as it was written.

    Raises:
        CheckpointError: if it is missing, of another length, or changed.
    """
    file = path / name
    nbytes = _length(file)
    if nbytes is None:
        raise CheckpointError(f"{file}: is missing")
    if nbytes != expected.nbytes:
        raise CheckpointError(
            f"{file}: is {nbytes:,} bytes long instead of {expected.nbytes:,}; it was cut short or "
            "replaced"
        )
    if digest_of(file, progress) != expected:
        raise CheckpointError(f"{file}: does not match its digest; it was changed or damaged")


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def write_text(path: Path, text: str) -> Digest:
    """Write a new file and see it onto the disk."""
    data = text.encode()
    with naming_written(path), open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Digest(len(data), hashlib.sha256(data).hexdigest())


def read_json(path: Path) -> Any:
    """What a JSON file says.

    Raises:
        CheckpointError: if it is not there, or not JSON.
    """
    with open_plain(path) as file, naming(path):
        if os.fstat(file.fileno()).st_size > MAX_JSON_NBYTES:
            raise CheckpointError(f"{path}: is too large to be what it should be")
        return parse_json(file.readall(), path)


def sync_folder(path: Path) -> None:
    """See the names in a folder onto the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
