"""The table of faults: what happens, to which rank, and what may come of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from benchmarks.netns import Host
from fault_harness import GRACE, Outcome, mend_link, run_trial, set_link, set_rate
from fault_job import TIMEOUT, Fault

from shardstep import checkpoint

REFERENCES = {"": Fault(), "all skip": Fault("all skip"), "shift": Fault("shift", "batch")}
"""Jobs to compare with: without a fault, without the batch that is given up, and with the batches
of a rank that leaves one out and does not end before the others."""

MODES = ("module", "drop-in", "register", "hook", "interleaved")
RAISES = ("raises at once", "raises after the timeout")
EQUAL = ("equal",)
SKIPS = ("skips the batch",)


@dataclass(frozen=True)
class Trial:
    """A fault and its allowed outcomes.

    Attributes:
        fault: what happens inside the job.
        allowed: verdicts.
        modes: those in which it can happen.
        link: what happens to the link of the last rank; needs hosts.
        jobs: prefixes of jobs that share a folder.
        small_disk: whether checkpoints go to a file system that is too small.
        world_size: the number of ranks.
        at_once: the modes in which no rank may wait until the timeout.
    """

    fault: Fault
    allowed: tuple[str, ...] = RAISES
    modes: tuple[str, ...] = MODES
    link: Callable[[Host], None] | None = None
    jobs: tuple[str, ...] = ("",)
    small_disk: bool = False
    world_size: int = 2
    at_once: tuple[str, ...] = ()

    def allows(self, verdict: str, mode: str) -> bool:
        """Return whether this may come of it."""
        late = verdict == "raises after the timeout" and mode in self.at_once
        return verdict in self.allowed and not late

    @property
    def reference(self) -> tuple[str, int]:
        """The job to compare with: its name, and its number of ranks."""
        skips = self.allowed == SKIPS
        name = "shift" if self.fault.act == "skip" else "all skip" if skips else ""
        return name, self.world_size


class References(dict[tuple[str, int], dict[str, list[Outcome]]]):
    """The jobs to compare with, each run when it is first asked for."""

    def __init__(self, modes: Sequence[str], hosts: list[Host] | None, folder: Path) -> None:
        self._modes, self._hosts, self._folder = modes, hosts, folder

    def __missing__(self, key: tuple[str, int]) -> dict[str, list[Outcome]]:
        name, world_size = key
        folder = self._folder / f"{world_size} {name}"
        self[key] = run_trial(
            self._modes, REFERENCES[name], self._hosts, folder, patience=60, world_size=world_size
        )
        return self[key]


def cut_briefly(host: Host) -> None:
    """Cut the link for a second, from now."""
    set_link(host, False)
    time.sleep(1.0)
    set_link(host, True)


def run_named(
    name: str, modes: Sequence[str], hosts: list[Host] | None, folder: Path
) -> dict[str, list[Outcome]]:
    """Run a trial of the table; skip the test if it needs what this machine does not have."""
    trial = TRIALS[name]
    patience = TIMEOUT + GRACE if trial.allowed != EQUAL else 60
    if trial.link is not None and hosts is None:
        pytest.skip("network namespaces need root, ip and tc")
    if trial.small_disk and os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    with ExitStack() as stack:
        if trial.small_disk:
            for mode in modes:
                stack.enter_context(small_disk(folder / mode.replace(" ", "-") / "run"))
        if trial.link is not None:
            assert hosts is not None
            stack.callback(mend_link, hosts[trial.world_size - 1])
        act = partial(trial.link, hosts[trial.world_size - 1]) if trial.link and hosts else None
        outcomes = run_trial(
            modes, trial.fault, hosts, folder, act, trial.jobs, patience, trial.world_size
        )
        for mode in modes:
            if trial.small_disk:
                check_small_disk(outcomes[mode][0])
            if len(trial.jobs) > 1 and mode != "ddp":
                for name in (f"{job}step-{n}" for job in trial.jobs for n in (10, 12)):
                    checkpoint.verify(outcomes[mode][0].run / name)
        return outcomes


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """Mount a file system that holds two checkpoints."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", path], check=True)
    try:
        yield
        shutil.copytree(path, path.with_name("copy"))
    finally:
        subprocess.run(["umount", path], check=True)
    path.rmdir()
    path.with_name("copy").rename(path)


def check_small_disk(outcome: Outcome) -> None:
    """Check that a save failed on every rank, for the right reason, and left nothing."""
    for rank in outcome.ranks:
        failed = rank.all("save_failed")
        assert failed, f"rank {rank.place.rank} saved everything"
        assert all("No space left" in said for said in failed), failed
    assert not [path for path in outcome.run.iterdir() if path.name.startswith(".")]


OUTSIDE = Fault("outside")
TWO_MODES = ("module", "drop-in")

TRIALS: dict[str, Trial] = {
    **{
        f"a rank is killed in {phase}": Trial(Fault("kill", phase))
        for phase in ("construct", "loader", "forward", "backward", "step", "save")
    },
    **{
        f"a rank is killed at a random moment ({seed})": Trial(Fault("kill", "random", seed=seed))
        for seed in range(3)
    },
    **{
        f"a rank stops in {phase}": Trial(Fault("stop", phase))
        for phase in ("construct", "loader", "forward", "backward", "step", "save")
    },
    "a rank stops at a random moment": Trial(Fault("stop", "random")),
    "a rank stops for 1.5 s": Trial(Fault("pause", "random"), EQUAL),
    "the link is cut for 1 s": Trial(OUTSIDE, EQUAL, link=cut_briefly),
    "the link is cut": Trial(OUTSIDE, link=lambda host: set_link(host, False)),
    "the link slows to 1 mbit/s": Trial(OUTSIDE, EQUAL, link=lambda host: set_rate(host, "1mbit")),
    **{
        f"{phase} raises on a rank": Trial(Fault("raise", phase))
        for phase in ("loader", "forward", "backward", "hook", "step")
    },
    "closure raises on a rank": Trial(Fault("raise", "closure"), modes=TWO_MODES),
    **{
        f"{phase} raises on a rank, and all skip the batch": Trial(
            Fault("raise", phase, caught=True), SKIPS, ("module",)
        )
        for phase in ("loader", "forward", "backward", "hook", "closure")
    },
    "a rank has one batch less": Trial(Fault("skip", "batch")),
    "a rank runs forward once more": Trial(
        Fault("extra", "extra forward"), (*EQUAL, *RAISES), at_once=("module",)
    ),
    **{
        f"a rank {what}": Trial(Fault("extra", phase), modes=TWO_MODES, at_once=("module",))
        for what, phase in {
            "runs backward once more": "extra backward",
            "leaves a step out": "no step",
            "steps once more": "extra step",
            "steps once more after zero_grad()": "extra step, cleared",
        }.items()
    },
    "the disk is full": Trial(Fault("", "disk"), EQUAL, small_disk=True),
    "two jobs save to one folder": Trial(Fault(), EQUAL, jobs=("a-", "b-")),
}

THREE = (
    "a rank is killed in backward",
    "a rank is killed in step",
    "a rank is killed at a random moment (0)",
    "a rank stops in backward",
    "a rank stops in step",
    "forward raises on a rank",
    "step raises on a rank",
    "backward raises on a rank, and all skip the batch",
    "a rank leaves a step out",
)
TRIALS |= {f"of three ranks, {name}": replace(TRIALS[name], world_size=3) for name in THREE}
