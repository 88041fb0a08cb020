"""A job for torchrun whose ranks are killed at random moments and which resumes each time.

    torchrun --max-restarts=3 restarted_job.py FOLDER KILLS MODE

In attempt n, rank n modulo the number of ranks is killed some steps after it has resumed, KILLS
times in all. Rank 0 writes the losses of all steps to FOLDER/losses.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer, checkpoint, elastic, register

STEPS = 12


def kill_later(delay: float) -> None:
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, attempt: int, kills: int, mode: str) -> list[float]:
    """Resume, train to the end or until this rank is killed, and return all losses."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))
    model = module if mode == "module" else DistributedDataParallel(module)
    options = {
        "module": {"module": module},
        "drop-in": {},
        "register": {"overlap_with_ddp": True},
    }[mode]
    named = module.named_parameters()
    opt = ZeroRedundancyOptimizer(named, torch.optim.AdamW, lr=0.1, **options)
    if mode == "register":
        register(model, opt)
    loaded = checkpoint.resume(folder / "run", opt, module)
    losses: list[float] = [] if loaded is None else loaded.extra["losses"]
    first = len(losses)
    chance = random.Random(attempt)
    for step in range(first, STEPS):
        if attempt < kills and rank == attempt % world_size and step == first + 2:
            threading.Thread(target=kill_later, args=(chance.uniform(0, 0.1),)).start()
        torch.manual_seed(1000 * step + rank)  # the data and the dropout of this step
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        dist.all_reduce(loss.detach_())
        losses = [*losses, loss.item()]
        path = folder / "run" / f"step-{step + 1}"
        checkpoint.async_save(path, opt, module, {"losses": losses}, keep_last=2).wait()
    assert attempt >= kills, f"attempt {attempt} was not killed"
    return losses


def main(folder: Path, kills: int, mode: str) -> None:
    torch.set_num_threads(1)
    elastic.init_process_group("gloo", timeout=timedelta(seconds=20))
    losses = train(folder, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), kills, mode)
    if dist.get_rank() == 0:
        (folder / "losses").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
