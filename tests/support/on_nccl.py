"""Several NCCL ranks on one GPU: each claims to be another host, so that NCCL uses sockets."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from ranks import RankFailure, end_idle_processes, run_ranks
from shared_gpu import MPS
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

TIMEOUT, TIMEOUT_WITHOUT_MPS = 120.0, 240.0


class OnTheGPU(TorchFunctionMode):
    """Makes tensors on the GPU; those of a seeded CPU generator are drawn on the CPU and moved."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _device_constructors() and options.get("device") is None:
            generator = options.get("generator")
            if generator is not None and generator.device.type == "cpu":
                return func(*args, **{**options, "device": "cpu"}).cuda()
            options["device"] = "cuda"
        return func(*args, **options)


@contextmanager
def everything_on_the_gpu() -> Iterator[None]:
    """Make models and batches on the GPU, with kernels that give the same bits every time."""
    with same_bits(), OnTheGPU():
        yield


@contextmanager
def same_bits() -> Iterator[None]:
    """Use kernels that give the same bits every time.

    Afterwards the settings are as before, so that the process can be reused.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    torch.use_deterministic_algorithms(True)
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    torch.cuda.manual_seed(0)
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
        torch.use_deterministic_algorithms(False)


def _on_the_gpu(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with everything_on_the_gpu():
        return fn(*args, **kwargs)


def with_same_bits(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn`, which moves models and batches to the GPU itself."""
    with same_bits():
        return fn(*args)


def _sum_of_ranks() -> float:
    value = torch.full((1,), dist.get_rank() + 1.0, device="cuda")
    dist.all_reduce(value)
    return value.item()


def _start_mps() -> None:
    """Start MPS, unless it runs, and see whether ranks can work under it."""
    if MPS.running or MPS.refusal:
        return
    end_idle_processes()  # those that run without it
    MPS.start()
    if MPS.running:
        try:
            run_ranks(_sum_of_ranks, 2, backend="nccl", timeout=60)
        except RankFailure as failure:
            _refuse_mps(str(failure).strip().splitlines()[-1])


def _refuse_mps(reason: str) -> None:
    end_idle_processes()
    MPS.refuse(reason)
    warnings.warn(f"ranks have no MPS daemon of their own: {reason}", stacklevel=3)


def run_on_nccl(fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Run `fn` on ranks that share one GPU, with everything made there."""
    return run_nccl_ranks(_on_the_gpu, world_size, fn, args, kwargs)


def run_nccl_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `fn` on ranks that share one GPU and form an NCCL group, under MPS if possible."""
    _start_mps()
    under_mps = MPS.running
    timeout = TIMEOUT if under_mps else TIMEOUT_WITHOUT_MPS
    try:
        return run_ranks(fn, world_size, *args, backend="nccl", timeout=timeout)
    except BaseException as failure:
        # A rank that dies leaves the MPS server in any state: the next call starts another.
        end_idle_processes()
        MPS.stop()
        if not (under_mps and re.search("MPS (client|server)", str(failure))):
            raise
    _refuse_mps("an error of MPS itself")
    return run_nccl_ranks(fn, world_size, *args)
