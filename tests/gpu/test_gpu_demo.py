"""The demo on GPUs: one rank per GPU, over NCCL."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from demo.record import EQUAL
from demo.run import DROP_IN, RUNS
from shardstep.cli.app import app

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_demo_runs_on_every_gpu_with_the_numbers_of_ddp() -> None:
    size = "--steps 8 --layers 1 --width 64"
    result = CliRunner().invoke(app, ["demo", "--device", "cuda", "--json", *size.split()])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    num_gpus = torch.cuda.device_count()
    assert (record["config"]["device"], record["config"]["ranks"]) == ("cuda", num_gpus)
    # With more than two ranks, NCCL sums in another order in a reduce-scatter.
    runs = RUNS if num_gpus <= 2 else (DROP_IN,)
    assert {record["verdicts"][run] for run in runs} == {EQUAL}
