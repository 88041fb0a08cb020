"""Uneven inputs: what a rank that has run out of data does while the others go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from shardstep.buffers import flat
from shardstep.comm import Comm
from shardstep.plan import ShardPlan


class _ZeROJoinHook(JoinHook):
    """Shadows what the ranks that still have data do.

    A joined rank goes on owning its part of the state, so it has to go on updating it.

    Args:
        shadow: takes part in the next thing that those ranks do.
    """

    def __init__(self, shadow: Callable[[], object]) -> None:
        self._shadow = shadow

    def main_hook(self) -> None:
        """Take part. Called on every joined rank."""
        self._shadow()


def announced(comm: Comm, own: list[Any] | None) -> tuple[list[Any], int]:
    """What the ranks that have data are about to do. Called on every rank.

    Args:
        comm: the ranks.
        own: what this rank is about to do; None if it has no data.

    Returns:
        What they are about to do, and the first of them.

    Raises:
        RuntimeError: on every rank, if they are not about to do the same.
    """
    texts = [text.decode() for text in comm.all_gather_bytes(json.dumps(own).encode())]
    said = [json.loads(text) for text in texts]
    active = [rank for rank, what in enumerate(said) if what is not None]
    if any(said[rank] != said[active[0]] for rank in active):
        raise RuntimeError(
            f"rank {comm.group_rank}: ranks are about to do different things: {texts}"
        )
    return said[active[0]], active[0]


def provide_gradients(
    comm: Comm, plan: ShardPlan, params: Sequence[torch.Tensor], joined: bool
) -> None:
    """Give each joined rank the gradients of what it owns, from a rank that has data.

    Called on every rank, before a step. DDP shadows its reductions on a joined rank but does not
    put their results into `param.grad` there: what that holds is left over from the rank's last
    batch, and a step on it would be wrong without anybody noticing.

    Args:
        comm: the ranks.
        plan: the placement.
        params: all parameters, in the plan's order.
        joined: whether this rank has run out of data.
    """
    without = [index for index, param in enumerate(params) if param.grad is None]
    said = comm.all_gather_bytes(b"" if joined else json.dumps(without).encode())
    source = next(rank for rank, text in enumerate(said) if text)
    if joined:
        for index in json.loads(said[source]):
            params[index].grad = None
    missing = set(json.loads(said[source]))
    for target in (rank for rank, text in enumerate(said) if not text):
        if comm.group_rank not in (source, target):
            continue
        for bucket in plan.training_buckets:
            for piece in bucket.pieces(target):
                if piece.param in missing or not piece.param_interval.numel:
                    continue
                param = params[piece.param]
                if joined and (param.grad is None or param.grad.stride() != param.stride()):
                    param.grad = torch.zeros_like(param)
                assert param.grad is not None
                part = flat(param.grad, param.stride())[piece.param_interval.slice]
                raw = part.view(torch.uint8)
                if joined:
                    comm.receive(raw, source)
                else:
                    comm.send(raw, target)
