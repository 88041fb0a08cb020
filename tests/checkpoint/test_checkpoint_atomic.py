"""A save is complete or not there, whatever happens to it; and what goes wrong, all ranks hear."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hostile import build, picture
from problems import difference
from ranks import RankFailure, raises_on_every_rank, run_ranks
from torch import nn, optim

from shardstep import ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt
from shardstep.checkpoint import files, manifest, safetensors, staging
from shardstep.checkpoint import write as job
from shardstep.checkpoint.staging import checkpoints


def names(parent: Path) -> list[str]:
    return sorted(os.listdir(parent))


# ------------------------------------------------------------------------------ being killed
#
# A run takes steps and saves each of them, keeping two. It is killed, and the next one goes on from
# the newest checkpoint. What a step's values are depends on its number alone.

SHAPES = ((96, 512), (64, 32, 17), (31,), ())
UNTIL_KILLED = 10_000


def model_at(step: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number, shape in enumerate(SHAPES):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))


def set_step(net: Net, opt: ZeroRedundancyOptimizer, step: int) -> None:
    """Bring model and moments to what they are at `step`, through a step of the optimizer.

    With these options the first moment of SGD is the gradient, so that both are of this step.
    """
    for param, value in zip(net.parameters(), model_at(step), strict=True):
        param.grad = value
    opt.step()
    with torch.no_grad():
        for param, value in zip(net.parameters(), model_at(-step), strict=True):
            param.copy_(value)


def check_step(net: Net, opt: ZeroRedundancyOptimizer, step: int) -> None:
    """All values here are those of `step`, to the bit."""
    moments = [opt.full_state(param)["momentum_buffer"] for param in net.parameters()]
    for got, expected in zip(net.parameters(), model_at(-step), strict=True):
        assert torch.equal(got, expected), step
    for got, expected in zip(moments, model_at(step), strict=True):
        assert torch.equal(got, expected), step


def make() -> tuple[Net, ZeroRedundancyOptimizer]:
    net = Net()
    options = {"lr": 0.0, "momentum": 0.5, "dampening": 0.0}
    return net, ZeroRedundancyOptimizer(net.named_parameters(), optim.SGD, **options)


def slowly(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Takes its time before and after."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        result = function(*args, **kwargs)
        time.sleep(seconds)
        return result

    return slow


def stretch() -> None:
    """Make every phase of a save long enough to be hit, in this rank."""
    safetensors.CHUNK_NBYTES = 16 * 2**10
    for owner, name, seconds in (
        (os, "fsync", 0.006),
        (os, "rename", 0.006),
        (shutil, "rmtree", 0.006),
        (os, "unlink", 0.002),
        (os, "mkdir", 0.006),
    ):
        setattr(owner, name, slowly(getattr(owner, name), seconds))


def go_on(parent: Path, signs: Path, asynchronous: bool, saves: int) -> None:
    """Load the newest checkpoint, check it, and save the steps after it until somebody kills us."""
    net, opt = make()
    newest = ckpt.latest(parent)
    step = 0
    if newest is not None:
        step = ckpt.load(newest, opt, net).extra["step"]
        assert newest.name == f"step-{step}"
        check_step(net, opt, step)
    stretch()
    for number in range(step + 1, step + 1 + saves):
        # Dampening would mix the last step's moment into this one's.
        opt.optim.state.clear()
        set_step(net, opt, number)
        (signs / f"{os.getpid()}-{dist.get_rank()}").touch()
        if asynchronous:
            ckpt.async_save(parent / f"step-{number}", opt, net, {"step": number}, keep_last=2)
        else:
            ckpt.save(parent / f"step-{number}", opt, net, {"step": number}, keep_last=2)


def kill_soon(parent: Path, signs: Path, delay: float, whom: str, found: list[str]) -> None:
    """Wait for both ranks to begin, and then a while; then kill, noting what stood there."""
    deadline = time.monotonic() + 30
    while len(list(signs.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay)
    found += names(parent)
    for sign in sorted(signs.iterdir(), key=lambda sign: sign.name[-1]):
        pid, rank = sign.name.split("-")
        if whom in (rank, "all"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def endure(tmp_path: Path, moments: int, seed: int) -> dict[str, int]:
    """Kill so many runs; count those killed in the midst of a save, and what each left behind."""
    choose = random.Random(seed)
    parent = tmp_path / "run"
    parent.mkdir()
    seen = {"midst": 0}
    for number in range(moments):
        signs = tmp_path / f"signs-{number}"
        signs.mkdir()
        asynchronous = number % 2 == 1
        whom = choose.choice(("0", "1", "all"))
        # Long enough for the first few saves of a run.
        delay = choose.uniform(0.0, 0.9)
        found: list[str] = []
        killer = threading.Thread(target=kill_soon, args=(parent, signs, delay, whom, found))
        killer.start()
        with pytest.raises(RankFailure, match="exit code -9") as caught:
            run_ranks(go_on, 2, parent, signs, asynchronous, UNTIL_KILLED, timeout=60)
        killer.join()
        # What it began with was loaded and checked before anybody was killed; and who lives on
        # hears of it.
        for bad in ("AssertionError", "CheckpointError", "was still running"):
            assert bad not in str(caught.value), str(caught.value)
        seen["midst"] += any(name.startswith(".") for name in found)
        for name in [name for name in names(parent) if name.startswith(".")] or ["nothing"]:
            within = names(parent / name) if name != "nothing" else []
            kind = name.rpartition(".")[2] + (" with its list" * ("checkpoint.json" in within))
            seen[kind] = seen.get(kind, 0) + 1
        verify_newest(parent)
    # What was left behind is no obstacle, and is gone after the next save.
    run_ranks(go_on, 2, parent, tmp_path / "signs-0", False, 1, timeout=60)
    assert not [name for name in names(parent) if name.startswith(".")], names(parent)
    assert len(checkpoints(parent)) in (1, 2)
    verify_newest(parent)
    return seen


def verify_newest(parent: Path) -> None:
    """The newest checkpoint loads, here and now, and is of the step that it says."""
    newest = ckpt.latest(parent)
    if newest is not None:
        net, opt = make()
        step = ckpt.load(newest, opt, net).extra["step"]
        assert newest.name == f"step-{step}"
        check_step(net, opt, step)
    for path in parent.iterdir():
        # No folder that can be seen is half a checkpoint.
        assert path.name.startswith(".") or path in checkpoints(parent), path


@pytest.mark.slow
def test_killed_at_8_moments(tmp_path: Path) -> None:
    assert endure(tmp_path, 8, seed=1)["midst"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_50_moments(tmp_path: Path) -> None:
    seen = endure(tmp_path, 50, seed=2)
    print(seen)
    assert seen["midst"] >= 10, seen


PHASES: dict[str, tuple[Any, str, int]] = {
    "the folder is made": (staging, "lock_folder", 0),
    "a rank has begun to write": (safetensors, "_chunks", 1),
    "a rank has written": (os, "fsync", 0),
    "all is written": (files, "write_text", 0),
    "the contents are written": (files, "write_text", 1),
    "the list is written": (staging, "sync_folder", 0),
    "the folder is about to be renamed": (os, "rename", 0),
    "the folder is renamed": (staging, "sync_folder", 1),
    "an old one is about to be hidden": (os, "rename", 1),
    "an old one is hidden": (shutil, "rmtree", 0),
    "an old one is being removed": (os, "unlink", 1),
}


def die_in(phase: str, parent: Path, step: int) -> None:
    """Save, and be killed at this moment: rank 0, which does the most."""
    net, opt = make()
    set_step(net, opt, step)
    owner, name, times = PHASES[phase]
    function = getattr(owner, name)
    calls = 0

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if calls == times:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return function(*args, **kwargs)

    if dist.get_rank() == 0:
        for module in (owner, manifest, staging, job):
            if getattr(module, name, None) is function:
                setattr(module, name, deadly)
    ckpt.save(parent / f"step-{step}", opt, net, {"step": step}, keep_last=1)


def test_killed_in_every_phase(tmp_path: Path) -> None:
    """Before the rename the old checkpoint is the newest, after it the new one is."""
    run_ranks(go_on, 2, tmp_path, tmp_path, False, 0)
    net, opt = make()
    set_step(net, opt, 1)
    ckpt.save(tmp_path / "step-1", opt, net, {"step": 1})
    step = 1
    for phase in PHASES:
        staging.remove_leftovers(tmp_path)  # or the next save would be killed at that
        with pytest.raises(RankFailure, match="exit code -9"):
            run_ranks(die_in, 2, phase, tmp_path, step + 1, timeout=60)
        renamed = list(PHASES).index(phase) >= list(PHASES).index("the folder is renamed")
        step += renamed
        newest = ckpt.latest(tmp_path)
        assert newest == tmp_path / f"step-{step}", phase
        verify_newest(tmp_path)
    opt.optim.state.clear()
    set_step(net, opt, step + 1)
    ckpt.save(tmp_path / f"step-{step + 1}", opt, net, {"step": step + 1}, keep_last=1)
    assert names(tmp_path) == [f"step-{step + 1}"]


# ------------------------------------------------------------------------------ what can fail


def write_fails(parent: Path, way: str, asynchronous: bool) -> Any:
    """Save where one rank cannot write; return what was raised here."""
    net, opt = build(1, 2)
    before = picture(net, opt)
    rank = dist.get_rank()
    original = safetensors.write

    def full(path: Path, *args: Any) -> Any:
        if path.name.startswith("optimizer"):
            path.write_bytes(b"a part")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path, *args)

    patches = {
        "disk full on rank 1": (1, mock.patch.object(job, "write", full)),
        "disk full on rank 0": (0, mock.patch.object(job, "write", full)),
        "no list": (0, mock.patch.object(manifest, "write_text", full_text)),
        "no rename": (0, mock.patch.object(os, "rename", refuse)),
        "no sync": (0, mock.patch.object(staging, "sync_folder", refuse)),
    }
    path = parent / way.replace(" ", "-")
    on, patch = patches[way]
    with patch if rank == on else contextlib.nullcontext():
        try:
            if asynchronous:
                ckpt.async_save(path, opt, net)
                # Training goes on meanwhile, and says nothing.
                for param in net.parameters():
                    param.grad = torch.ones_like(param)
                opt.step()
                ckpt.async_save(parent / "next", opt, net)
            else:
                ckpt.save(path, opt, net)
            raised = None
        except (OSError, RuntimeError) as error:
            raised = str(error)
    if not asynchronous:
        assert difference(before, picture(net, opt)) is None
    dist.barrier()
    left = names(parent)
    # It was reported once, and the next save works.
    ckpt.save(parent / "after", opt, net)
    dist.barrier()
    ckpt.load(parent / "after", opt, net)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(parent / "after")
    dist.barrier()
    return raised, left


def full_text(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def refuse(*_: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error")


def all_failures(parent: Path) -> list[Any]:
    ways = ("disk full on rank 1", "disk full on rank 0", "no list", "no rename", "no sync")
    return [
        (way, asynchronous, *write_fails(parent, way, asynchronous))
        for way in ways
        for asynchronous in (False, True)
    ]


def test_what_one_rank_cannot_write_all_hear_of_and_nothing_is_left(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(all_failures, 2, tmp_path)):
        for way, asynchronous, raised, left in found:
            assert raised is not None, (rank, way, asynchronous)
            wanted = "No space left" if "full" in way or way == "no list" else "Input/output"
            assert wanted in raised, (rank, way, asynchronous, raised)
            assert way.replace(" ", "-") in raised or not asynchronous
            assert left == [], (rank, way, asynchronous)


def on_a_small_disk(parent: Path) -> str:
    net, opt = build(1, 1)
    ballast = torch.randn(400_000)
    with pytest.raises((OSError, RuntimeError), match="No space left on device") as caught:
        ckpt.save(parent / "too-large", opt, net, {"ballast": ballast})
    dist.barrier()
    assert names(parent) == []
    dist.barrier()
    ckpt.save(parent / "small", opt, net)
    dist.barrier()
    assert names(parent) == ["small"]
    return str(caught.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    for message in run_ranks(on_a_small_disk, 2, small_disk):
        assert ".too-large.saving/" in message


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "read-only"
    where.mkdir()
    ckpt.save(where / "before", extra=1)
    if subprocess.run(["mount", "--bind", str(where), str(where)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    subprocess.run(["mount", "-o", "remount,ro,bind", str(where)], check=True)
    yield where
    subprocess.run(["umount", str(where)], check=True)


def save_badly(parent: Path, kind: str) -> None:
    net, opt = build(1, 1)
    rank = dist.get_rank()
    held: Any = None
    if kind == "under way" and rank == 0:
        held = staging.Staging(parent / "step-1")
    dist.barrier()
    try:
        if kind == "relative":
            (parent / f"rank-{rank}").mkdir()
            os.chdir(parent / f"rank-{rank}")
            ckpt.save("step-1", opt, net)
        elif kind == "no path":
            ckpt.save(None if rank == 1 else parent / "a", opt, net)  # type: ignore[arg-type]
        elif kind == "keep none":
            ckpt.save(parent / "a", opt, net, keep_last=0)
        elif kind == "keep what":
            ckpt.save(parent / "a", opt, net, keep_last="x")  # type: ignore[arg-type]
        elif kind == "nothing":
            ckpt.save(parent / "a")
        elif kind == "hidden":
            ckpt.save(parent / ".a", opt, net)
        elif kind == "model on one rank":
            ckpt.save(parent / "a", opt, net if rank == 0 else None)
        elif kind == "other models":
            ckpt.save(parent / "a", opt, net if rank == 0 else nn.Linear(3, 3))
        elif kind == "code in extra":
            ckpt.save(parent / "a", opt, net, {"fn": print})
        elif kind == "code in extra, later":
            ckpt.async_save(parent / "a", opt, net, {"fn": print})
        elif kind == "deep extra":
            deep: Any = 1
            for _ in range(100):
                deep = [deep]
            ckpt.save(parent / "a", opt, net, deep)
        elif kind == "endless number":
            ckpt.save(parent / "a", opt, net, 10**5000)
        elif kind == "number as a name":
            opt.optim.state[7] = {"x": 1}  # type: ignore[index]
            ckpt.save(parent / "a", opt, net)
        elif kind == "quantised":
            net.register_buffer("q", torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint8))
            ckpt.save(parent / "a", opt, net)
        else:
            ckpt.save(parent / "step-1", opt, net)
    finally:
        if held is not None:
            held.discard()


BAD: dict[str, tuple[Any, str]] = {
    "relative": (ValueError, "one path"),
    "no path": ((TypeError, RuntimeError), "None"),
    "keep none": (ValueError, "at least 1"),
    "keep what": (TypeError, "str"),
    "nothing": (ValueError, "nothing to save"),
    "hidden": ((ValueError, RuntimeError), "begin with a dot"),
    "under way": ((BlockingIOError, RuntimeError), "under way"),
    "model on one rank": (ValueError, "with a model"),
    "other models": (ValueError, "different models"),
    "code in extra": (TypeError, "builtin_function"),
    "code in extra, later": (TypeError, "builtin_function"),
    "deep extra": (TypeError, "deep"),
    "endless number": ((ValueError, RuntimeError), "4300"),
    "number as a name": (TypeError, r"under \[7\]"),
    "quantised": ((TypeError, RuntimeError), "qint8|quantized"),
}


def save_badly_in_all_ways(parent: Path) -> list[str]:
    """Every way in turn; what was raised is compared on all ranks, and nothing is left."""
    wrong = []
    for number, (kind, (exception, message)) in enumerate(BAD.items()):
        where = parent / f"{number}"
        where.mkdir(exist_ok=True)
        try:
            save_badly(where, kind)
            wrong.append(f"{kind}: nothing was raised")
        except exception as error:
            if not re.search(message, str(error)):
                wrong.append(f"{kind}: {error}")
        except Exception as error:
            wrong.append(f"{kind}: {type(error).__name__}: {error}")
        os.chdir(parent)
        dist.barrier()
        left = [name for name in names(where) if not name.startswith("rank-")]
        if left:
            wrong.append(f"{kind}: it left {left}")
    return wrong


def test_what_cannot_be_saved_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for wrong in run_ranks(save_badly_in_all_ways, 2, tmp_path):
        assert not wrong, "\n".join(wrong)


def test_where_nothing_can_be_written(tmp_path: Path, read_only: Path) -> None:
    (tmp_path / "a-file").write_text("x")
    below = tmp_path / "a-file" / "run"
    for parent, message in ((below, "Not a directory"), (read_only, "Read-only file system")):
        errors = (OSError, RuntimeError)
        raises_on_every_rank(save_badly, 2, errors, parent, "plain", match=message)
    assert names(read_only) == ["before"]
    assert ckpt.load(read_only / "before").extra == 1


def test_a_second_save_to_the_same_path(tmp_path: Path) -> None:
    """While one is running, and when it is done."""
    ckpt.save(tmp_path / "step-1", extra=1)
    for what in (tmp_path / "step-1", tmp_path / "a-file"):
        (tmp_path / "a-file").write_text("x")
        with pytest.raises(FileExistsError, match="exists already"):
            ckpt.save(what, extra=2)
    assert ckpt.load(tmp_path / "step-1").extra == 1
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        ckpt.save(link, extra=2)


def test_paths_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (
        "with a space",
        "ünï-☃",
        "a/b/c/step",
        "./dot",
        Path("x") / "y",
        "x" * 200,
        "a'b\"c",
    ):
        ckpt.save(path, extra={"path": str(path)})
        assert ckpt.load(path).extra == {"path": str(path)}
    assert ckpt.latest("a/b/c") == Path("a/b/c/step")
    assert ckpt.latest("nowhere") is None
    assert ckpt.latest(tmp_path / "ünï-☃") is None


def die_while_saving(parent: Path, who: int) -> None:
    net, opt = build(1, 1)
    if dist.get_rank() == who:
        job.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        ckpt.save(parent / "step-1", opt, net)
    except RuntimeError:
        (parent / f"heard-{dist.get_rank()}").write_text(str(time.monotonic() - started))
        raise


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_is_noticed_by_the_other(tmp_path: Path, who: int) -> None:
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(die_while_saving, 2, tmp_path, who, timeout=60)
    assert float((tmp_path / f"heard-{1 - who}").read_text()) < 15
    assert ckpt.latest(tmp_path) is None
    ckpt.save(tmp_path / "step-1", extra=1)
    assert [name for name in names(tmp_path) if "heard" not in name] == ["step-1"]


# --------------------------------------------------------------------- keep_last and left-overs


def test_only_our_own_old_checkpoints_are_removed(tmp_path: Path) -> None:
    def save(name: str) -> None:
        ckpt.save(tmp_path / name, extra=name, keep_last=2)

    save("one")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "checkpoint.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "best").symlink_to(tmp_path / "one")
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "one", damaged)
    (damaged / "contents.json").write_text("")
    theirs = tmp_path / ".theirs.saving"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("x")
    (tmp_path / ".config").mkdir()
    ours = tmp_path / ".killed.saving"
    ours.mkdir()
    (ours / "model.safetensors").write_text("x")
    removing = tmp_path / ".zero.removing"
    removing.mkdir()
    (removing / "contents.json").write_text("x")
    link = tmp_path / ".link.saving"
    link.symlink_to(foreign)
    for name in ("two", "three", "four"):
        save(name)
    assert {path.name for path in checkpoints(tmp_path)} - {"best"} == {"three", "four"}
    expected = {".config", ".link.saving", ".theirs.saving", "best", "damaged", "foreign"}
    assert set(names(tmp_path)) == expected | {"notes.txt", "three", "four"}
    assert (theirs / "thesis.tex").exists()
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
    """What has just been saved is none the worse for it."""
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


def save_often(parent: Path, name: str, count: int) -> None:
    for number in range(count):
        ckpt.save(parent / f"{name}-{number}", extra={"name": name, "n": number}, keep_last=2)
        newest = ckpt.latest(parent)
        # The other run may remove what is the newest now.
        with contextlib.suppress(ckpt.CheckpointError):
            assert newest is None or ckpt.load(newest).extra["n"] >= 0


def test_two_runs_may_save_beside_each_other(tmp_path: Path) -> None:
    """Each clears away what was left, and neither takes the other's work for that."""
    others = [
        threading.Thread(target=lambda n=n: run_ranks(save_often, 1, tmp_path, f"run{n}", 6))
        for n in range(2)
    ]
    failures: list[Any] = []
    with mock.patch.object(threading, "excepthook", lambda args: failures.append(args.exc_value)):
        for other in others:
            other.start()
        for other in others:
            other.join()
    assert not failures, failures[0]
    assert len(checkpoints(tmp_path)) in (2, 3)


# ------------------------------------------------------------------------- in the background


class Gate:
    """Holds writing up until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self._write = job.write

    def __call__(self, *args: Any) -> Any:
        assert self.open.wait(30)
        return self._write(*args)


def train_while_saving(parent: Path) -> list[str]:
    """Training goes on while files are written, and the checkpoint is of the moment of the call."""
    wrong = []
    net, opt = build(1, 2)
    ckpt.save(parent / "sync", opt, net, {"step": 2})
    expected = picture(net, opt)
    gate = Gate()
    with mock.patch.object(job, "write", gate):
        saving = ckpt.async_save(parent / "async", opt, net, {"step": 2})
        for _ in range(3):
            for param in net.parameters():
                param.grad = torch.randn_like(param)
            opt.step()
            net.norm.running_mean.add_(1)
            for group in opt.param_groups:
                group["lr"] *= 0.5
        if saving.done():
            wrong.append("it was done before it could be")
        if difference(expected, picture(net, opt)) is None:
            wrong.append("nothing was trained meanwhile")
        gate.open.set()
        assert saving.wait() == parent / "async"
        assert saving.done()
    for name in ("sync", "async"):
        other, fresh = build(3, 1)
        assert ckpt.load(parent / name, fresh, other).extra == {"step": 2}
        if found := difference(expected, picture(other, fresh)):
            wrong.append(f"{name}: {found}")
    return wrong


def two_in_a_row(parent: Path) -> None:
    """The second waits for the first; both are of their own moment."""
    net, opt = build(1, 2)
    pictures = []
    for number in range(3):
        pictures.append(picture(net, opt))
        ckpt.async_save(parent / f"step-{number}", opt, net, keep_last=2)
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        opt.step()
    ckpt.save(parent / "last", opt, net)
    for number in (1, 2):
        other, fresh = build(3, 1)
        ckpt.load(parent / f"step-{number}", fresh, other)
        assert difference(pictures[number], picture(other, fresh)) is None, number


def two_optimizers(parent: Path) -> None:
    """Each has a save of its own running; failures are its own too."""
    (one, first), (two, second) = build(1, 2), build(5, 1)
    expected = [picture(one, first), picture(two, second)]
    gate = Gate()
    with mock.patch.object(job, "write", gate):
        saves = [
            ckpt.async_save(parent / "first", first, one),
            ckpt.async_save(parent / "second", second, two),
            ckpt.async_save(parent / "third", extra={"a": torch.ones(100)}),
        ]
        bad = ckpt.async_save(parent / "fourth", *reversed(build(1, 1)))
        (parent / "fourth").mkdir(exist_ok=True)
        gate.open.set()
        for saving in saves:
            saving.wait()
        with pytest.raises(RuntimeError, match="in the background failed"):
            bad.wait()
    for name, picture_then in zip(("first", "second"), expected, strict=True):
        net, opt = build(7, 1)
        ckpt.load(parent / name, opt, net)
        assert difference(picture_then, picture(net, opt)) is None
    assert torch.equal(ckpt.load(parent / "third").extra["a"], torch.ones(100))


def in_the_background(parent: Path) -> list[str]:
    for number, part in enumerate((two_in_a_row, two_optimizers)):
        where = parent / str(number)
        where.mkdir(exist_ok=True)
        dist.barrier()
        part(where)
        dist.barrier()
    return train_while_saving(parent)


@pytest.mark.parametrize("world_size", [1, 2])
def test_saving_in_the_background(tmp_path: Path, world_size: int) -> None:
    for wrong in run_ranks(in_the_background, world_size, tmp_path):
        assert not wrong, wrong


def one_rank_was_told(parent: Path) -> None:
    """A failure that one rank has waited for and the others have not is raised on all of them."""
    net, opt = build(1, 1)
    ckpt.save(parent / "one", opt, net)
    for save in (ckpt.save, ckpt.async_save):
        failing = ckpt.async_save(parent / "one", opt, net)
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="exists already"):
                failing.wait()
        with pytest.raises(RuntimeError, match="exists already"):
            save(parent / "two", opt, net)
    ckpt.save(parent / "two", opt, net)


def test_no_rank_goes_on_alone_after_a_failure_in_the_background(tmp_path: Path) -> None:
    run_ranks(one_rank_was_told, 2, tmp_path)


PROGRAM = """
import sys, time, torch
from shardstep import ZeroRedundancyOptimizer, checkpoint as ckpt
from shardstep.checkpoint import write as job

if len(sys.argv) > 2:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[3]), world_size=2
    )

write = job.write
def slow(*args):
    time.sleep(0.5)
    return write(*args)
job.write = slow
param = torch.nn.Parameter(torch.arange(1000.0))
opt = ZeroRedundancyOptimizer([("p", param)], torch.optim.SGD, lr=0.1, momentum=0.9)
param.grad = torch.ones(1000)
opt.step()
ckpt.async_save(sys.argv[1], opt, extra={"p": param.detach()})
with torch.no_grad():
    param.zero_()
"""


@pytest.mark.slow
def test_a_program_that_ends_finishes_its_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "step-1")], check=True)
    expected = torch.arange(1000.0) - 0.1
    assert torch.equal(ckpt.load(tmp_path / "step-1").extra["p"], expected)


@pytest.mark.slow
def test_two_ranks_that_end_finish_their_save(tmp_path: Path) -> None:
    """One of them long before the other, which still needs it."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "step-1"), str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    expected = torch.arange(1000.0) - 0.1
    assert torch.equal(ckpt.load(tmp_path / "step-1").extra["p"], expected)


def without_a_group(parent: Path) -> None:
    """A default group that is made anew is the one that the next save talks to."""
    ckpt.async_save(parent / "one", extra=torch.ones(100)).wait()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(str(parent / "store"), 2)
    rank = int(os.environ.get("SAVED_RANK", "0"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ckpt.async_save(parent / "two", extra=torch.ones(100)).wait()
    dist.barrier()


def remake_group(parent: Path) -> list[str]:
    os.environ["SAVED_RANK"] = str(dist.get_rank())
    without_a_group(parent)
    return [name for name in names(parent) if name != "store"]


def test_the_process_group_may_be_made_anew(tmp_path: Path) -> None:
    assert run_ranks(remake_group, 2, tmp_path) == [["one", "two"]] * 2


def in_a_subgroup(parent: Path) -> str:
    """Ranks 1 and 2 of three; the first takes no part, and a save of all is another matter."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return "outside"
    torch.manual_seed(1)
    net = Net()
    opt = ZeroRedundancyOptimizer(
        net.named_parameters(), optim.SGD, process_group=group, lr=0.0, momentum=0.5
    )
    set_step(net, opt, 1)
    ckpt.save(parent / "step-1", opt, net, {"step": 1})
    ckpt.async_save(parent / "again", opt, net, {"step": 1}).wait()
    for name in ("step-1", "again"):
        opt.optim.state.clear()
        with torch.no_grad():
            for param in net.parameters():
                param.zero_()
        assert ckpt.load(parent / name, opt, net).extra == {"step": 1}
        check_step(net, opt, 1)
    return "inside"


def test_a_subgroup_saves_by_itself(tmp_path: Path) -> None:
    assert run_ranks(in_a_subgroup, 3, tmp_path) == ["outside", "inside", "inside"]
    net, opt = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.load(tmp_path / "step-1", opt, net)
    check_step(net, opt, 1)
