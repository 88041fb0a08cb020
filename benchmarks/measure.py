"""Read what a rank holds and sends: bytes of optimizer state, of gradients, on the wire."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def sent_bytes(interface: str) -> int:
    """Bytes this host's interface has sent so far, protocol headers included."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def wait_until_quiet(interface: str, limit_s: float = 2.0) -> None:
    """Return once the interface has all but stopped sending.

    A contestant may leave a gather in flight for its next forward; the next contestant's block
    must not share the link with it.
    """
    deadline = time.monotonic() + limit_s
    before = sent_bytes(interface)
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = sent_bytes(interface)
        if now - before < 4096:
            return
        before = now


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the unsharded model: Ψ elements at their own dtype."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def state_bytes(optimizer: Any) -> int:
    """Tensor bytes of the optimizer's state on this rank."""
    return sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for tensor in _local_tensors(state)
    )


def gradient_bytes(model: nn.Module, optimizer: Any) -> int | None:
    """Bytes of memory behind every `.grad` of the model and of the local optimizer.

    None where there is no `.grad`: the gradients are kept elsewhere. Memory is counted once
    however many gradients view it. What a wrapper keeps to itself, such as DDP's reduction
    buckets when gradients do not view them, cannot be seen from here; of ours, the buffers that
    gradients pass through are counted too.
    """
    owners = [*model.parameters(), *(p for g in optimizer.param_groups for p in g["params"])]
    held: dict[int, int] = {}
    for owner in owners:
        reducer = getattr(owner.grad, "reducer", None)
        if reducer is not None:  # ours is a placeholder; its reducer has the numbers
            held[id(reducer)] = reducer.nbytes
            continue
        for grad in _local_tensors(owner.grad):
            storage = grad.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values()) if held else None


def _local_tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _local_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _local_tensors(item)
