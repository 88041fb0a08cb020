"""Process groups that form again after `torchrun --max-restarts` has restarted the ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous


def init_process_group(
    backend: str | None = None, timeout: timedelta | None = None, **options: Any
) -> None:
    """Do what `torch.distributed.init_process_group` does, and survive restarts.

    Called on every rank, under `torchrun`. All attempts of a job share torchrun's store. Ranks of a
    new attempt find the addresses of dead ranks there, and often fail with `connectFullMesh
    failed`. Here each attempt uses separate keys in that store.

    Args:
        backend, timeout: as for `torch.distributed.init_process_group`.
        options: further options of that function, such as `device_id`.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is not None:
        patience = default_pg_timeout if timeout is None else timeout
        store, rank, world_size = next(rendezvous("env://", timeout=patience))
        store.set_timeout(patience)
        store = PrefixStore(f"attempt {attempt} of {world_size} ranks", store)
        options |= {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(backend, timeout=timeout, **options)
