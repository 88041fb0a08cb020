"""One rank of the NCCL benchmark: it holds one contestant and does what its launcher asks.

`nccl.py` starts the ranks of a contestant and keeps them between rounds. A rank answers one command
at a time, over a pipe. Idle ranks have their model and its state on the GPU, and no work.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import measure
from contestants import CONTESTANTS, Setup, UnavailableError
from demo_model import GPT, GPT_17M, GPTConfig

SEED = 1234
WARM_UP = 3


@dataclass(frozen=True)
class Model:
    """A model and the effort to spend on it."""

    config: GPTConfig
    batch_size: int
    rounds: int
    steps: int


MODELS = {
    "gpt-tiny": Model(GPTConfig(n_layer=2, n_head=2, n_embd=64), 2, 2, 2),
    "gpt-17m": Model(GPT_17M, 8, 5, 10),
    # 51.5 million elements in each of the embedding and the head, 151 million in the blocks.
    "gpt-255m": Model(GPTConfig(50304, 512, 12, 16, 1024, tied=False), 8, 3, 4),
    "gpt-836m": Model(GPTConfig(13824, 512, 28, 16, 1536, tied=False), 4, 3, 3),
}


@dataclass(frozen=True)
class Workload:
    """The training that every contestant does.

    Attributes:
        num_gpus: the GPUs of this machine; 0 to train on the CPU, over Gloo.
        precision: `fp32`, or `bf16` for autocast.
        deterministic: use the kernels that give the same bits every time.
    """

    model: str
    world_size: int
    num_gpus: int
    batch_size: int
    precision: str = "fp32"
    muon: bool = False
    compiled: bool = False
    bucket_mib: float | None = None
    deterministic: bool = False

    @property
    def shares_gpu(self) -> bool:
        return 0 < self.num_gpus < self.world_size

    @property
    def setup(self) -> Setup:
        nbytes = None if self.bucket_mib is None else int(self.bucket_mib * 2**20)
        device = "cuda" if self.num_gpus else "cpu"
        return Setup(device, self.muon, nbytes, self.compiled)


Phase = Callable[[str], AbstractContextManager[object]]
"""Surrounds the forward, the backward and the step of an iteration."""


class Runner:
    """A contestant on this rank. Its public methods are called on every rank."""

    def __init__(self, contestant: str, workload: Workload, rank: int) -> None:
        self.workload, self.rank = workload, rank
        self.cuda = workload.num_gpus > 0
        self.device = torch.device("cuda", rank % workload.num_gpus) if self.cuda else "cpu"
        self.num_steps = 0
        self.trainee = CONTESTANTS[contestant].build(self.make_model, workload.setup)
        self.peaks = {"construction": self._take_peak()}
        self.held = torch.cuda.memory_allocated() if self.cuda else 0
        if workload.compiled:
            for module in self.trainee.to_compile:
                module.compile()
        # Load kernels, connect and compile now, while the other contestants do. They do it at the
        # same time, so activations are small unless the shapes matter.
        (x, y), few = self._batches(1)[0], None if workload.compiled else 1
        self._step((x[:few], y[:few]))
        self._rest()

    def make_model(self) -> nn.Module:
        """Make the same weights on every rank."""
        torch.manual_seed(SEED)
        with torch.device(self.device):
            return GPT(MODELS[self.workload.model].config)

    def memory(self) -> dict[str, Any]:
        """Take the first steps, and return bytes: allocated, planned, and at peak by phase."""
        losses = [self._step(batch) for batch in self._batches(WARM_UP)]
        self.peaks["first steps"] = self._take_peak()
        losses += [self._step(batch, self._peak_of) for batch in self._batches(2)]
        self._rest()
        report = getattr(self.trainee.optimizer, "report", None)
        return {
            "parameter_bytes": measure.parameter_bytes(self.trainee.model),
            "held_bytes": self.held,
            "planned_bytes": None if report is None else _planned(report()),
            "losses": [float(loss) for loss in losses],
        }

    def time(self, warmup: int, steps: int) -> dict[str, Any]:
        """Take steps, and return their seconds and losses; synchronise only before and after."""
        batches = self._batches(warmup + steps)
        losses = [self._step(batch) for batch in batches[:warmup]]
        dist.barrier()
        self._synchronize()
        start = time.perf_counter()
        losses += [self._step(batch) for batch in batches[warmup:]]
        self._synchronize()
        seconds = time.perf_counter() - start
        self.peaks["rounds"] = max(self.peaks.get("rounds", 0), self._take_peak())
        self._rest()
        return {
            "seconds": seconds,
            "losses": [float(loss) for loss in losses],
            "peaks": self.peaks,
        }

    def trace(self, path: str, steps: int) -> None:
        """Profile steps, on rank 0 alone."""
        for batch in self._batches(2 * WARM_UP):
            self._step(batch)
        batches = self._batches(steps)
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities) if self.rank == 0 else nullcontext() as profiler:
            for batch in batches:
                self._step(batch, lambda phase: record_function(f"iteration::{phase}"))
            self._synchronize()
        if profiler is not None:
            profiler.export_chrome_trace(path)

    def _step(
        self, batch: tuple[Tensor, Tensor], phase: Phase = lambda name: nullcontext()
    ) -> Tensor:
        autocast = torch.autocast(
            self.workload.setup.device, torch.bfloat16, enabled=self.workload.precision == "bf16"
        )
        with phase("forward"), autocast:
            loss: Tensor = self.trainee.model(*batch)[1]
        with phase("backward"):
            self.trainee.backward(loss)
        with phase("step"):
            self.trainee.update()
        return loss.detach()

    def _batches(self, num: int) -> list[tuple[Tensor, Tensor]]:
        config = MODELS[self.workload.model].config
        shape = (self.workload.batch_size, config.block_size + 1)
        batches = []
        for step in range(self.num_steps, self.num_steps + num):
            generator = torch.Generator().manual_seed(SEED + 1_000_003 * step + self.rank)
            tokens = torch.randint(config.vocab_size, shape, generator=generator).to(self.device)
            batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        self.num_steps += num
        return batches

    @contextmanager
    def _peak_of(self, phase: str) -> Iterator[None]:
        self._take_peak()
        yield
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._take_peak())

    def _take_peak(self) -> int:
        """Return the peak since the last call."""
        if not self.cuda:
            return 0
        self._synchronize()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def _rest(self) -> None:
        """Leave the memory that is not used now to the other contestants."""
        self._synchronize()
        if self.cuda:
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def _planned(report: Any) -> int:
    names = ("parameter", "gradient", "master", "state")
    return sum(getattr(report, f"{name}_nbytes") for name in names)


def serve(
    connection: Connection,
    contestant: str,
    workload: Workload,
    rank: int,
    folder: Path,
    timeout: float,
) -> None:
    """Build the contestant and answer commands until the launcher sends None."""
    with (folder / f"{contestant}-{workload.world_size}-{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives its launcher
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the launcher asks where a rank hangs
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        _join(workload, rank, f"file://{folder}/{contestant}-{workload.world_size}", timeout)
        runner = Runner(contestant, workload, rank)
        connection.send((True, None))
        for name, *args in iter(connection.recv, None):
            connection.send((True, getattr(runner, name)(*args)))
        dist.destroy_process_group()
    except UnavailableError as error:
        connection.send((False, str(error)))
    except Exception:
        connection.send((False, traceback.format_exc()))


def _join(workload: Workload, rank: int, rendezvous: str, timeout: float) -> None:
    if workload.shares_gpu:
        # NCCL refuses ranks that share a GPU unless it takes them for hosts.
        os.environ |= {
            "NCCL_HOSTID": f"host{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_NET": "Socket",
        }
    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed asks
    device = None
    if workload.num_gpus:
        device = torch.device("cuda", rank % workload.num_gpus)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if workload.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    dist.init_process_group(
        "nccl" if workload.num_gpus else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=workload.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device,
    )
