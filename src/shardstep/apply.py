"""What is done to every rank's share outside of a step, and how it reaches the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from shardstep.comm.consensus import run_on_all_ranks
from shardstep.params.dtensor import local_part
from shardstep.params.same_bits import same_bits
from shardstep.params.storage import flat

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer


def apply_to_shares(zero: ZeroRedundancyOptimizer, act: Callable[[Optimizer], object]) -> None:
    """See `ZeroRedundancyOptimizer.apply`. Called on every rank."""
    if zero._join_config.enable:
        raise RuntimeError(
            f"rank {zero.rank}: apply(), train() and eval() cannot be called within Join: "
            "ranks that have run out of data would not take part; call it before or after"
        )
    zero._prepare_step()
    # No gather is for these, and a frozen model is not to be sent for nothing.
    frozen = [
        (piece.param, tensor, tensor.detach().clone())
        for piece, tensor in zero._shard
        if zero.world_size > 1 and not zero._trainable[piece.param]
    ]

    def act_here() -> None:
        # Gradients of entire parameters may be there, and those of slices not.
        gradients = [(tensor, tensor.grad) for _, tensor in zero._shard]
        for tensor, _ in gradients:
            tensor.grad = None
        try:
            act(zero.optim)
        finally:
            for tensor, grad in gradients:
                tensor.grad = grad
            zero._settle()
            zero._shard.end()
            zero._local.publish_options()

    def changed() -> list[int]:
        return [index for index, now, before in frozen if not same_bits(now, before)]

    try:
        run_on_all_ranks(zero._comm, "apply()", act_here)
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            trained = [
                param for param, trains in zip(zero._params, zero._trainable, strict=True) if trains
            ]
        torch.autograd.graph.increment_version(trained)
        zero._gather.launch()
        for index in sorted(set().union(*run_on_all_ranks(zero._comm, "apply()", changed))):
            _spread(zero, index)


@torch.no_grad()
def _spread(zero: ZeroRedundancyOptimizer, index: int) -> None:
    """Give every rank what the owners hold of a parameter that no gather is for."""
    param = local_part(zero._params[index])
    own = {
        piece.param: param if piece.entire else flat(param)[piece.param_interval.slice]
        for piece in zero._shard.pieces
        if piece.param == index
    }
    param.copy_(zero._whole(index, own))
