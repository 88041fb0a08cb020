"""Train the GPT on local ranks: with DDP, sharded under DDP, and sharded without DDP.

The three trainings take turns in the same processes, a few steps at a time. If the machine is slow
for a while, all of them are slow, and their ratio stays.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from demo.gpt import GPT
from demo.record import DemoConfig, DemoRecord, RankRecord
from demo.text import make_batch, stdlib_source
from shardstep import ZeroRedundancyOptimizer

UNSHARDED = "DDP"
DROP_IN = "shardstep drop-in"
MODULE = "shardstep module="
RUNS = (UNSHARDED, DROP_IN, MODULE)

WARMUP_STEPS = 2
"""Steps of the first round, whose time does not count: DDP rebuilds its buckets in it, and the
optimizer allocates its state."""

ROUND_STEPS = 5
"""About how many steps a training takes before the next one's turn."""


class RoundDone(NamedTuple):
    """The run named `run` has done `step` steps on rank 0, the last one with `loss`."""

    run: str
    step: int
    loss: float


class _RunDone(NamedTuple):
    run: str
    rank: int
    record: RankRecord


def run_demo(
    config: DemoConfig, on_round: Callable[[RoundDone], None] = lambda _: None
) -> DemoRecord:
    """Train the same model on the same batches in each way, on spawned ranks.

    No rank outlives the call.

    Args:
        config: the model and the training.
        on_round: called in this process after each of rank 0's rounds.

    Raises:
        torch.multiprocessing.spawn.ProcessException: if a rank raises or dies.
        SystemExit: after SIGTERM or SIGHUP.
    """
    messages = multiprocessing.get_context("spawn").SimpleQueue()
    runs: dict[str, dict[int, RankRecord]] = {run: {} for run in RUNS}
    prefix = "shardstep-demo-"
    with _stop_signals() as received, tempfile.TemporaryDirectory(prefix=prefix) as folder:
        # A rank that is still importing torch would answer Ctrl-C with a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        spawned = spawn(  # type: ignore[no-untyped-call]
            _rank_main, (config, folder, messages), config.ranks, join=False
        )
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            ended = False
            while not (ended or received):
                ended = spawned.join(timeout=0.05)
                while not messages.empty():
                    message = messages.get()
                    if isinstance(message, RoundDone):
                        on_round(message)
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


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGHUP, and exit after the block: ranks are not left half spawned."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        sys.exit(128 + received[0])


def rounds(num_steps: int) -> list[range]:
    """Divide the steps after the warm-up into rounds of about `ROUND_STEPS`.

    Example:
        >>> rounds(14)
        [range(0, 2), range(2, 8), range(8, 14)]
    """
    left = num_steps - WARMUP_STEPS
    count = max(1, round(left / ROUND_STEPS))
    starts = [0, *(WARMUP_STEPS + left * number // count for number in range(count)), num_steps]
    return [range(*pair) for pair in pairwise(starts)]


def _rank_main(rank: int, config: DemoConfig, folder: str, messages: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    torch.set_num_threads(1)
    device = set_up_device(config.device, rank)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        # Unlike a port, no other program can take a file in our folder.
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=config.ranks,
        timeout=timedelta(seconds=60),
        device_id=device if device.type == "cuda" else None,
    )
    trainings = [_Training(run, rank, config, device) for run in RUNS]
    for number, steps in enumerate(rounds(config.steps)):
        first = number % len(trainings)  # the order changes with each round
        for training in trainings[first:] + trainings[:first]:
            training.train(steps)
            if rank == 0:
                messages.put(RoundDone(training.run, steps.stop, training.losses[-1]))
    for training in trainings:
        messages.put(_RunDone(training.run, rank, training.record()))
    dist.destroy_process_group()


def set_up_device(kind: str, rank: int) -> torch.device:
    """Set this process up for its device, and return it: the CPU, or GPU number `rank`."""
    if kind == "cpu":
        # Otherwise Gloo binds to the address of the host's name.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        return torch.device("cpu")
    # Otherwise the same training run twice differs in its last bits.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


class _Training:
    """One model with its optimizer, on one rank."""

    def __init__(self, run: str, rank: int, config: DemoConfig, device: torch.device) -> None:
        self.run, self.rank, self.config, self.device = run, rank, config, device
        self.text = stdlib_source()
        torch.manual_seed(config.seed)
        self.model = GPT(config.model).to(device)
        self.trained: nn.Module = self.model
        if run != MODULE:
            self.trained = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        options: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": 0.1}
        parameters = self.model.parameters()
        self.optimizer: Optimizer
        if run == UNSHARDED:
            self.optimizer = AdamW(parameters, **options)
        elif run == DROP_IN:
            self.optimizer = ZeroRedundancyOptimizer(parameters, AdamW, **options)
        else:
            self.optimizer = ZeroRedundancyOptimizer(
                parameters, AdamW, module=self.model, **options
            )
        self.losses: list[float] = []
        self.ms_per_step: list[float] = []
        self.sent: list[int | None] = []
        self.gradient_nbytes = 0

    def train(self, steps: range) -> None:
        """Take these steps, and wait until nothing is in flight. Called on every rank."""
        batches = [self._batch(step) for step in steps]
        sent_before = self._wait_until_idle()
        start = time.perf_counter()
        losses = [self._step(inputs, targets) for inputs, targets in batches]
        self._wait_for_gathers()
        seconds = time.perf_counter() - start
        sent_after = self._wait_until_idle()
        self.losses += [loss.item() for loss in losses]
        if steps.start > 0:
            self.ms_per_step.append(1e3 * seconds / len(steps))
            unknown = sent_before is None or sent_after is None
            self.sent.append(None if unknown else sent_after - sent_before)  # type: ignore[operator]

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        config = self.config
        inputs, targets = make_batch(
            self.text,
            config.batch_size,
            config.model.block_size,
            seed=config.seed,
            step=step,
            rank=self.rank,
        )
        return inputs.to(self.device), targets.to(self.device)

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor
        _, loss = self.trained(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if not self.losses:
            self.gradient_nbytes = _gradient_nbytes(self.model, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _wait_for_gathers(self) -> None:
        for parameter in self.model.parameters():
            parameter.detach()  # waits for a gather in flight
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _wait_until_idle(self) -> int | None:
        """Wait until all ranks have sent all of their steps, and return the bytes sent so far."""
        self._wait_for_gathers()
        dist.barrier()
        return None if self.device.type == "cuda" else _sent_nbytes()

    def record(self) -> RankRecord:
        """Return the measurements."""
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        sent = [nbytes for nbytes in self.sent if nbytes is not None]
        known = len(sent) == len(self.sent)
        return RankRecord(
            losses=tuple(self.losses),
            digest=_digest(self.model),
            state_nbytes=sum(value.nbytes for value in state if isinstance(value, Tensor)),
            gradient_nbytes=self.gradient_nbytes,
            sent_nbytes_per_step=sum(sent) / (len(self.losses) - WARMUP_STEPS) if known else None,
            ms_per_step=tuple(self.ms_per_step),
        )


def _gradient_nbytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the memory of all gradients; call it between backward and step."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        sharded = optimizer.report().gradient_nbytes
        if sharded:
            return sharded
    storages = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        values = parameter.detach().cpu().contiguous()
        # numpy, with a quicker way to a tensor's bytes, is no dependency.
        digest.update(ctypes.string_at(values.data_ptr(), values.nbytes))
    return digest.hexdigest()


def _sent_nbytes() -> int | None:
    """Return the bytes that this process's open TCP connections have sent; None if not Linux.

    Unlike the counters of an interface, those of a connection leave out other programs.
    """
    if sys.platform != "linux":
        return None
    offset = 200  # of tcpi_bytes_sent and tcpi_bytes_retrans in struct tcp_info, linux/tcp.h
    total = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # closed since it was listed, or not TCP
        if len(info) < offset + 16:
            return None  # before Linux 4.19
        sent, sent_again = struct.unpack_from("=QQ", info, offset)
        total += sent - sent_again  # the kernel of a busy machine may repeat a packet
    return total
