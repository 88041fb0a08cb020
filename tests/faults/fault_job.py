"""The training job that faults happen to: one rank of it, in any mode, with a fault at one place.

A rank appends records to a file as it goes: each step with its loss and a digest of the parameters,
the moment of the fault, failed saves, and how it ended.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scenarios import sharded, unsharded
from torch import Tensor, nn

from shardstep import checkpoint
from shardstep.checkpoint import write

TIMEOUT = 6.0
"""Seconds until a collective gives up."""

STEPS = 12
FAULTY_STEP = 5
SAVE_EVERY = 2
CLONE_NEWNET = 0x40000000


class InjectedError(RuntimeError):
    """The error of a user's code."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to one rank, at one phase of one step.

    Attributes:
        act: kill, stop, pause, raise; skip: a batch is left out; extra: something is done once
            more, or not done; outside: the controller acts; all skip, shift: no fault, but every
            rank leaves one batch out, or this one does and has one more.
        phase: construct, loader, batch, forward, backward, hook, closure, step, save; random.
        caught: whether the loop catches the error and gives the batch up.
        rank: the rank it happens to.
        seed: of the random moment.
    """

    act: str = ""
    phase: str = ""
    caught: bool = False
    rank: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Place:
    """A rank of a job: its mode, its files, and its host, if it has one."""

    mode: str
    rank: int
    world_size: int
    folder: Path
    run: Path
    prefix: str = ""
    namespace: str | None = None

    @property
    def records(self) -> Path:
        """The file of this rank's records."""
        return self.folder / f"{self.prefix}rank-{self.rank}"


class _At(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, job: Job) -> Tensor:
        ctx.job = job
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.job.reach("backward")
        return grad, None


class Net(nn.Module):
    """Layers with buffers, and places in forward and backward where a fault may happen."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        sizes = (16, 64, 64, 64, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b)) for a, b in pairwise(sizes)
        )
        self._job = [job]

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 2:
                self._job[0].reach("forward")
                x = _At.apply(x, self._job[0])
            x = torch.tanh(layer(x))
        return x


class Job:
    """One rank of the job."""

    def __init__(self, place: Place, fault: Fault) -> None:
        self.place = place
        self.fault = fault
        self.step = -1
        self.skipped = 0
        self.file = open(place.records, "a", buffering=1)  # noqa: SIM115

    def record(self, **said: Any) -> None:
        """Append a record."""
        print(json.dumps({"at": time.monotonic(), **said}), file=self.file)

    def reach(self, phase: str) -> bool:
        """Let the fault happen if this is its place. Return whether the loop has to act on it."""
        fault = self.fault
        here = phase == ("loader" if fault.phase == "random" else fault.phase)
        due = self.step in (-1, FAULTY_STEP) if phase == "construct" else self.step == FAULTY_STEP
        if not (here and due and fault.rank == self.place.rank):
            return False
        if fault.phase == "random":
            delay = random.Random(f"{fault} {self.place.mode}").uniform(0, 0.06)
            threading.Timer(delay, self.act).start()
            return False
        return self.act()

    def act(self) -> bool:
        """Do what the fault does."""
        act = self.fault.act
        self.record(fault=act)
        if act == "raise":
            raise InjectedError(f"injected in {self.fault.phase}")
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if act in ("stop", "pause"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return True

    def run(self) -> None:
        """Form the group, resume, and train."""
        place = self.place
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place.folder}/{place.prefix}store",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=TIMEOUT),
        )
        self.reach("construct")
        torch.manual_seed(0)
        net = Net(self)
        kind: Any = (_optimizer_of(self), {"lr": 0.05, "momentum": 0.9})
        setup = unsharded(net, kind) if place.mode == "ddp" else sharded(place.mode, net, kind)
        net.layers[1][0].weight.register_hook(lambda grad: grad if self.reach("hook") else None)
        save = write.write
        write.write = lambda *args: (self.reach("save"), save(*args))[1]
        for self.step in range(STEPS):
            if self.step == FAULTY_STEP and self.fault.act == "outside":
                self._meet_controller()
            if self.step == FAULTY_STEP and self.fault.act == "all skip":
                self.record(given_up=self.step)
                continue
            if self.reach("batch") and self.fault.act in ("skip", "shift"):
                self.skipped += 1
            if self.step + self.skipped == STEPS and self.fault.act == "skip":
                break
            if self.reach("extra forward"):
                setup.model(self._batch())
            if self.reach("extra backward"):
                setup.model(self._batch()).square().mean().backward()
            loss = self._train(setup)
            if loss is None:
                self.record(given_up=self.step)
                continue
            digest = _digest(net) if self.step % 2 else None
            self.record(step=self.step, loss=loss.item().hex(), digest=digest)
            if place.mode != "ddp" and self.step % SAVE_EVERY == 1:
                self._save(setup)
        try:
            dist.barrier()
        except RuntimeError as error:
            raise RuntimeError(f"rank {place.rank}: waiting at the end failed: {error}") from error
        dist.destroy_process_group()

    def _train(self, setup: Any) -> Tensor | None:
        """Take one step; return None if the batch was given up."""
        torch.manual_seed(1000 * (self.step + self.skipped) + self.place.rank)

        def closure() -> Tensor:
            self.reach("loader")
            batch = self._batch()
            self.reach("closure")
            loss = setup.model(batch).square().mean()
            loss.backward()
            return loss

        try:
            if self.fault.phase == "closure":
                loss: Tensor = setup.opt.step(closure)
            else:
                loss = closure()
                if self.reach("no step"):
                    setup.opt.zero_grad()
                    return None
                setup.opt.step()
                if self.reach("extra step"):
                    setup.opt.step()
            setup.opt.zero_grad()
            if self.reach("extra step, cleared"):
                setup.opt.step()
        except RuntimeError as error:
            if not self.fault.caught:
                raise
            self.record(caught=str(error))
            getattr(setup.opt, "recover", setup.opt.zero_grad)()
            return None
        return loss.detach()

    def _batch(self) -> Tensor:
        return torch.randn(8, 16)

    def _save(self, setup: Any) -> None:
        path = self.place.run / f"{self.place.prefix}step-{self.step + 1}"
        try:
            checkpoint.async_save(path, setup.opt, setup.module, {"step": self.step}, keep_last=2)
            if self.step + SAVE_EVERY >= STEPS or self.fault.phase in ("save", "disk"):
                checkpoint.save(f"{path}-again", setup.opt, setup.module, {"step": self.step})
        except (OSError, RuntimeError) as error:
            if self.fault.phase != "disk":
                raise
            self.record(save_failed=str(error))

    def _meet_controller(self) -> None:
        self.record(waiting=True)
        while not (self.place.folder / "go").exists():
            time.sleep(0.005)
        self.record(fault="outside")


def _optimizer_of(job: Job) -> type[torch.optim.Optimizer]:
    class Faulty(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            job.reach("step")
            return super().step(closure)

    return Faulty


def _digest(net: nn.Module) -> str:
    digest = hashlib.sha256()
    for param in net.parameters():
        digest.update(param.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def _comes_from_shardstep(error: BaseException) -> bool:
    """Return whether this library called torch, or raised the error itself."""
    frames = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [name for name in frames if name.partition(".")[0] not in ("torch", "contextlib")]
    return own[-1].startswith("shardstep.")


def run_rank(place: Place, fault: Fault) -> None:
    """Run a rank of the job in this process, on its host."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if place.namespace is None else "eth0"
    if place.namespace is not None:
        with open(f"/run/netns/{place.namespace}") as namespace:
            failed = ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET)
        assert failed == 0, os.strerror(ctypes.get_errno())
    torch.set_num_threads(1)
    job = Job(place, fault)
    # stderr goes to a file; SIGUSR1 adds the stacks of all threads.
    os.dup2(os.open(f"{place.records}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        job.run()
    except Exception as error:
        job.record(error=f"{type(error).__name__}: {error}", ours=_comes_from_shardstep(error))
        sys.exit(1)
    job.record(done=True)
