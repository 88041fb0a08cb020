"""Many iterations on a machine that is busy with something else: nothing hangs, nothing drifts.

Whether a bucket is reduced when the next one comes, and whether a gather has arrived when the next
forward starts, is a matter of timing. Here the timing is as bad as can be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from ddp_ways import WAYS, overlapping
from models import MLP, MLP_PROBLEM, Kind, Problem, train, with_ddp, with_zero
from problems import differing
from ranks import run_ranks
from torch import Tensor, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

pytestmark = pytest.mark.slow

ITERATIONS = 200
TIMES = 10
SECONDS = 60.0
KIND: Kind = (optim.AdamW, {"lr": 0.003})
BUCKETS = {"bucket_cap_mb": 0.001}


PROBLEM = Problem(lambda: MLP(24, 2), MLP_PROBLEM.loss)


def with_hook(way: str) -> list[Tensor]:
    setup = overlapping(way, PROBLEM.fresh(), KIND, **BUCKETS)
    train(setup, PROBLEM, range(ITERATIONS))
    return setup.params


def without_hook(way: str) -> list[Tensor]:
    """What does the same arithmetic: DDP with its own hook, or ZeRO-2, which adds in rank order."""
    if way == "register":
        setup = with_zero(PROBLEM.fresh(), KIND)
    else:
        setup = with_ddp(PROBLEM.fresh(), KIND, comm_hook=allreduce_hook, **BUCKETS)
    train(setup, PROBLEM, range(ITERATIONS))
    return setup.params


@pytest.fixture(scope="module")
def busy() -> Iterator[None]:
    """A process per core that does nothing but run."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    yield
    for other in others:
        other.kill()
        other.wait()


@pytest.mark.timeout(TIMES * SECONDS + SECONDS)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_two_hundred_iterations_ten_times_over(way: str, world_size: int, busy: None) -> None:
    reference = run_ranks(without_hook, world_size, way, timeout=SECONDS)[0]
    for _ in range(TIMES):
        for params in run_ranks(with_hook, world_size, way, timeout=SECONDS):
            assert differing(reference, params) == []
