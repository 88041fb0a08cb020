"""A job whose ranks are killed again and again ends with the losses of an uninterrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import restarted_job
from hostile import names
from ranks import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mode", "world_size", "kills"), [("module", 2, 3), ("drop-in", 2, 2), ("register", 3, 2)]
)
def test_torchrun_restarts_a_job_to_the_same_losses(
    mode: str, world_size: int, kills: int, tmp_path: Path
) -> None:
    torchrun = f"-m torch.distributed.run --nproc-per-node={world_size} --max-restarts={kills}"
    rendezvous = "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --monitor-interval=0.1"
    command = [sys.executable, *torchrun.split(), *rendezvous.split(), restarted_job.__file__]
    done = subprocess.run(
        [*command, str(tmp_path), str(kills), mode],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = run_ranks(restarted_job.train, world_size, tmp_path / "uninterrupted", 0, 0, mode)
    assert json.loads((tmp_path / "losses").read_text()) == expected[0]
    assert names(tmp_path / "run") == ["step-11", "step-12"]  # nothing is left of the kills
