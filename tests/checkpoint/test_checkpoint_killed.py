"""A run that is killed at any moment goes on from a complete checkpoint.

A run takes steps and saves each of them, keeping two. It is killed, and the next one goes on from
the newest checkpoint. The values of a step depend on its number alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hostile import build, names
from ranks import RankFailure, run_ranks
from torch import nn, optim

from shardstep import ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt
from shardstep.checkpoint import files, safetensors, staging
from shardstep.checkpoint import write as job
from shardstep.checkpoint.staging import find_checkpoints

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


def make(**options: Any) -> tuple[Net, ZeroRedundancyOptimizer]:
    net = Net()
    options = {"lr": 0.0, "momentum": 0.5, "dampening": 0.0, **options}
    return net, ZeroRedundancyOptimizer(net.named_parameters(), optim.SGD, **options)


def slowly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Take time before and after."""
    time.sleep(0.005)
    result = function(*args, **kwargs)
    time.sleep(0.005)
    return result


def stretch() -> None:
    """Make every phase of a save long enough to be hit, in this rank."""
    safetensors.CHUNK_NBYTES = 16 * 2**10
    for name in ("fsync", "rename", "unlink", "mkdir"):
        setattr(os, name, partial(slowly, getattr(os, name)))
    shutil.rmtree = partial(slowly, shutil.rmtree)


def load_newest(parent: Path, net: Net, opt: ZeroRedundancyOptimizer) -> int:
    """The newest checkpoint loads, if there is one, and is of the step that it says."""
    newest = ckpt.latest(parent)
    if newest is None:
        return 0
    loaded = ckpt.resume(parent, opt, net)  # and continue its run, which may remove what it saved
    assert loaded is not None
    assert loaded.path == newest
    step = int(loaded.extra["step"])
    assert newest.name == f"step-{step}"
    check_step(net, opt, step)
    return step


def verify_all(parent: Path) -> int:
    """Load the newest. No folder that can be seen is half a checkpoint."""
    for path in parent.iterdir():
        assert path.name.startswith(".") or path in find_checkpoints(parent)[0], path
    return load_newest(parent, *make())


def go_on(parent: Path, signs: Path, asynchronous: bool, saves: int) -> None:
    """Load the newest checkpoint, check it, and save the steps after it until killed."""
    net, opt = make()
    step = load_newest(parent, net, opt)
    stretch()
    for number in range(step + 1, step + 1 + saves):
        # Dampening would mix the last step's moment into this one's.
        opt.optim.state.clear()
        set_step(net, opt, number)
        (signs / f"{os.getpid()}-{dist.get_rank()}").touch()
        save = ckpt.async_save if asynchronous else ckpt.save
        save(parent / f"step-{number}", opt, net, {"step": number}, keep_last=2)


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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("moments", "hits"), [(8, 1), (50, 10)])
def test_killed_at_any_moment(tmp_path: Path, moments: int, hits: int) -> None:
    """Kill so many runs, at least `hits` of them in the midst of a save."""
    choose = random.Random(moments)
    parent = tmp_path / "run"
    parent.mkdir()
    in_midst = 0
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
        # The survivor raises. Its checkpoint was loaded and checked before the kill.
        said = str(caught.value)
        for bad in ("AssertionError", "CheckpointError"):
            assert bad not in said, said
        # Until the timeout, torch waits for a peer that was killed while it made the group of the
        # first save in the background.
        assert "was still running" not in said or "in _new_process_group_helper" in said, said
        in_midst += any(name.startswith(".") for name in found)
        verify_all(parent)
    # What was left behind is no obstacle, and is gone after the next save.
    run_ranks(go_on, 2, parent, tmp_path / "signs-0", False, 1, timeout=60)
    assert not [name for name in names(parent) if name.startswith(".")], names(parent)
    assert len(find_checkpoints(parent)[0]) in (1, 2)
    verify_all(parent)
    assert in_midst >= hits


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
    load_newest(parent, net, opt)
    opt.optim.state.clear()
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
        for module in (owner, files, staging, job):
            if getattr(module, name, None) is function:
                setattr(module, name, deadly)
    ckpt.save(parent / f"step-{step}", opt, net, {"step": step}, keep_last=1)


@pytest.mark.slow
def test_killed_in_every_phase(tmp_path: Path) -> None:
    """Before the rename the old checkpoint is the newest, after it the new one is."""
    net, opt = make()
    set_step(net, opt, 1)
    ckpt.save(tmp_path / "step-1", opt, net, {"step": 1})
    step = 1
    for phase in PHASES:
        staging.remove_leftovers(tmp_path)  # or the next save would be killed at that
        with pytest.raises(RankFailure, match="exit code -9"):
            run_ranks(die_in, 2, phase, tmp_path, step + 1, timeout=60)
        step += list(PHASES).index(phase) >= list(PHASES).index("the folder is renamed")
        assert verify_all(tmp_path) == step, phase
    opt.optim.state.clear()
    set_step(net, opt, step + 1)
    ckpt.save(tmp_path / f"step-{step + 1}", opt, net, {"step": step + 1}, keep_last=1)
    assert names(tmp_path) == [f"step-{step + 1}"]


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
