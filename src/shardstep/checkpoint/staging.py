"""Atomic folders: files are written to a hidden folder, and one rename makes them a checkpoint.

The hidden folder lies next to the target, and its name begins with a dot. The writer locks it. The
lock ends with the process, so an unlocked folder was left by a save that did not finish. The next
save removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from shardstep.checkpoint.files import (
    FILE_NAME,
    MANIFEST,
    CheckpointError,
    Digest,
    Manifest,
    length_of,
    read_manifest,
    reading,
    require,
    run_id,
    status_of,
    sync_folder,
    write_manifest,
)

SWEEP_SECONDS = 0.5
"""Seconds that another save may hold the lock of a new folder while it looks for leftovers."""

EXPORT = "export.pt"
"""Name of an exported torch file while it is written."""

DAMAGED = ".damaged"
"""Added to the name of a checkpoint that `resume` found damaged. It counts no more."""

_HIDDEN = re.compile(r"\..+\.(?:saving|removing)")


class Staging:
    """The hidden folder for a checkpoint at `path`, on the rank that creates it.

    Ctrl-C may come while `create` runs: call it in a `try` statement that ends in `discard`.
    """

    def __init__(self, path: Path) -> None:
        self._goal = path
        self.path = path.parent / f".{path.name}.saving"
        self._lock: int | None = None

    def create(self) -> None:
        """Create the folder and lock it. Remove leftovers of other saves."""
        goal = self._goal
        if goal.name.startswith(".") or not goal.name:
            raise ValueError(
                f"{goal} cannot be a checkpoint: folders whose names begin with a dot are taken "
                "for leftovers; save to another path, such as step-1000"
            )
        if os.path.lexists(goal):
            raise FileExistsError(f"{goal} exists already; choose a new path")
        new = [folder for folder in goal.parents if not folder.exists()]
        goal.parent.mkdir(parents=True, exist_ok=True)
        for folder in new:
            sync_folder(folder.parent)
        deadline = time.monotonic() + SWEEP_SECONDS
        while not self._make():
            if time.monotonic() > deadline:
                raise BlockingIOError(
                    f"a save to {goal} is under way; wait for it, or save to another path. If "
                    f"there is none, remove {self.path}, which holds files that no save writes"
                )
            time.sleep(0.05)

    def _make(self) -> bool:
        """Return True if the folder is ours now, False if another save has one of this name."""
        remove_leftovers(self.path.parent)
        with ctrl_c_held_back():
            try:
                self.path.mkdir()
            except FileExistsError:
                return False
            # Another save may take the new folder for a leftover before it is locked.
            self._lock = lock_folder(self.path, if_unsupported=True)
            if self._lock is not None:
                _unfinished[self] = os.getpid()
        return self._lock is not None

    def commit(self, files: Mapping[str, Digest]) -> dict[Path, Manifest]:
        """Turn the folder into a checkpoint of `files`, which any ranks have written.

        Returns the other checkpoints next to it, oldest first. Those of this run are complete.
        """
        for name, digest in files.items():
            require(
                length_of(self.path / name) == digest.nbytes,
                f"{self.path / name} is missing or not as long as a rank has written it: all ranks "
                "have to save to one folder on a file system that they share",
            )
        others, _ = find_checkpoints(self._goal.parent, run_id())
        newest = max((other.saved_at for other in others.values()), default=0)
        # Greater than every other here, even if the clock was set back.
        write_manifest(self.path, max(time.time_ns(), newest + 1), files)
        self.publish()
        return others

    def publish(self, name: str | None = None) -> None:
        """Rename the folder, or one file in it, to the path that was asked for."""
        sync_folder(self.path)
        if os.path.lexists(self._goal):
            raise FileExistsError(f"{self._goal} was created while it was saved to")
        source = self.path if name is None else self.path / name
        os.rename(source, self._goal)
        try:
            sync_folder(self._goal.parent)
        except OSError:
            # The rename may not be on disk, and the save is reported as failed.
            os.rename(self._goal, source)
            raise
        if name is None:
            self._let_go()
        else:
            self.discard()

    def discard(self) -> None:
        """Remove the folder if this object created it, unless it has become a checkpoint."""
        with ctrl_c_held_back():
            if self in _unfinished:
                _remove(self.path)
                self._let_go()

    def _let_go(self) -> None:
        _unfinished.pop(self)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


_unfinished: dict[Staging, int] = {}
"""Hidden folders, by the process that creates them: a forked process has a copy of this."""


def watch_sigterm(group_rank: int) -> None:
    """Remove unfinished folders if SIGTERM ends this process, as torchrun does if a peer fails.

    Does nothing if the program handles the signal, or in a thread: only the main one may set it.
    Only rank 0 has a folder. A handler on another rank would run when its collective returns, and
    until then the signal would have no effect.
    """
    if group_rank == 0 and _may_handle(signal.SIG_DFL):
        signal.signal(signal.SIGTERM, _on_sigterm)


def unwatch_sigterm() -> None:
    """Restore the default action of SIGTERM if no save is unfinished."""
    if _may_handle(_on_sigterm) and not _unfinished:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _may_handle(current: object) -> bool:
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGTERM) is current


def _on_sigterm(number: int, frame: object) -> None:
    for staging, process in list(_unfinished.items()):
        if process == os.getpid():
            _remove(staging.path)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _remove(folder: Path) -> None:
    """Remove a folder. Other ranks may be creating files in it, and find it gone at once."""
    with contextlib.suppress(OSError):
        folder = folder.rename(folder.with_name(f"{folder.name}.removing"))
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ctrl_c_held_back() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the end. Yield a function that heeds it before.

    Python raises in whatever code the main thread is running. `shutil.rmtree` turns this into
    another error.
    """
    handler = signal.getsignal(signal.SIGINT)
    held: list[tuple[int, FrameType | None]] = []

    def heed() -> None:
        while held and callable(handler):
            handler(*held.pop(0))

    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield heed
        return
    signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield heed
    finally:
        signal.signal(signal.SIGINT, handler)
        heed()


def lock_folder(folder: Path, if_unsupported: bool = False) -> int | None:
    """Return a descriptor that holds the lock on `folder`; None if it is gone or locked.

    If the file system has no locks, return one only `if_unsupported`.
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
        if if_unsupported and error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            return descriptor
    os.close(descriptor)
    return None


def remove_leftovers(parent: Path) -> None:
    """Remove the hidden folders in `parent` that unfinished saves and removals left."""
    for folder in _hidden(parent):
        with ctrl_c_held_back():
            lock = lock_folder(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def leftovers(parent: Path) -> list[tuple[Path, bool]]:
    """Return the hidden folders in `parent`, each with whether it is in use."""
    found = []
    for folder in sorted(_hidden(parent)):
        with contextlib.suppress(FileNotFoundError):
            # A save that has just begun may not hold its lock yet, and must find it free.
            young = time.time() - folder.lstat().st_mtime < 2
            lock = None if young else lock_folder(folder)
            if lock is not None:
                os.close(lock)
            found.append((folder, lock is None))
    return found


def _hidden(parent: Path) -> Iterator[Path]:
    """Yield the folders in `parent` that saves and removals work in."""
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            if _HIDDEN.fullmatch(folder.name) and not folder.is_symlink():
                # A folder that is not ours holds other files, or is unreadable. Ours may be gone.
                with contextlib.suppress(OSError):
                    within = os.listdir(folder)
                    if all(FILE_NAME.fullmatch(name) or name == EXPORT for name in within):
                        yield folder


def keep_last(others: Mapping[Path, Manifest], count: int) -> None:
    """Remove all but the newest `count` checkpoints of this run: the one just saved, and `others`.

    Warns of one that cannot be removed: the checkpoint just saved is complete all the same.
    """
    mine = [path for path, found in others.items() if found.run == run_id()]
    mine = [path for path in mine if not path.is_symlink()]
    for path in mine[: max(0, len(mine) + 1 - count)]:
        try:
            hidden = path.rename(path.with_name(f".{path.name}.removing"))
        except FileNotFoundError:
            continue  # another save has removed it
        except OSError as error:
            warnings.warn(f"{path} is to be removed, but cannot be: {error}", stacklevel=2)
            continue
        # The next save removes the remains. Another process may be removing them right now.
        with ctrl_c_held_back():
            shutil.rmtree(hidden, ignore_errors=True)


def find_checkpoints(
    parent: Path, run: str | None = None
) -> tuple[dict[Path, Manifest], dict[Path, CheckpointError]]:
    """Return the complete checkpoints in `parent`, oldest first, and the errors of the others.

    If `run` is given, the files of other runs' checkpoints are not looked at.
    """
    complete: dict[Path, Manifest] = {}
    damaged: dict[Path, CheckpointError] = {}
    names: list[str] = []
    with reading(parent), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = sorted(os.listdir(parent))
    for path in (parent / name for name in names if not name.startswith(".")):
        try:
            if status_of(path / MANIFEST) is not None:
                complete[path] = manifest = read_manifest(path)
                if run in (None, manifest.run):
                    check_lengths(path, manifest)
                require(path.suffix != DAMAGED, f"{path}: `resume` found it damaged")
        except CheckpointError as error:
            complete.pop(path, None)
            damaged[path] = error
    by_time = sorted(complete, key=lambda path: complete[path].saved_at)
    return {path: complete[path] for path in by_time}, damaged


def check_lengths(path: Path, manifest: Manifest) -> None:
    """Raise `CheckpointError` if files of a checkpoint are missing or of another length."""
    lengths = {name: length_of(path / name) for name in sorted(manifest.files)}
    wrong = [
        f"{name} {'is missing' if length is None else 'has another length'}"
        for name, length in lengths.items()
        if length != manifest.files[name].nbytes
    ]
    require(not wrong, f"{path}: {'; '.join(wrong)}")
