"""Train the GPT on local ranks: with DDP, sharded under DDP, and sharded without DDP."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from demo.gpt import GPT
from demo.record import DemoConfig, DemoRecord, RankRecord
from demo.text import make_batch, stdlib_source
from shardstep import ZeroRedundancyOptimizer

UNSHARDED = "DDP + AdamW"
DROP_IN = "DDP + ZeroRedundancyOptimizer(AdamW)"
MODULE = "ZeroRedundancyOptimizer(AdamW, module=model)"
RUNS = (UNSHARDED, DROP_IN, MODULE)

WARMUP_STEPS = 2
"""Steps that are not measured: DDP rebuilds its buckets and the optimizer allocates its state."""


class StepDone(NamedTuple):
    """Step number `step`, from 1, of the run named `run` is done on rank 0."""

    run: str
    step: int
    loss: float


class _RunDone(NamedTuple):
    run: str
    rank: int
    record: RankRecord


def run_demo(
    config: DemoConfig, on_step: Callable[[StepDone], None] = lambda _: None
) -> DemoRecord:
    """Train the same model on the same batches in each way, on spawned ranks.

    No rank outlives the call.

    Args:
        config: the model and the training.
        on_step: called in this process after each of rank 0's steps.

    Raises:
        torch.multiprocessing.spawn.ProcessException: if a rank raises or dies.
    """
    messages = multiprocessing.get_context("spawn").SimpleQueue()
    runs: dict[str, dict[int, RankRecord]] = {run: {} for run in RUNS}
    with tempfile.TemporaryDirectory(prefix="shardstep-demo-") as folder:
        spawned = spawn(  # type: ignore[no-untyped-call]
            _rank_main, (config, folder, messages), config.ranks, join=False
        )
        try:
            ended = False
            while not ended:
                ended = spawned.join(timeout=0.05)
                while not messages.empty():
                    message = messages.get()
                    if isinstance(message, StepDone):
                        on_step(message)
                    else:
                        runs[message.run][message.rank] = message.record
        finally:
            for process in spawned.processes:
                process.kill()
                process.join()
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in GPT(config.model).parameters())
    by_rank = {run: [ranks[rank] for rank in range(config.ranks)] for run, ranks in runs.items()}
    return DemoRecord(config, num_parameters, torch.__version__, by_rank)


def _rank_main(rank: int, config: DemoConfig, folder: str, messages: Any) -> None:
    torch.set_num_threads(1)
    # Otherwise Gloo binds to the address of the host's name.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group(
        "gloo",
        # Unlike a port, no other program can take a file in our folder.
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=config.ranks,
        timeout=timedelta(seconds=60),
    )
    for run in RUNS:
        messages.put(_RunDone(run, rank, _train(rank, config, run, messages)))
    dist.destroy_process_group()


def _train(rank: int, config: DemoConfig, run: str, messages: Any) -> RankRecord:
    torch.manual_seed(config.seed)
    model = GPT(config.model)
    trained: nn.Module = model if run == MODULE else DistributedDataParallel(model)
    options: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": 0.1}
    optimizer: Optimizer
    if run == UNSHARDED:
        optimizer = AdamW(model.parameters(), **options)
    elif run == DROP_IN:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, **options)
    else:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, module=model, **options)

    text = stdlib_source()
    losses: list[float] = []
    seconds: list[float] = []
    sent_before: int | None = None
    for step in range(config.steps):
        if step == WARMUP_STEPS:
            sent_before = _sent_nbytes(model)
        inputs, targets = make_batch(
            text, config.batch_size, config.model.block_size, seed=config.seed, step=step, rank=rank
        )
        start = time.perf_counter()
        _, loss = trained(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if rank == 0:
            messages.put(StepDone(run, step + 1, losses[-1]))
    sent_after = _sent_nbytes(model)

    sent_per_step: float | None = None
    if sent_before is not None and sent_after is not None:
        sent_per_step = (sent_after - sent_before) / (config.steps - WARMUP_STEPS)
    state = [value for each in optimizer.state.values() for value in each.values()]
    return RankRecord(
        losses=tuple(losses),
        digest=_digest(model),
        state_nbytes=sum(value.nbytes for value in state if isinstance(value, torch.Tensor)),
        sent_nbytes_per_step=sent_per_step,
        ms_per_step=1e3 * statistics.median(seconds[WARMUP_STEPS:]),
    )


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        values = parameter.detach().contiguous()
        # numpy, with a quicker way to a tensor's bytes, is no dependency.
        digest.update(ctypes.string_at(values.data_ptr(), values.nbytes))
    return digest.hexdigest()


def _sent_nbytes(model: nn.Module) -> int | None:
    """Return the bytes that this process's open TCP connections have sent; None if not Linux.

    Unlike the counters of an interface, those of a connection leave out other programs. Called on
    every rank, which first waits until all ranks have sent what the steps so far had to send.
    """
    for parameter in model.parameters():
        parameter.detach()  # waits for a gather in flight
    dist.barrier()
    if sys.platform != "linux":
        return None
    offset_of_bytes_sent = 200  # of tcpi_bytes_sent in struct tcp_info, linux/tcp.h
    total = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # closed since it was listed, or not TCP
        if len(info) < offset_of_bytes_sent + 8:
            return None  # before Linux 4.19
        total += struct.unpack_from("=Q", info, offset_of_bytes_sent)[0]
    return total
