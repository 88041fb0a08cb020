"""One rank of the hosts benchmark: builds every contestant, then lets them step in turn.

Started by `hosts.py` inside its host's namespace, with the address and the rank in the
environment as torchrun would set them:

    python rank.py '{"contestants": ["ddp"], "steps": 6, ...}' results.json
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import platform
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import measure
from contestants import CONTESTANTS, Setup, Trainee, UnavailableError
from demo_model import GPT, GPT_17M

SEED = 1234
INTERFACE = os.environ.get("GLOO_SOCKET_IFNAME", "lo")


@dataclass
class Track:
    """What one contestant did on this rank; lists have one entry per round, warm-up first."""

    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    state_bytes: int = 0
    gradient_bytes: int | None = None


def make_model() -> nn.Module:
    """The same weights at each call and on every rank."""
    torch.manual_seed(SEED)
    return GPT(GPT_17M)


def batch(rank: int, step: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """The tokens that every contestant sees on `rank` at `step`."""
    generator = torch.Generator().manual_seed(SEED + 1_000_003 * step + rank)
    tokens = torch.randint(GPT_17M.vocab_size, (batch_size, seq_len + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run_block(trainee: Trainee, track: Track, rank: int, config: dict[str, Any]) -> None:
    """Take one untimed and then `steps` timed steps. Called on every rank.

    The untimed step makes the timed ones a steady state: a contestant that leaves work in flight
    at the end of a step pays for the lead-in's inside the window and not for the last one's.
    """
    num_steps, shape = config["steps"], (config["batch_size"], config["seq_len"])
    first = len(track.losses)
    batches = [batch(rank, first + i, *shape) for i in range(num_steps + 1)]

    def read_gradients() -> None:
        track.gradient_bytes = measure.gradient_bytes(trainee.model, trainee.local_optimizer)

    measure.wait_until_quiet(INTERFACE)
    dist.barrier()
    track.losses.append(trainee.step(*batches[0], read_gradients if first == 0 else None))
    sent, start = measure.sent_bytes(INTERFACE), time.perf_counter()
    for x, y in batches[1:]:
        track.losses.append(trainee.step(x, y))
    track.seconds.append(time.perf_counter() - start)
    # The loopback interface carries what all ranks send.
    sharing = dist.get_world_size() if INTERFACE == "lo" else 1
    track.sent.append((measure.sent_bytes(INTERFACE) - sent) // sharing)
    if first == 0:
        track.state_bytes = measure.state_bytes(trainee.local_optimizer)


def run(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    """Build the contestants and run all rounds. Called on every rank."""
    trainees: dict[str, Trainee] = {}
    unavailable: dict[str, str] = {}
    for name in config["contestants"]:
        try:
            trainees[name] = CONTESTANTS[name].build(make_model, Setup())
        except UnavailableError as error:
            unavailable[name] = str(error)
    tracks = {name: Track() for name in trainees}
    names = list(trainees)
    for round_index in range(config["rounds"] + 1):
        turn = round_index % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            run_block(trainees[name], tracks[name], rank, config)
            if rank == 0:
                label = f"round {round_index}/{config['rounds']}" if round_index else "warm-up"
                milliseconds = 1e3 * tracks[name].seconds[-1] / config["steps"]
                print(f"{label:>12}  {name:<16} {milliseconds:7.1f} ms/step", flush=True)
    return {
        "parameter_bytes": measure.parameter_bytes(make_model()),
        "tracks": {name: asdict(track) for name, track in tracks.items()},
        "unavailable": unavailable,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def main() -> None:
    """Join the other ranks, run, and leave the numbers in a file."""
    die_with_parent = 1  # PR_SET_PDEATHSIG: no rank outlives a launcher that was killed
    ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1)  # the launcher asks where a rank hangs
    warnings.filterwarnings("ignore", category=FutureWarning)
    config, results = json.loads(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=config["timeout"]))
    results.write_text(json.dumps(run(rank, config)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
