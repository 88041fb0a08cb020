"""Trains the small GPT on local ranks: with DDP, unsharded and sharded, and sharded without DDP."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
import socket
import statistics
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from shardstep.demo.gpt import GPT
from shardstep.demo.record import WARMUP_STEPS, DemoConfig, DemoRecord, RankRecord, RunRecord
from shardstep.demo.text import ByteBatches, stdlib_source
from shardstep.optimizer import ZeroRedundancyOptimizer

UNSHARDED = "DDP + AdamW"
DROP_IN = "DDP + ZeroRedundancyOptimizer(AdamW)"
MODULE = "ZeroRedundancyOptimizer(AdamW, module=model)"
RUNS = (UNSHARDED, DROP_IN, MODULE)


@dataclass(frozen=True)
class StepDone:
    """Rank 0 finished a step.

    Attributes:
        run: One of `RUNS`.
        step: How many steps of that run are done.
        loss: Rank 0's loss.
    """

    run: str
    step: int
    loss: float


class RankFailed(RuntimeError):
    """A rank ended before its work was done; the message holds its traceback."""


@dataclass(frozen=True)
class _RunDone:
    run: str
    record: RankRecord


@dataclass(frozen=True)
class _Failure:
    traceback: str


def run_demo(
    config: DemoConfig, on_step: Callable[[StepDone], None] = lambda _: None
) -> DemoRecord:
    """Train the same model on the same batches in each way, on spawned local ranks, and compare.

    No rank outlives the call, however it ends.

    Args:
        config: What to train.
        on_step: Called in this process after each of rank 0's steps.

    Returns:
        What the runs measured.

    Raises:
        RankFailed: If a rank raises or dies; the other ranks are ended.
    """
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="shardstep-demo-") as folder:
        try:
            for rank in range(config.ranks):
                process, pipe = _start_rank(rank, config, folder)
                processes.append(process)
                pipes.append(pipe)
            records = _collect(processes, pipes, on_step)
        finally:
            _end(processes)
            for pipe in pipes:
                pipe.close()
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in GPT(config.model).parameters())
    unsharded, *sharded = (
        RunRecord(run, tuple(of_rank[run] for of_rank in records)) for run in RUNS
    )
    return DemoRecord(
        config=config,
        num_parameters=num_parameters,
        torch_version=torch.__version__,
        unsharded=unsharded,
        sharded=tuple(sharded),
    )


def _start_rank(rank: int, config: DemoConfig, folder: str) -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    # Only the rank may hold the sending end: its death is then the end of the pipe.
    with closing(sender):
        process = context.Process(
            target=_rank_main, args=(rank, config, folder, sender), daemon=True, name=f"rank {rank}"
        )
        process.start()
    return process, receiver


def _collect(
    processes: list[SpawnProcess], pipes: list[Connection], on_step: Callable[[StepDone], None]
) -> list[dict[str, RankRecord]]:
    """Read every rank's messages until each has ended well; return its records, by rank."""
    records: list[dict[str, RankRecord]] = [{} for _ in pipes]
    rank_of = {pipe: rank for rank, pipe in enumerate(pipes)}
    while rank_of:
        for pipe in wait(list(rank_of)):
            assert isinstance(pipe, Connection)
            rank = rank_of[pipe]
            try:
                message = pipe.recv()
            except EOFError:
                processes[rank].join()
                if processes[rank].exitcode != 0:
                    raise RankFailed(
                        f"rank {rank} died with exit code {processes[rank].exitcode}"
                    ) from None
                del rank_of[pipe]
                continue
            match message:
                case StepDone():
                    on_step(message)
                case _RunDone(run, record):
                    records[rank][run] = record
                case _Failure(text):
                    raise RankFailed(f"rank {rank} failed:\n{text}")
    return records


def _end(processes: list[SpawnProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(timeout=5)
        process.kill()
        process.join()


def _rank_main(rank: int, config: DemoConfig, folder: str, sender: Connection) -> None:
    # Ctrl-C reaches the whole process group; only the parent, which ends us, should speak of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        torch.set_num_threads(1)
        # Left to itself Gloo binds to whatever the host's name resolves to.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        dist.init_process_group(
            "gloo",
            # Unlike a port, a file in our own folder cannot be taken by somebody else meanwhile.
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=config.ranks,
            timeout=timedelta(seconds=60),
        )
        for run in RUNS:
            sender.send(_RunDone(run, _train(rank, config, run, sender)))
        dist.destroy_process_group()
    except Exception:
        # Sent before our sockets close: the cause arrives ahead of what it does to other ranks.
        sender.send(_Failure(traceback.format_exc()))
        sys.exit(1)


def _train(rank: int, config: DemoConfig, run: str, sender: Connection) -> RankRecord:
    torch.manual_seed(config.seed)
    model = GPT(config.model)
    trained: nn.Module = model if run == MODULE else DistributedDataParallel(model)
    optimizer: Optimizer
    local: Optimizer
    options: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": 0.1}
    if run == UNSHARDED:
        optimizer = local = AdamW(model.parameters(), **options)
    else:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), AdamW, module=model if run == MODULE else None, **options
        )
        local = optimizer.optim
    batches = ByteBatches(
        stdlib_source(),
        config.batch_size,
        config.model.block_size,
        seed=config.seed,
        rank=rank,
    )

    losses: list[float] = []
    seconds: list[float] = []
    sent_before: int | None = None
    for step in range(config.steps):
        if step == WARMUP_STEPS:
            _settle(model)
            sent_before = _sent_nbytes()
        inputs, targets = batches.batch(step)
        start = time.perf_counter()
        _, loss = trained(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if rank == 0:
            sender.send(StepDone(run, step + 1, losses[-1]))
    _settle(model)
    sent_after = _sent_nbytes()

    sent_per_step: float | None = None
    if sent_before is not None and sent_after is not None:
        sent_per_step = (sent_after - sent_before) / (config.steps - WARMUP_STEPS)
    return RankRecord(
        losses=tuple(losses),
        digest=_digest(model),
        state_nbytes=_state_nbytes(local),
        sent_nbytes_per_step=sent_per_step,
        ms_per_step=1e3 * statistics.median(seconds[WARMUP_STEPS:]),
    )


def _settle(model: nn.Module) -> None:
    """Wait until what the steps so far had to send has left every rank.

    A step's last sends may be under way after it: a rank that is ahead returns with what it has
    received. Counted without this, they would belong to the step that follows.
    """
    for parameter in model.parameters():
        parameter.detach()  # waits for the values of a parameter in flight
    dist.barrier()


def _state_nbytes(optimizer: Optimizer) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        values = parameter.detach().contiguous()
        # Without numpy, which is no dependency, torch offers no quicker way to a tensor's bytes.
        digest.update(ctypes.string_at(values.data_ptr(), values.nbytes))
    return digest.hexdigest()


def _sent_nbytes() -> int | None:
    """Return the bytes that this process's open TCP connections have sent; None if not Linux.

    The kernel counts per connection, so other programs on the machine do not show up here, as
    they would in the interface counters of `/proc/net/dev`.
    """
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
