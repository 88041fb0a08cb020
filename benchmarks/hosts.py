"""How fast does each contestant train on N hosts joined by a link of a given rate?

The hosts are network namespaces of this machine, one rank each, or with `--local` processes on it.
All contestants live in the same rank processes and take turns, so that a ratio compares neighbours
in time. `shardstep bench` runs this file. Reading order: hosts.py (this launcher), netns.py,
rank.py, contestants.py, measure.py, summary.py, picture.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from netns import MAX_HOSTS, Host, bits_per_second, local_hosts, switched_hosts
from picture import draw
from summary import summarise, table

HERE = Path(__file__).resolve().parent
DEFAULT_CONTESTANTS = "ddp,torch-zero,torch-zero-view,fsdp2,zero1,zero2"

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunError(Exception):
    """A rank failed or the time was over; the message holds what the ranks said."""


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows the defaults of options, but not of flags."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.nargs == 0 else super()._get_help_string(action)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    prog = os.environ.get("SHARDSTEP_PROG")
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measure the time of a training step, bytes sent and memory: shardstep against "
        "DDP, torch ZeRO and FSDP2. Each host has one rank, and all train a GPT with 17 million "
        "parameters. Hosts are network namespaces of this machine, which need root, `ip` and `tc`. "
        "With --local they are plain processes.",
        formatter_class=Formatter,
    )
    add = parser.add_argument
    add("--hosts", type=int, default=2, metavar="N", help="number of hosts")
    add("--rate", default="1gbit", help="rate of each link, such as 250mbit; or 'none'")
    add(
        "--local",
        action="store_true",
        help="run plain processes without links; bytes sent are then all loopback traffic",
    )
    add("--rounds", type=int, default=5, metavar="N", help="rounds to measure, after a warm-up")
    add("--steps", type=int, default=6, metavar="N", help="steps of each contestant per round")
    add(
        "--contestants",
        default=DEFAULT_CONTESTANTS,
        metavar="NAME,...",
        help="the order to run them in. torch-zero is torch ZeRO, zero1 the "
        "drop-in, zero2 module=, -view means bucket views. Also: ddp-view, hook, hook-interleaved, "
        "register; deepspeed, deepspeed-zero1, fairscale (where installed)",
    )
    add("--batch-size", type=int, default=4, metavar="N", help="sequences per rank and step")
    add("--seq-len", type=int, default=64, metavar="N", help="tokens per sequence")
    add("--timeout", type=float, default=900, metavar="SECONDS", help="time limit of the whole run")
    add(
        "--out",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="write the JSON here (default: hosts-N-RATE.json in "
        + ("the current folder)" if prog else "benchmarks/results)"),
    )
    add("--json", action="store_true", help="print JSON instead of the table")
    add(
        "--picture",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="draw times and bytes to this PNG file, if matplotlib is installed (default: next to "
        "the JSON)",
    )
    options = parser.parse_args(argv)
    options.contestants = [name for name in options.contestants.split(",") if name]
    if not options.contestants:
        parser.error("--contestants: expected at least one name")
    if not {*options.contestants} <= {*DEFAULT_CONTESTANTS.split(",")}:
        from contestants import CONTESTANTS  # imports torch, which takes a second

        unknown = ", ".join(sorted({*options.contestants} - {*CONTESTANTS}))
        if unknown:
            parser.error(f"no contestant is named {unknown}; there are {', '.join(CONTESTANTS)}")
    if "picture" in options and find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    if options.local:
        options.rate = "none"
    if "out" not in options:
        options.out = _default_out(options)
    if options.out.is_dir():
        parser.error(f"--out: expected a file, but {options.out} is a folder")
    if "picture" not in options:
        options.picture = options.out.with_suffix(".png")
    try:
        bits_per_second(options.rate)
    except ValueError as error:
        parser.error(str(error))
    for name in ("hosts", "rounds", "steps", "batch_size", "seq_len", "timeout"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if options.hosts > MAX_HOSTS:
        parser.error(f"--hosts must be at most {MAX_HOSTS}")
    if options.picture.suffix.lower() != ".png":
        parser.error(f"--picture: expected a name that ends with .png, not {options.picture}")
    for path in (options.out, options.picture):
        is_new = not path.exists()
        try:  # now, not after minutes
            path.open("ab").close()
            if is_new:
                path.unlink()
        except OSError as error:
            parser.error(f"cannot write {path} ({error.strerror})")
    return options


def _default_out(options: argparse.Namespace) -> Path:
    # A user's run leaves the published results alone.
    folder = Path() if os.environ.get("SHARDSTEP_PROG") else HERE / "results"
    kind = "local" if options.local else "hosts"
    return folder / f"{kind}-{options.hosts}-{options.rate}.json"


def run_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Make the hosts, run one rank on each, return what each rank wrote."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.local:
            hosts = stack.enter_context(local_hosts(options.hosts))
        else:
            hosts = stack.enter_context(switched_hosts(options.hosts, options.rate))
        names = ", ".join(options.contestants)
        print(f"starting {options.hosts} ranks, to build {names}", file=sys.stderr)
        ranks: list[subprocess.Popen[bytes]] = []
        for host in hosts:
            rank = _start(host, hosts[0].address, options, folder)
            stack.callback(_end, rank)
            ranks.append(rank)
        _wait(ranks, folder, options.timeout)
        return [json.loads((folder / f"{host.index}.json").read_text()) for host in hosts]


def _start(
    host: Host, store_address: str, options: argparse.Namespace, folder: Path
) -> subprocess.Popen[bytes]:
    config = {
        name: getattr(options, name)
        for name in ("contestants", "rounds", "steps", "batch_size", "seq_len", "timeout")
    }
    environment = os.environ | {
        "RANK": str(host.index),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(options.hosts),
        "MASTER_ADDR": store_address,
        "MASTER_PORT": str(host.port),
        "GLOO_SOCKET_IFNAME": host.interface,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # namespaces have no name service to warn about
        "DS_ACCELERATOR": "cpu",
        # This checkout is measured, whatever is installed.
        "PYTHONPATH": os.pathsep.join(
            [str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    results = folder / f"{host.index}.json"
    with (folder / f"{host.index}.log").open("wb") as log:
        return subprocess.Popen(
            host.command([sys.executable, str(HERE / "rank.py"), json.dumps(config), str(results)]),
            env=environment,
            stdout=sys.stderr if host.index == 0 else log,  # progress
            stderr=log,
            # Ctrl-C goes to the launcher alone, which ends the ranks in order.
            start_new_session=True,
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            break
        if time.monotonic() > deadline:
            stuck = {i: f"after {timeout:g} s" for i, r in enumerate(ranks) if r.poll() is None}
            for i in stuck:
                ranks[i].send_signal(signal.SIGUSR1)  # rank.py answers with its traceback
            time.sleep(0.5)
            raise RunError("the time was over\n\n" + _logs(folder, stuck))
        time.sleep(0.1)
    failed = {i: f"exit status {rank.returncode}" for i, rank in enumerate(ranks) if rank.poll()}
    if failed:
        raise RunError(_logs(folder, failed))


def _logs(folder: Path, remarks: dict[int, str]) -> str:
    parts = []
    for rank, remark in remarks.items():
        lines = (folder / f"{rank}.log").read_text(errors="replace").splitlines()
        parts.append("\n".join([f"rank {rank}, {remark}:", *lines[-60:]]))
    return "\n\n".join(parts)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    for other in _STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # a second Ctrl-C must not stop the cleaning up
    sys.exit(128 + number)


def _end(rank: subprocess.Popen[bytes]) -> None:
    rank.kill()
    rank.wait()


def describe_machine() -> dict[str, Any]:
    """What a reader needs to judge the times, and nothing that names the machine."""
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "cpu": cpu[1] if cpu else "unknown",
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "tcp_congestion_control": control.read_text().strip(),
        "load_average_at_start": os.getloadavg()[0],
    }


def _command(options: argparse.Namespace) -> str:
    names = ("hosts", "rate", "rounds", "steps", "batch_size", "seq_len")
    values = ["--local"] if options.local else []
    values += [f"--{name.replace('_', '-')} {getattr(options, name)}" for name in names]
    program, folder = os.environ.get("SHARDSTEP_PROG"), "benchmarks/results/"
    values.append(f"--contestants {','.join(options.contestants)}")
    if options.out != _default_out(options):
        values.append(f"--out {'' if program else folder}{options.out.name}")
    return " ".join([program or "python benchmarks/hosts.py", *values])


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and write its table, its JSON and its picture."""
    options = parse(argv)
    for number in _STOP_SIGNALS:
        signal.signal(number, _leave)
    machine = describe_machine()
    try:
        ranks = run_ranks(options)
    except (RunError, RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": _command(options),
        "options": {k: v for k, v in vars(options).items() if k not in ("out", "json", "picture")},
        "machine": machine,
        "versions": ranks[0]["versions"],
        "model": {
            "name": "GPT_17M",
            "num_parameters": ranks[0]["parameter_bytes"] // 4,
            "bytes": ranks[0]["parameter_bytes"],
        },
        "contestants": summarise(ranks, options.steps),
        "unavailable": ranks[0]["unavailable"],
        "raw_by_rank": [rank["tracks"] for rank in ranks],
    }
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    text, written, failed = json.dumps(result, indent=1), [], None
    try:
        options.out.write_text(text + "\n")
        written.append(options.out)
        if result["contestants"] and draw(result, options.picture):
            written.append(options.picture)
    except OSError as error:
        failed = f"error: cannot write {error.filename or options.out} ({error.strerror})"
    print(text if options.json else "\n".join(["", table(result), "", *map(str, written)]))
    if failed:
        print(failed, file=sys.stderr)
    return int(failed is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
