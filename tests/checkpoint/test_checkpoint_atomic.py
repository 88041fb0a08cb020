"""A save is atomic: a failure on one rank raises on all, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hostile import build, names, picture
from on_ranks import on_ranks
from problems import difference
from ranks import raises_on_every_rank, run_ranks
from safetensors.torch import load_file
from torch import nn

from shardstep import ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt
from shardstep.checkpoint import files, safetensors, staging
from shardstep.checkpoint import write as job
from shardstep.checkpoint.offline import export
from shardstep.checkpoint.staging import find_checkpoints

# ------------------------------------------------------------------------------ what can fail


no_space = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
no_disk = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))


def half_written(path: Path, *args: Any) -> Any:
    if path.name.startswith("optimizer"):
        path.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return safetensors.write(path, *args)


FAILURES: dict[str, tuple[int, Any, str, Any]] = {
    "disk-full-on-rank-1": (1, job, "write", half_written),
    "disk-full-on-rank-0": (0, job, "write", half_written),
    "no-list": (0, files, "write_text", no_space),
    "no-rename": (0, os, "rename", no_disk),
    "no-sync": (0, staging, "sync_folder", no_disk),
}


def write_fails(parent: Path, way: str, asynchronous: bool) -> None:
    """Save where one rank cannot write: both raise, and nothing is left."""
    net, opt = build(1, 2)
    before = picture(net, opt)
    where, owner, name, failing = FAILURES[way]
    message = "Input/output" if failing is no_disk else "No space left"
    patch = mock.patch.object(owner, name, failing)
    with patch if dist.get_rank() == where else contextlib.nullcontext():
        if asynchronous:
            ckpt.async_save(parent / way, opt, net)
            # Training goes on, and raises nothing.
            for param in net.parameters():
                param.grad = torch.ones_like(param)
            opt.step()
        path, save = ("next", ckpt.async_save) if asynchronous else (way, ckpt.save)
        with pytest.raises((OSError, RuntimeError), match=message) as caught:
            save(parent / path, opt, net)
    assert not asynchronous or way in str(caught.value)
    assert asynchronous or difference(before, picture(net, opt)) is None
    dist.barrier()
    assert names(parent) == []
    dist.barrier()
    # It was reported once, and the next save works.
    ckpt.save(parent / "after", opt, net)
    ckpt.load(parent / "after", opt, net)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(parent / "after")
    dist.barrier()


@on_ranks(2)
def test_what_one_rank_cannot_write_all_hear_of_and_nothing_is_left(tmp_path: Path) -> None:
    for way, background in itertools.product(FAILURES, (False, True)):
        write_fails(tmp_path, way, background)


def on_a_small_disk(parent: Path) -> None:
    net, opt = build(1, 1)
    for path, extra, left in (("too-large", torch.randn(400_000), []), ("small", 1, ["small"])):
        refused = pytest.raises(
            (OSError, RuntimeError), match=r"No space left .*\.too-large\.saving"
        )
        with contextlib.nullcontext() if left else refused:
            ckpt.save(parent / path, opt, net, extra)
        dist.barrier()
        assert names(parent) == left
        dist.barrier()


@contextlib.contextmanager
def mounted(where: Path, *options: str) -> Iterator[Path]:
    if subprocess.run(["mount", *options, str(where)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=1m", "tmpfs") as small_disk:
        run_ranks(on_a_small_disk, 2, small_disk)


@dataclass(frozen=True)
class Attempt:
    """One rank's arguments for a save that is to be refused."""

    rank: int
    parent: Path
    net: Any
    opt: ZeroRedundancyOptimizer

    def save(self, extra: Any = None, act: Any = ckpt.save, **given: Any) -> None:
        path, net = given.pop("path", self.parent / "a"), given.pop("net", self.net)
        act(path, self.opt, net, extra, **given)

    def save_to_relative_path(self) -> None:
        (self.parent / f"rank-{self.rank}").mkdir()
        os.chdir(self.parent / f"rank-{self.rank}")
        self.save(path="step-1")

    def save_where_a_save_runs(self) -> None:
        held = staging.Staging(self.parent / "a")
        if self.rank == 0:
            held.create()
        dist.barrier()
        try:
            self.save()
        finally:
            held.discard()

    def save_state_under_a_number(self) -> None:
        self.opt.optim.state[7] = {"x": 1}  # type: ignore[index]
        self.save()

    def save_quantised(self) -> None:
        self.net.q = nn.Buffer(torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint8))
        self.save()


VALUE, TYPE, BLOCKED = [(kind, RuntimeError) for kind in (ValueError, TypeError, BlockingIOError)]
DEEP: Any = functools.reduce(lambda value, _: [value], range(100), 1)
BAD: dict[str, tuple[Any, str, Callable[[Attempt], Any]]] = {
    "relative": (ValueError, "one path", Attempt.save_to_relative_path),
    "no path": (TYPE, "None", lambda a: a.save(path=None if a.rank else a.parent / "a")),
    "keep none": (ValueError, "at least 1", lambda a: a.save(keep_last=0)),
    "keep what": (TypeError, "str", lambda a: a.save(keep_last="x")),
    "nothing": (ValueError, "nothing to save", lambda a: ckpt.save(a.parent / "a")),
    "hidden": (VALUE, "begin with a dot", lambda a: a.save(path=a.parent / ".a")),
    "under way": (BLOCKED, "under way", Attempt.save_where_a_save_runs),
    "one model": (ValueError, "with a model", lambda a: a.save(net=None if a.rank else a.net)),
    "models": (VALUE, "different mod", lambda a: a.save(net=nn.Flatten() if a.rank else a.net)),
    "code in extra": (TypeError, "builtin_function", lambda a: a.save({"fn": print})),
    "code, later": (TypeError, "builtin_fun", lambda a: a.save({"fn": print}, ckpt.async_save)),
    "deep extra": (TypeError, "deep", lambda a: a.save(DEEP)),
    "endless number": (VALUE, "4300", lambda a: a.save(10**5000)),
    "number as a name": (TypeError, r"under \[7\]", Attempt.save_state_under_a_number),
    "quantised": (TYPE, "qint8|quantized", Attempt.save_quantised),
}


@on_ranks(2)
def test_what_cannot_be_saved_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Every way in turn: all ranks raise, and nothing is left."""
    for kind, (exception, message, act) in BAD.items():
        where = tmp_path / kind
        where.mkdir(exist_ok=True)
        with pytest.raises(exception, match=message):
            act(Attempt(dist.get_rank(), where, *build(1, 1)))
        os.chdir(tmp_path)
        dist.barrier()
        assert not [name for name in names(where) if not name.startswith("rank-")], kind


def save_plainly(parent: Path) -> None:
    net, opt = build(1, 1)
    ckpt.save(parent / "step-1", opt, net)


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("x")
    errors = (OSError, RuntimeError)
    below = tmp_path / "a-file" / "run"
    raises_on_every_rank(save_plainly, 2, errors, below, match="Not a directory")
    where = tmp_path / "read-only"
    ckpt.save(where / "before", extra=1)
    with mounted(where, "--bind", str(where)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(where)], check=True)
        raises_on_every_rank(save_plainly, 2, errors, where, match="Read-only file system")
        assert names(where) == ["before"]
        assert ckpt.load(where / "before").extra == 1


def test_a_second_save_to_the_same_path(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "step-1", extra=1)
    (tmp_path / "a-file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("step-1", "a-file", "link"):
        with pytest.raises(FileExistsError, match="exists already"):
            ckpt.save(tmp_path / name, extra=2)
    assert ckpt.load(tmp_path / "step-1").extra == 1


def test_paths_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = ("with a space", "ünï-☃", "a/b/c/step", "./dot", Path("x") / "y", "x" * 200, "a'b\"c")
    for path in paths:
        ckpt.save(path, extra={"path": str(path)})
        assert ckpt.load(path).extra == {"path": str(path)}
    assert ckpt.latest("a/b/c") == Path("a/b/c/step")
    assert ckpt.latest("nowhere") is None


@pytest.fixture
def heed_ctrl_c() -> Iterator[None]:
    """A job in the background ignores the signal."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


class CtrlC:
    """Ctrl-C during a call, counted from the creation of the hidden folder.

    Python heeds it when a function begins, or when one written in C returns.
    """

    def __init__(self, call: int) -> None:
        self.before = call
        self._in_save = False

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        self._in_save |= frame.f_code is staging.Staging.create.__code__
        if self._in_save and event in ("call", "c_return"):
            self.before -= 1
            if self.before == 0:
                signal.raise_signal(signal.SIGINT)


def whole(made: Path) -> bool:
    """Load what was saved or exported."""
    if made.is_file():
        return bool((torch.load(made)["model"]["w"] == 1).all())
    weights = made / "model.safetensors"
    return bool((load_file(weights)["w"] == 1).all()) and len(names(made)) in (1, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("heed_ctrl_c")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", ["save", "torch", "safetensors"])
def test_ctrl_c_at_any_moment_leaves_nothing_or_all(way: Any, tmp_path: Path) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(3))
    saved = ckpt.save(tmp_path / "saved", model=model)
    made = tmp_path / "runs" / "new"

    def act() -> None:
        if way == "save":
            ckpt.save(made, model=model)
        else:
            ckpt.export(saved, made, way, verify=False)

    interrupted = 0
    for call in itertools.count(1):
        leftover = made.parent / ".old.saving"
        leftover.mkdir(parents=True)
        (leftover / "model.safetensors").write_text("x")
        ctrl_c = CtrlC(call)
        with contextlib.suppress(KeyboardInterrupt):
            sys.setprofile(ctrl_c)
            try:
                act()
            finally:
                sys.setprofile(None)
        if made.exists():
            assert whole(made), call
            (shutil.rmtree if made.is_dir() else Path.unlink)(made)
        assert set(names(made.parent)) <= {leftover.name}, call
        staging.remove_leftovers(made.parent)  # nothing has kept its lock
        assert not names(made.parent), call
        if ctrl_c.before > 0:
            break
        interrupted += 1
    assert interrupted > 100


@pytest.mark.usefixtures("heed_ctrl_c")
def test_ctrl_c_ends_an_export_within_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "CHUNK_NBYTES", 4096)
    saved = ckpt.import_state_dict(tmp_path / "saved", model={"w": torch.ones(2**14)})
    written = []

    def stages(stage: str, nbytes: int) -> Callable[[int], None]:
        def progress(done: int) -> None:
            if stage == "writing":
                written.append(done)
                signal.raise_signal(signal.SIGINT)

        return progress

    with pytest.raises(KeyboardInterrupt):
        ckpt.export(saved, tmp_path / "new", stages=stages)
    assert written == [4096]
    assert names(tmp_path) == ["saved"]


# --------------------------------------------------------------------- keep_last and left-overs


def test_only_our_own_old_checkpoints_are_removed(tmp_path: Path) -> None:
    def save(name: str) -> None:
        ckpt.save(tmp_path / name, extra=name, keep_last=2)

    save("one")
    shutil.copytree(tmp_path / "one", tmp_path / "damaged")
    ours = (".killed.saving/model.safetensors", ".zero.removing/contents.json")
    theirs = ("foreign/checkpoint.json", "notes.txt", ".theirs.saving/thesis.tex")
    for file in ("damaged/contents.json", *ours, *theirs):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("x")
    (tmp_path / ".config").mkdir()
    (tmp_path / "best").symlink_to(tmp_path / "one")
    (tmp_path / ".link.saving").symlink_to(tmp_path / "foreign")
    for name in ("two", "three", "four"):
        save(name)
    assert {path.name for path in find_checkpoints(tmp_path)[0]} - {"best"} == {"three", "four"}
    expected = {".config", ".link.saving", ".theirs.saving", "best", "damaged", "foreign"}
    assert set(names(tmp_path)) == expected | {"notes.txt", "three", "four"}
    assert all((tmp_path / file).exists() for file in theirs)
    assert ckpt.latest(tmp_path) == tmp_path / "four"
    # A folder that is not ours in the place of ours is said, not removed.
    (tmp_path / ".five.saving").mkdir()
    (tmp_path / ".five.saving" / "thesis.tex").write_text("x")
    with pytest.raises(BlockingIOError, match=r"remove .*\.five\.saving"):
        save("five")


def test_newest_is_what_was_saved_last_even_if_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([5_000_000, 4_000_000, 10, 0])
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    for name in ("d", "c", "b", "a"):
        ckpt.save(tmp_path / name, extra=name, keep_last=2)
        assert ckpt.latest(tmp_path) == tmp_path / name
    assert names(tmp_path) == ["a", "b"]


def test_one_that_cannot_be_removed_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that was just saved is complete all the same."""
    ckpt.save(tmp_path / "one", extra=1)
    rename = os.rename

    def stubborn(source: Any, target: Any) -> None:
        if Path(source).name == "one":
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", stubborn)
    with pytest.warns(UserWarning, match=r"one is to be removed, but cannot be: .*denied"):
        ckpt.save(tmp_path / "two", extra=2, keep_last=1)
    assert ckpt.latest(tmp_path) == tmp_path / "two"


def test_a_folder_that_cannot_be_listed_again_does_not_fail_a_complete_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, listed = os.rename, os.listdir

    def break_folder(source: Any, target: Any) -> None:
        rename(source, target)
        monkeypatch.setattr(os, "listdir", no_disk)

    for name in ("one", "two"):
        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", break_folder)
            ckpt.save(tmp_path / name, extra=name, keep_last=1)
            monkeypatch.setattr(os, "listdir", listed)
    assert names(tmp_path) == ["two"]


def test_a_save_does_not_look_at_every_file_of_every_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may have hundreds, with files of a thousand ranks each, and all ranks wait."""
    monkeypatch.setattr(files, "_run", (os.getpid(), "before"))
    for number in range(3):
        ckpt.save(tmp_path / f"other-{number}", extra=number)
    monkeypatch.setattr(files, "_run", (os.getpid(), "now"))
    ckpt.save(tmp_path / "one", extra=1)
    looked = mock.Mock(wraps=staging.check_lengths)
    monkeypatch.setattr(staging, "check_lengths", looked)
    ckpt.save(tmp_path / "two", extra=2, keep_last=1)
    assert [call.args[0].name for call in looked.call_args_list] == ["one"]
    assert names(tmp_path) == ["other-0", "other-1", "other-2", "two"]


def test_new_parents_are_on_disk_before_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut loses a folder whose name was not flushed, with everything in it."""
    synced: list[Path] = []
    monkeypatch.setattr(staging, "sync_folder", synced.append)
    ckpt.save(tmp_path / "a" / "b" / "one", extra=1)
    assert synced == [
        tmp_path / "a",
        tmp_path,
        tmp_path / "a" / "b" / ".one.saving",
        tmp_path / "a" / "b",
    ]


def save_often(parent: Path, name: str, count: int) -> None:
    for number in range(count):
        ckpt.save(parent / f"{name}-{number}", extra={"name": name, "n": number}, keep_last=2)
        newest = ckpt.latest(parent)
        # The other run may remove what is the newest now.
        with contextlib.suppress(ckpt.CheckpointError):
            assert newest is None or ckpt.load(newest).extra["n"] >= 0


def test_two_runs_may_save_to_one_folder(tmp_path: Path) -> None:
    """Each clears away what was left, and neither removes a checkpoint of the other."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda n: run_ranks(save_often, 1, tmp_path, f"run{n}", 6), range(2)))
    assert names(tmp_path) == ["run0-4", "run0-5", "run1-4", "run1-5"]


def test_memory_to_digest_outlives_its_tensor() -> None:
    # Ctrl-C may interrupt the wait for the thread that digests it; that thread read freed memory.
    tensor = torch.ones(8)
    alive = weakref.ref(tensor)
    raw = safetensors.raw_bytes(tensor)
    del tensor
    assert alive() is not None
    del raw
    assert alive() is None
