"""How fast and how lean does each contestant train on GPUs, over NCCL?

    python benchmarks/nccl.py --model gpt-17m --ranks 2,4 --json out.json --picture out.png
    python benchmarks/nccl.py --trace trace.json.gz --picture timeline.png

With fewer GPUs than ranks, the ranks share a GPU: each claims to be another host, so that NCCL
talks over sockets, and MPS lets their kernels run at the same time. Every contestant has processes
of its own, which last for the whole run. The contestants take turns, round after round. Reading
order: nccl.py (this launcher), nccl_rank.py, contestants.py, timeline.py, picture.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import timeline
from contestants import CONTESTANTS
from nccl_rank import MODELS, Workload, serve
from picture import draw_runs
from summary import aligned, compare_with_baseline, spread

HERE = Path(__file__).resolve().parent
DEFAULT = "ddp,ddp-view,fsdp2,torch-zero-view,zero1,zero2,hook,hook-interleaved,register"
MPS = "nvidia-cuda-mps-control"
GIB = 2**30

_FORKSERVER = multiprocessing.get_context("forkserver")


class TeamError(Exception):
    """A rank failed, died or took too long; the message shows its last words."""


class Team:
    """The processes of one contestant, one for each rank."""

    def __init__(self, name: str, workload: Workload, folder: Path, timeout: float) -> None:
        self.name, self.folder, self.timeout = name, folder, timeout
        self.connections: list[Connection] = []
        self.ranks: list[BaseProcess] = []
        for rank in range(workload.world_size):
            connection, its_end = _FORKSERVER.Pipe()
            args = (its_end, name, workload, rank, folder, timeout)
            process = _FORKSERVER.Process(target=serve, args=args)
            process.start()
            its_end.close()
            self.connections.append(connection)
            self.ranks.append(process)

    def call(self, *command: Any) -> list[Any]:
        """Return the answer of each rank to `command`."""
        for connection in self.connections:
            connection.send(command)
        return self.answers()

    def answers(self) -> list[Any]:
        """Return what each rank sends next."""
        deadline = time.monotonic() + self.timeout
        found: dict[int, Any] = {}
        while len(found) < len(self.ranks):
            waiting = {c: r for r, c in enumerate(self.connections) if r not in found}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    succeeded, found[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    raise TeamError(f"rank {rank} died\n{self._last_words(rank)}") from None
                if not succeeded:
                    raise TeamError(f"rank {rank}: {found[rank].strip()}")
            if not ready:
                rank = min(waiting.values())
                os.kill(self.ranks[rank].pid or 0, signal.SIGUSR1)  # it logs its traceback
                time.sleep(0.5)
                words = self._last_words(rank)
                raise TeamError(f"rank {rank} took more than {self.timeout:g} s\n{words}")
        return [found[rank] for rank in range(len(self.ranks))]

    def dismiss(self) -> None:
        """Let the processes end by themselves."""
        for connection in self.connections:
            with suppress(OSError):
                connection.send(None)

    def end(self, patience: float = 20.0) -> None:
        """End the processes: by themselves within `patience` seconds, or else by force."""
        deadline = time.monotonic() + patience
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank in self.ranks if rank.is_alive()]
        _disconnect_from_mps([rank.pid for rank in stuck])
        for rank in stuck:
            rank.kill()
            rank.join()

    def _last_words(self, rank: int) -> str:
        log = self.folder / f"{self.name}-{len(self.ranks)}-{rank}.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        return "\n".join(text.splitlines()[-30:])


@contextmanager
def mps(folder: Path) -> Iterator[None]:
    """Run an MPS daemon for the processes that start meanwhile."""
    for kind in ("PIPE", "LOG"):
        os.environ[f"CUDA_MPS_{kind}_DIRECTORY"] = str(folder / f"mps-{kind.lower()}")
        Path(os.environ[f"CUDA_MPS_{kind}_DIRECTORY"]).mkdir()
    try:
        subprocess.run([MPS, "-d"], check=True, timeout=60)
    except FileNotFoundError:
        sys.exit(f"ranks that share a GPU need {MPS}; pass --no-mps to let them take turns")
    try:
        yield
    finally:
        _tell_mps("quit -t 10")


def _tell_mps(command: str) -> str:
    done = subprocess.run([MPS], input=f"{command}\n", text=True, capture_output=True, timeout=60)
    return done.stdout


def _disconnect_from_mps(pids: Sequence[int | None]) -> None:
    """End the GPU work of processes; to kill them first may end the server of all the others."""
    if not pids or "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        return
    for server in _tell_mps("get_server_list").split():
        for pid in pids:
            _tell_mps(f"terminate_client {server} {pid}")


def compare(
    workload: Workload, options: argparse.Namespace, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Let the contestants train in turn, and return a row for each and the errors of the rest."""
    timeout, rounds, steps = options.timeout, options.rounds, options.steps
    names: list[str] = list(options.contestants)
    answers: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    teams = {name: Team(name, workload, folder, timeout) for name in names}

    def ask(name: str, action: Callable[[Team], list[Any]]) -> list[Any] | None:
        try:
            return action(teams[name])
        except (TeamError, OSError) as error:
            failed[name] = str(error)
            say(f"{name} failed: {error}")
            teams.pop(name).end(patience=0.0)
            return None

    try:
        for name in names:
            ask(name, Team.answers)  # built, all at the same time
        for name in [*teams]:
            say(f"{name}: first steps")
            answers[name].append(ask(name, lambda team: team.call("memory")) or [])
        for number in range(rounds):
            turn = number % len(names)
            for name in [n for n in names[turn:] + names[:turn] if n in teams]:
                found = ask(name, lambda team: team.call("time", options.warmup, steps))
                if found is not None:
                    answers[name].append(found)
                    ms = 1e3 * max(rank["seconds"] for rank in found) / steps
                    say(f"round {number + 1}/{rounds}  {name:<16} {ms:8.2f} ms/step")
    finally:
        for each in (Team.dismiss, Team.end):
            for team in teams.values():
                each(team)
    rows = {name: _row(answers[name], steps) for name in names if name in teams}
    compare_with_baseline(rows)
    return {"workload": asdict(workload), "contestants": rows, "failed": failed}


def _row(answers: list[list[dict[str, Any]]], steps: int) -> dict[str, Any]:
    """Return figures over ranks: the longest time, the most bytes and the mean loss."""
    first, *rounds = answers
    times = [1e3 * max(rank["seconds"] for rank in each) / steps for each in rounds]
    losses = [
        fmean(step)
        for each in answers
        for step in zip(*(rank["losses"] for rank in each), strict=True)
    ]
    last = [rank["peaks"] for rank in rounds[-1]]
    peaks = {phase: max(rank[phase] for rank in last) for phase in last[0]}
    planned = [rank["planned_bytes"] for rank in first]
    return {
        "ms_per_step": spread(times),
        "ms_per_step_by_round": [round(ms, 4) for ms in times],
        "peak_bytes": max(peaks.values()),
        "peak_bytes_by_phase": peaks,
        "held_bytes": max(rank["held_bytes"] for rank in first),
        "planned_bytes": None if None in planned else max(planned),
        "parameter_bytes": first[0]["parameter_bytes"],
        "final_loss": losses[-1],
        "losses": losses,
    }


def table(run: dict[str, Any]) -> str:
    """Return the rows as text."""
    phases = ["construction", "forward", "backward", "step", "rounds"]
    header = ["contestant", "ms/step", "min–max", "× ddp", "min–max", "peak GiB"]
    lines = [[*header, *phases, "held", "planned", "final loss", "Δloss"]]
    for name, row in run["contestants"].items():
        ms, ratios = row["ms_per_step"], row["ratio_to_ddp_by_round"]
        peaks = [row["peak_bytes_by_phase"][phase] for phase in phases]
        sizes = [row["peak_bytes"], *peaks, row["held_bytes"], row["planned_bytes"]]
        distance = row["loss_distance_to_ddp"]
        lines.append(
            [
                name,
                f"{ms['median']:.2f}",
                f"{ms['min']:.2f}–{ms['max']:.2f}",
                "-" if ratios is None else f"{row['ratio_to_ddp']:.3f}",
                "-" if ratios is None else f"{min(ratios):.3f}–{max(ratios):.3f}",
                *("-" if not size else f"{size / GIB:.3f}" for size in sizes),
                f"{row['final_loss']:.6f}",
                "-" if distance is None else "0" if distance == 0 else f"{distance:.1e}",
            ]
        )
    return aligned(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    add("--model", choices=MODELS, default="gpt-17m" if cuda else "gpt-tiny")
    add("--ranks", default="2", help="comma-separated numbers of ranks, one run for each")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16 is autocast")
    add("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: for the matrices")
    add("--compile", action="store_true", help="as each tool wants it: the wrapper, or the blocks")
    add("--deterministic", action="store_true", help="kernels that give the same bits every time")
    add("--bucket-mib", type=float, metavar="N", help="size of our buckets")
    add("--contestants", default=DEFAULT, help=f"comma-separated, of {', '.join(CONTESTANTS)}")
    add("--rounds", type=int, help="turns of each contestant; default: by model")
    add("--steps", type=int, help="timed steps in a round; default: by model")
    add("--warmup", type=int, default=2, help="steps before those, not timed")
    add("--batch-size", type=int, help="sequences per rank and step; default: by model")
    add("--timeout", type=float, default=90, help="seconds for a turn; 4 times that to compile")
    add("--no-mps", action="store_true", help="let ranks that share a GPU take turns on it")
    add("--json", type=Path, metavar="FILE", help="write the numbers")
    add("--picture", type=Path, metavar="FILE", help="draw them; with --trace, draw a step")
    add("--trace", type=Path, metavar="FILE", help="profile module= instead, to a .gz")
    add("--read", type=Path, metavar="FILE", help="draw what an earlier --json or --trace wrote")
    options = parser.parse_args(argv)
    options.timeout *= 4 if options.compile else 1
    model = MODELS[options.model]
    for name in ("rounds", "steps", "batch_size"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(model, name))
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if options.contestants == DEFAULT and importlib.util.find_spec("deepspeed"):
        options.contestants += ",deepspeed"
    options.contestants = options.contestants.split(",")
    unknown = set(options.contestants) - set(CONTESTANTS)
    if unknown:
        parser.error(f"no contestant is named {', '.join(sorted(unknown))}")
    options.ranks = [int(number) for number in options.ranks.split(",")]
    if options.trace and options.device == "cpu":
        parser.error("--trace needs a GPU")
    return options


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the training that the options ask for, at the first number of ranks."""
    return Workload(
        model=options.model,
        world_size=options.ranks[0],
        num_gpus=torch.cuda.device_count() if options.device == "cuda" else 0,
        batch_size=options.batch_size,
        precision=options.precision,
        muon=options.optimizer == "muon",
        compiled=options.compile,
        bucket_mib=options.bucket_mib,
        deterministic=options.deterministic,
    )


def take_trace(options: argparse.Namespace, workload: Workload, folder: Path) -> None:
    """Profile `zero2`, say how much of its communication compute hides, and draw a step."""
    team = Team("zero2", workload, folder, options.timeout)
    options.trace.parent.mkdir(parents=True, exist_ok=True)
    try:
        team.answers()
        team.call("trace", str(options.trace), 5)
        team.dismiss()
    finally:
        team.end()
    read_trace(options.trace, options.picture)


def read_trace(path: Path, drawing: Path | None) -> None:
    """Print the verdict on a trace, and draw a step of it."""
    events = timeline.load(path)
    print(timeline.verdict(events))
    if drawing is not None and not timeline.draw(events, drawing):
        print("the picture needs matplotlib: draw it later with --read", file=sys.stderr)


def read_result(result: dict[str, Any], drawing: Path | None) -> None:
    """Print the tables of a result, and draw it."""
    for run in result["runs"]:
        print(f"\n{run['workload']['world_size']} ranks\n{table(run)}")
        for name, error in run["failed"].items():
            print(f"{name} failed: {error.splitlines()[-1]}")
    if drawing is not None and not draw_runs(result, drawing):
        print("the picture needs matplotlib: draw it later with --read", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return 1 if a contestant failed."""
    options = parse(argv)
    if options.read and options.read.suffix == ".gz":
        read_trace(options.read, options.picture)
        return 0
    if options.read:
        read_result(json.loads(options.read.read_text()), options.picture)
        return 0
    # This checkout is measured, whatever is installed.
    here = [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, here))
    _FORKSERVER.set_forkserver_preload(["nccl_rank", "torch._dynamo", "torch.distributed.optim"])
    workload = workload_of(options)
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/nccl.py", *argv]),
        "machine": {
            "gpu": torch.cuda.get_device_name() if workload.num_gpus else None,
            "num_gpus": workload.num_gpus,
            "cores": os.cpu_count(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "nccl": list(torch.cuda.nccl.version()) if workload.num_gpus else None,
        },
        "mps": workload.num_gpus < max(options.ranks)
        and bool(workload.num_gpus)
        and not options.no_mps,
        "runs": [],
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if result["mps"]:
            stack.enter_context(mps(folder))
        if options.trace:
            take_trace(options, workload, folder)
            return 0
        start = time.monotonic()

        def say(message: str) -> None:
            print(f"{time.monotonic() - start:6.1f} s  {message}", file=sys.stderr, flush=True)

        for world_size in options.ranks:
            run = compare(replace(workload, world_size=world_size), options, folder, say)
            result["runs"].append(run)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    read_result(result, options.picture)
    return 1 if any(run["failed"] for run in result["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
