"""Several NCCL ranks on one GPU: each claims to be another host, so that NCCL uses sockets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import models
import torch
import torch.distributed as dist
from ranks import run_ranks

TIMEOUT = 240.0


def claim_another_host() -> None:
    """Make NCCL take this rank for a host. Called on every rank, before the first collective."""
    os.environ |= {
        "NCCL_HOSTID": f"host{dist.get_rank()}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


@contextmanager
def everything_on_the_gpu() -> Iterator[None]:
    """Make models and batches on the GPU, with kernels that give the same bits every time."""
    noise = models.noise

    def noise_there(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.device("cpu"):
            return noise(*args, **kwargs).cuda()

    generator = torch.Generator
    with (
        mock.patch.object(models, "noise", noise_there),
        mock.patch.object(torch, "Generator", lambda device="cpu": generator(device)),
        torch.device("cuda"),
    ):
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def _on_the_gpu(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    claim_another_host()
    with everything_on_the_gpu():
        return fn(*args, **kwargs)


def run_on_nccl(fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Run `fn` on ranks that share one GPU and form an NCCL group."""
    return run_ranks(
        _on_the_gpu, world_size, fn, args, kwargs, backend="nccl", timeout=TIMEOUT, fresh=True
    )
