"""Runs trials: a fault in each of several modes at the same time, and what came of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.netns import Host, switched_hosts
from fault_job import TIMEOUT, Fault, Place, run_rank
from ranks import new_process

from shardstep import checkpoint

MOST_RANKS = 3
GRACE = 5.0
"""Seconds beyond the timeout that a process may live."""

PAUSE = 1.5
START = 60.0
"""Seconds until the fault has to have happened."""


@dataclass
class RankOutcome:
    """What one rank left."""

    place: Place
    records: list[dict[str, Any]]
    code: int | None  # None: it was still running at the deadline
    seconds: float  # from the fault to its end

    def all(self, key: str) -> list[Any]:
        """Return the values of all records with this key."""
        return [record[key] for record in self.records if key in record]

    @property
    def error(self) -> str | None:
        """The error that it ended with."""
        return next(iter(self.all("error")), None)

    @property
    def is_ours(self) -> bool:
        """Whether an operation of this library raised it, and not one of DDP or of the job."""
        return any(self.all("ours"))

    @property
    def is_torchs(self) -> bool:
        """Whether it is torch's own error: DDP's collective has waited."""
        error = self.error or "injected"
        return not self.is_ours and not any(s in error for s in ("injected", "at the end"))


@dataclass
class Outcome:
    """What became of one job."""

    mode: str
    fault: Fault
    run: Path
    ranks: list[RankOutcome] = field(default_factory=list)

    @property
    def others(self) -> list[RankOutcome]:
        """The ranks that the fault did not happen to."""
        spared = self.fault.act not in ("kill", "stop")
        return [each for each in self.ranks if spared or each.place.rank != self.fault.rank]

    def steps(self) -> list[list[tuple[int, str, str | None]]]:
        """Return the recorded steps of each rank."""
        return [
            [(r["step"], r["loss"], r["digest"]) for r in each.records if "step" in r]
            for each in self.ranks
        ]


@contextlib.contextmanager
def some_hosts() -> Iterator[list[Host] | None]:
    """Yield hosts on one switch where this is possible, else None."""
    try:
        hosts = switched_hosts(MOST_RANKS, "none")
        made = hosts.__enter__()
    except (RuntimeError, PermissionError):
        yield None
        return
    try:
        yield made
    finally:
        hosts.__exit__(None, None, None)


def run_trial(
    modes: Sequence[str],
    fault: Fault,
    hosts: list[Host] | None,
    folder: Path,
    outside: Callable[[], None] | None = None,
    jobs: Sequence[str] = ("",),
    patience: float = TIMEOUT + GRACE,
    world_size: int = 2,
) -> dict[str, list[Outcome]]:
    """Run the job in each mode, all at once. Return the outcomes of each mode's jobs.

    `outside` is called when all ranks wait for it. `jobs` are prefixes: jobs of one mode share the
    folder of checkpoints. A rank may live for `patience` seconds after the fault.
    """
    outcomes: dict[str, list[Outcome]] = {}
    started: list[tuple[Place, BaseProcess]] = []
    for mode in modes:
        here = folder / mode.replace(" ", "-")
        (here / "run").mkdir(parents=True, exist_ok=True)
        outcomes[mode] = [Outcome(mode, fault, here / "run") for _ in jobs]
        for prefix in jobs:
            for rank in range(world_size):
                host = None if hosts is None else hosts[rank].namespace
                place = Place(mode, rank, world_size, here, here / "run", prefix, host)
                place.records.touch()
                started.append((place, new_process(run_rank, place, fault)))
    try:
        if fault.act == "outside":
            _wait_for("waiting", started)
            if outside is not None:
                outside()
            for place, _ in started:
                (place.folder / "go").touch()
        ends = _watch(started, fault, patience)
    finally:
        for _, process in started:
            if process.is_alive():
                process.kill()
            process.join()
    for place, _ in started:
        code, end = ends[place]
        seconds = end - (_moment_of_fault(started, place) or end)
        outcome = outcomes[place.mode][list(jobs).index(place.prefix)]
        outcome.ranks.append(RankOutcome(place, _records(place), code, seconds))
    return outcomes


def _watch(
    started: Sequence[tuple[Place, BaseProcess]], fault: Fault, patience: float
) -> dict[Place, tuple[int | None, float]]:
    """Return each rank's exit code and end: None for one that lived too long after the fault."""
    ends: dict[Place, tuple[int | None, float]] = {}
    begin = time.monotonic()
    while len(ends) < len(started):
        time.sleep(0.02)
        for place, process in started:
            if place in ends:
                continue
            now, fell = time.monotonic(), _moment_of_fault(started, place)
            hit = fell is not None and place.rank == fault.rank
            if hit and fault.act == "pause" and now > fell + PAUSE:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
            peers = [peer for peer, _ in started if peer.folder == place.folder and peer != place]
            if process.exitcode is not None:
                ends[place] = process.exitcode, now
            elif hit and fault.act == "stop":
                if all(peer in ends for peer in peers):
                    ends[place] = -signal.SIGSTOP, now
            elif now > (begin + START if fell is None else fell + patience):
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.2)
                ends[place] = None, now
    return ends


def _moment_of_fault(started: Sequence[tuple[Place, BaseProcess]], of: Place) -> float | None:
    """Return when the fault happened in the job of this rank."""
    return next(
        (
            record["at"]
            for place, _ in started
            if (place.folder, place.prefix) == (of.folder, of.prefix)
            for record in _records(place)
            if "fault" in record
        ),
        None,
    )


def _records(place: Place) -> list[dict[str, Any]]:
    lines = place.records.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _wait_for(key: str, started: Sequence[tuple[Place, BaseProcess]]) -> None:
    deadline = time.monotonic() + START
    while not all(any(key in r for r in _records(place)) for place, _ in started):
        assert time.monotonic() < deadline, f"not all ranks came to {key!r}"
        time.sleep(0.02)


# ------------------------------------------------------------------------------------- outcomes


def wrong_steps(outcome: Outcome, reference: Outcome) -> list[int]:
    """Return the steps whose loss or parameters differ from those of a run without a fault."""
    expected = reference.steps()
    return sorted(
        {
            step[0]
            for steps, right in zip(outcome.steps(), expected, strict=True)
            for step in steps
            if step not in right
        }
    )


def verdict(outcome: Outcome, reference: Outcome) -> str:
    """Return what became of the job, in a few words."""
    if outcome.fault.act not in ("", "all skip") and not any(
        rank.all("fault") for rank in outcome.ranks
    ):
        return "the fault did not happen"
    if any(rank.code is None for rank in outcome.ranks):
        return "hangs"
    if any(rank.code < 0 for rank in outcome.others if rank.code is not None):
        return "dies"
    wrong = wrong_steps(outcome, reference)
    if wrong:
        ended = " without an error" if not any(r.error for r in outcome.ranks) else ", then raises"
        return f"wrong numbers{ended}"
    if all(rank.all("done") for rank in outcome.ranks):
        given_up = outcome.ranks[0].all("given_up")
        return "skips the batch" if given_up else "equal"
    slowest = max(rank.seconds for rank in outcome.others)
    return "raises at once" if slowest < TIMEOUT / 2 else "raises after the timeout"


def newest_is_right(outcome: Outcome, reference: Outcome) -> int | None:
    """Load the newest checkpoint here, and return its step; it has that step's parameters."""
    newest = checkpoint.latest(outcome.run)
    if newest is None:
        return None
    checkpoint.verify(newest)
    step: int = checkpoint.load(newest).extra["step"]
    weights = checkpoint.weights(newest)
    digest = hashlib.sha256()
    for name, value in weights.items():
        if not name.rpartition(".")[2].startswith(("running", "num_batches")):
            digest.update(value.numpy().tobytes())
    recorded = {s: d for steps in reference.steps() for s, _, d in steps}
    assert recorded[step] == digest.hexdigest()[:16], f"{newest} is not of step {step}"
    return step


# ------------------------------------------------------------------------- faults from outside


def set_link(host: Host, up: bool) -> None:
    """Cut a host off, or connect it again."""
    switch = host.namespace.rpartition("-")[0] + "-switch"
    _run(f"ip -n {switch} link set port{host.index} {'up' if up else 'down'}")


def set_rate(host: Host, rate: str) -> None:
    """Limit what a host sends."""
    shape = f"tbf rate {rate} burst 16kb latency 400ms"
    _run(f"tc -n {host.namespace} qdisc replace dev eth0 root {shape}")


def mend_link(host: Host) -> None:
    """Undo what was done to a host's link."""
    set_link(host, True)
    _run(f"tc -n {host.namespace} qdisc replace dev eth0 root pfifo_fast")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
