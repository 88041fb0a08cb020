"""Does all kinds of user actions in turn for some minutes, in every mode, and watches resources.

    python tests/faults/soak.py --minutes 20
    python tests/faults/soak.py --cycles 300 --modes module --actions freeze --megabytes 0.5

Ranks hold one optimizer per mode. Each cycle does every action in every mode, then compares the
parameters of all ranks, and notes memory, descriptors and threads. These must be as they were
after the first third of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import gc
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / each) for each in (".", "src", "tests/support", "examples")]
# torch keeps a record of the last 2,000 collectives, about 1 KB each.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from models import ADAMW, MLP_PROBLEM, consolidated  # noqa: E402
from ranks import run_ranks  # noqa: E402
from scenarios import renew, sharded  # noqa: E402
from torch import nn  # noqa: E402

from shardstep import checkpoint  # noqa: E402

MODES = ("module", "drop-in", "register", "hook", "interleaved")
ACTIONS = (
    *("train", "evaluate", "options", "edit_groups", "accumulate", "freeze"),
    *("save", "save_later", "load", "consolidate", "copy"),
)
APART = ("clip", "closure", "closure_that_raises", "add_group")
"""Actions where the loop takes the step, not backward."""


class InjectedError(RuntimeError):
    """The error of a user's code."""


class Soak:
    """The optimizer of one mode, and the actions."""

    def __init__(self, mode: str, folder: Path, actions: tuple[str, ...]) -> None:
        self.mode = mode
        self.folder = folder / mode
        self.step = 0
        self.build()
        self.apart = mode in ("module", "drop-in")
        possible = [*ACTIONS, *(APART if self.apart else ()), "rebuild"]
        if mode == "module":
            possible.insert(-1, "recover")
        self.actions = [name for name in possible if name in actions or not actions]

    def build(self) -> None:
        torch.manual_seed(0)
        self.setup = sharded(self.mode, MLP_PROBLEM.fresh(), ADAMW)

    def rebuild(self) -> None:
        checkpoint.save(self.folder / "rebuild", self.setup.opt, self.setup.module)
        del self.setup
        self.build()
        checkpoint.load(self.folder / "rebuild", self.setup.opt, self.setup.module)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / "rebuild")
        dist.barrier()

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.step += 1
            self.setup.backward(self.step % 50)
            self.setup.finish()

    def accumulate(self) -> None:
        with self.setup.no_sync():
            self.setup.backward(1)
        self.train(1)

    def clip(self) -> None:
        self.setup.backward(2)
        self.setup.clip(0.5)
        self.setup.finish()

    def evaluate(self) -> None:
        self.setup.module.eval()
        with torch.no_grad():
            MLP_PROBLEM.loss(self.setup.model, 3)
        self.setup.module.train()

    def options(self) -> None:
        for group in self.setup.opt.param_groups:
            group["lr"] = 1e-3 / (1 + self.step % 7)
        self.train(1)

    def edit_groups(self) -> None:
        """Rebind the groups, and add and delete an option."""
        opt = self.setup.opt
        opt.param_groups = [{**group, "mine": self.step} for group in opt.param_groups]
        self.train(1)
        for group in opt.param_groups:
            del group["mine"]
        self.train(1)

    def freeze(self) -> None:
        first = next(self.setup.module.parameters())
        for wanted in (False, True):
            first.requires_grad_(wanted)
            if self.mode == "drop-in":
                renew(self.setup)
            if self.apart:
                self.train(1)

    def copy(self) -> None:
        copied = copy.deepcopy(self.setup.module)
        with torch.no_grad():
            MLP_PROBLEM.loss(copied, 5)

    def add_group(self) -> None:
        """Add a group to another optimizer: the one that is watched must not grow."""
        setup = sharded(self.mode, MLP_PROBLEM.fresh(), ADAMW)
        setup.module.extra = nn.Linear(4, 4)
        renew(setup)
        setup.opt.add_param_group({"params": list(setup.module.extra.parameters())})
        setup.module.extra(setup.model(torch.ones(2, 16))).square().mean().backward()
        setup.finish()
        setup.opt.verify()

    def closure(self) -> None:
        self.setup.opt.step(lambda: self.setup.backward(4))
        self.setup.opt.zero_grad()

    def closure_that_raises(self) -> None:
        """Let all ranks catch an error of the closure."""

        def closure() -> None:
            raise InjectedError

        with contextlib.suppress(InjectedError):
            self.setup.opt.step(closure)

    def recover(self) -> None:
        try:
            if dist.get_rank() == self.step % dist.get_world_size():
                self.step += 1
                raise InjectedError
            self.train(1)
        except RuntimeError:
            self.setup.opt.recover()

    def save(self) -> None:
        path = self.folder / f"step-{self.step}"
        checkpoint.save(path, self.setup.opt, self.setup.module, {"step": self.step}, keep_last=2)
        loaded = checkpoint.resume(self.folder, self.setup.opt, self.setup.module)
        assert loaded is not None
        assert loaded.extra["step"] == self.step

    def save_later(self) -> None:
        path = self.folder / f"later-{self.step}"
        checkpoint.async_save(path, self.setup.opt, self.setup.module, keep_last=2)
        self.train(2)

    def load(self) -> None:
        saved = consolidated(self.setup.opt)
        self.setup.opt.load_state_dict(saved)
        self.train(1)

    def consolidate(self) -> None:
        self.setup.opt.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            self.setup.opt.state_dict()

    def digest(self) -> str:
        digest = hashlib.sha256()
        for param in self.setup.module.parameters():
            digest.update(param.detach().numpy().tobytes())
        return digest.hexdigest()


def resources() -> dict[str, float]:
    """Return this process's memory in megabytes, descriptors and threads."""
    gc.collect()
    # Give back what malloc keeps of freed memory: threads that came and went leave much of it.
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
    }


def soak(
    minutes: float,
    cycles: float,
    folder: Path,
    modes: tuple[str, ...],
    actions: tuple[str, ...],
) -> list[dict[str, float]]:
    """Run cycles until the time is over. Return the resources after each."""
    warnings.simplefilter("ignore")
    soaks = [Soak(mode, folder, actions) for mode in modes]
    end = time.monotonic() + 60 * minutes
    seen: list[dict[str, float]] = []
    while True:
        # One clock decides, so that all ranks do as many cycles.
        over = torch.tensor(float(time.monotonic() > end or len(seen) >= cycles))
        dist.broadcast(over, 0)
        if over:
            return seen
        for each in soaks:
            for action in each.actions:
                getattr(each, action)()
        mine = [each.digest() for each in soaks]
        theirs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(theirs, mine)
        assert all(other == mine for other in theirs), f"ranks differ after {len(seen)} cycles"
        seen.append(resources())


def growth(seen: list[dict[str, float]]) -> dict[str, float]:
    """Return by how much each resource grew in the last two thirds of the time."""
    third = max(1, len(seen) // 3)
    return {
        key: max(each[key] for each in seen[-third:]) - max(each[key] for each in seen[: 2 * third])
        for key in seen[0]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--cycles", type=float, default=float("inf"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--actions", default="", help="those to do, separated by commas; all")
    parser.add_argument("--megabytes", type=float, default=4.0, help="growth allowed to a rank")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        modes = tuple(given.modes.split(","))
        actions = tuple(filter(None, given.actions.split(",")))
        args = (given.minutes, given.cycles, Path(folder), modes, actions)
        ranks = run_ranks(soak, given.ranks, *args, timeout=60 * given.minutes + 300, fresh=True)
        failed = False
        for rank, seen in enumerate(ranks):
            grown = growth(seen)
            print(f"rank {rank}: {len(seen)} cycles, at first {seen[0]}, at last {seen[-1]}")
            print(f"rank {rank}: growth {grown}")
            failed |= grown.pop("memory") > given.megabytes or any(n > 0 for n in grown.values())
        return int(failed)
    return 1


if __name__ == "__main__":
    import soak as this  # so that ranks can import it

    sys.exit(this.main())
