"""From every rank's segment to everybody's parameters."""

from __future__ import annotations

from collections import deque

import torch

from shardstep.buffers import Home
from shardstep.comm import Comm, Pending
from shardstep.plan import Bucket, ShardPlan


def gather_parameters(comm: Comm, plan: ShardPlan, home: Home) -> None:
    """Bring every trainable parameter up to date on every rank, with one gather per bucket.

    Called on every rank. Buckets travel in the order of the plan, as many at a time as the home
    has buffers for.
    """
    in_flight: deque[tuple[Bucket, torch.Tensor, Pending]] = deque()

    def land() -> None:
        bucket, buffer, pending = in_flight.popleft()
        pending.wait()
        home.store(bucket, buffer)

    if comm.world_size == 1:
        return
    for bucket in plan.training_buckets:
        if len(in_flight) == home.depth:
            land()
        buffer = home.load(bucket)
        in_flight.append((bucket, buffer, comm.all_gather(buffer, bucket.cuts)))
    while in_flight:
        land()
