"""Saving in the background: of the moment of the call, while training goes on, or raised on all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hostile import build, names, picture
from on_ranks import on_ranks
from problems import difference
from ranks import run_ranks
from test_checkpoint_fit import run_here
from test_checkpoint_killed import check_step, make, set_step

from shardstep import ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt
from shardstep.checkpoint import safetensors
from shardstep.checkpoint import write as job


class Gate:
    """Holds writing up until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self._write = job.write

    def __call__(self, *args: Any) -> Any:
        assert self.open.wait(30)
        return self._write(*args)


def train(net: Any, opt: ZeroRedundancyOptimizer) -> None:
    for param in net.parameters():
        param.grad = torch.randn_like(param)
    opt.step()


def same_as(expected: Any, path: Path, extra: Any = None) -> None:
    """What a checkpoint holds is this picture."""
    net, opt = build(3, 1)
    assert ckpt.load(path, opt, net).extra == extra
    assert difference(expected, picture(net, opt)) is None, path


def train_while_saving(parent: Path) -> None:
    """Training goes on while files are written, and the checkpoint is of the moment of the call."""
    net, opt = build(1, 2)
    ckpt.save(parent / "sync", opt, net, {"step": 2})
    expected = picture(net, opt)
    gate = Gate()
    with mock.patch.object(job, "write", gate):
        saving = ckpt.async_save(parent / "async", opt, net, {"step": 2})
        for _ in range(3):
            train(net, opt)
            net.norm.running_mean.add_(1)
            for group in opt.param_groups:
                group["lr"] *= 0.5
        assert not saving.done()
        assert difference(expected, picture(net, opt)) is not None
        gate.open.set()
        assert saving.wait() == parent / "async"
        assert saving.done()
    for name in ("sync", "async"):
        same_as(expected, parent / name, {"step": 2})


def two_in_a_row(parent: Path) -> None:
    """The second waits for the first, and each has the values of its call."""
    net, opt = build(1, 2)
    pictures = []
    for number in range(3):
        pictures.append(picture(net, opt))
        ckpt.async_save(parent / f"step-{number}", opt, net, keep_last=2)
        train(net, opt)
    ckpt.save(parent / "last", opt, net)
    for number in (1, 2):
        same_as(pictures[number], parent / f"step-{number}")


def two_optimizers(parent: Path) -> None:
    """Each optimizer runs one save, and raises the failures of that save only."""
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
        same_as(picture_then, parent / name)
    assert torch.equal(ckpt.load(parent / "third").extra["a"], torch.ones(100))


@pytest.mark.parametrize("world_size", [1, 2])
def test_saving_in_the_background(tmp_path: Path, world_size: int) -> None:
    run_ranks(run_here, world_size, tmp_path, two_in_a_row, two_optimizers, train_while_saving)


@on_ranks(2)
def test_no_rank_goes_on_alone_after_a_failure_in_the_background(tmp_path: Path) -> None:
    """A failure that one rank has waited for and the others have not is raised on all of them."""
    net, opt = build(1, 1)
    ckpt.save(tmp_path / "one", opt, net)
    for save in (ckpt.save, ckpt.async_save):
        failing = ckpt.async_save(tmp_path / "one", opt, net)
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="exists already"):
                failing.wait()
        with pytest.raises(RuntimeError, match="exists already"):
            save(tmp_path / "two", opt, net)
    ckpt.save(tmp_path / "two", opt, net)


PROGRAM = """
import sys, time, torch
from shardstep import ZeroRedundancyOptimizer, checkpoint as ckpt
from shardstep.checkpoint import write as job

if len(sys.argv) > 3:
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
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_program_that_ends_finishes_its_save(tmp_path: Path, world_size: int) -> None:
    """With two ranks, one ends long before the other, which still needs it."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "step-1")]
    store = [] if world_size == 1 else [str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, *store, str(rank)]) for rank in range(world_size)]
    assert [rank.wait(60) for rank in ranks] == [0] * world_size
    expected = torch.arange(1000.0) - 0.1
    assert torch.equal(ckpt.load(tmp_path / "step-1").extra["p"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "import atexit; atexit.register(print, 'later')"])
def test_a_save_that_failed_and_was_not_waited_for_ends_the_program_with_an_error(
    tmp_path: Path, end: str
) -> None:
    (tmp_path / "taken").mkdir()
    command = [sys.executable, "-c", PROGRAM + end, str(tmp_path / "taken")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("shardstep: "))
    assert re.search(r"saving to .*taken in the background failed: .*exists already.*wait", said)
    assert "later" in done.stdout or "later" not in end


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_sigterm_during_a_save_leaves_nothing_behind(tmp_path: Path, world_size: int) -> None:
    """As torchrun ends ranks: all at once, in the midst of a save."""
    parent = tmp_path / "run"
    program = PROGRAM + "\ntime.sleep(60)"
    store = [] if world_size == 1 else [str(tmp_path / "store")]
    command = [sys.executable, "-c", program, str(parent / "step-1"), *store]
    # Coverage would handle the signal in its own way.
    env = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE")}
    ranks = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(world_size)]
    while not (parent.exists() and names(parent) == [".step-1.saving"]):
        time.sleep(0.01)
    for rank in ranks:
        rank.terminate()
    assert [rank.wait(60) for rank in ranks] == [-signal.SIGTERM] * world_size
    assert names(parent) == []


@on_ranks(2)
def test_only_the_rank_with_the_folder_handles_sigterm(tmp_path: Path) -> None:
    """A rank that waits for others runs no Python code, so a handler would delay its end."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    handled = []

    def watched(*args: Any) -> Any:
        handled.append(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        return safetensors.write(*args)

    net, opt = make()
    with mock.patch.object(job, "write", watched):
        ckpt.save(tmp_path / "one", opt, net)
        running = ckpt.async_save(tmp_path / "two", opt, net)
        handled.append(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        running.wait()
    assert set(handled) == {dist.get_rank() == 0}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@on_ranks(2)
def test_the_process_group_may_be_replaced(tmp_path: Path) -> None:
    """A default group that is made again is the one that the next save talks to."""
    rank = dist.get_rank()
    ckpt.async_save(tmp_path / "one", extra=torch.ones(100)).wait()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ckpt.async_save(tmp_path / "two", extra=torch.ones(100)).wait()
    dist.barrier()
    assert names(tmp_path) == ["one", "store", "two"]


def in_a_subgroup(parent: Path) -> str:
    """Ranks 1 and 2 of three; the first takes no part, and a save of all is another matter."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return "outside"
    net, opt = make(process_group=group)
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
