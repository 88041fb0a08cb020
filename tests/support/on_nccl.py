"""Several NCCL ranks on one GPU: each claims to be another host, so that NCCL uses sockets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

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
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with OnTheGPU():
        yield


def _on_the_gpu(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    claim_another_host()
    with everything_on_the_gpu():
        return fn(*args, **kwargs)


def run_on_nccl(fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Run `fn` on ranks that share one GPU and form an NCCL group."""
    return run_ranks(
        _on_the_gpu, world_size, fn, args, kwargs, backend="nccl", timeout=TIMEOUT, fresh=True
    )
