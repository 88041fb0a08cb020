"""Changes of this rank's pieces outside of a step: `apply()`, `train()` and `eval()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardstep.comm.consensus import run_on_all_ranks
from shardstep.comm.join import AFTER_AN_ERROR
from shardstep.modes.base import Mode
from shardstep.params.dtensor import local_part
from shardstep.params.flat import flat
from shardstep.params.same_bits import same_bits
from shardstep.params.sharded_params import Shard, ShardedParams
from shardstep.state.state_dict import gather_whole


def apply(mode: Mode, act: Callable[[], object]) -> None:
    """Run `act`, which updates this rank's pieces, and send the result. Called on every rank.

    Raises:
        RuntimeError: on every rank, if it failed on one. Its changes are sent all the same, so
            parameters stay equal on all ranks.
    """
    if mode.join.enabled:
        raise RuntimeError(
            f"rank {mode.comm.group_rank}: apply(), train() and eval() cannot be called within "
            f"Join: joined ranks would not take part; call it before or after; {AFTER_AN_ERROR}"
        )
    mode.follow(stepping=True)
    pipeline, params = mode.pipeline, mode.pipeline.params
    before: dict[int, torch.Tensor] = {}

    def act_here() -> None:
        with pipeline.stepping():
            if mode.comm.world_size > 1:
                before.update({index: part.clone() for index, part in _frozen(params).items()})
            pipeline.local.mark_changed()
            with pipeline.local.exposed_options():
                pipeline.update(_hidden_gradients(params.shard), act)

    try:
        run_on_all_ranks(mode.comm, "apply()", act_here)
    finally:
        pipeline.mark_changed(params.trained)
        pipeline.gather.launch()
        _send_frozen(mode, before)


def _frozen(params: ShardedParams) -> dict[int, torch.Tensor]:
    """Return this rank's pieces of frozen parameters, which no gather covers."""
    found = {}
    for piece in params.shard.pieces:
        if not params.trainable[piece.param]:
            param = local_part(params.params[piece.param])
            elements = piece.param_interval.slice
            found[piece.param] = param.detach() if piece.entire else flat(param)[elements]
    return found


@torch.no_grad()
def _send_frozen(mode: Mode, before: dict[int, torch.Tensor]) -> None:
    """Send every frozen parameter of which a rank has changed its piece. Called on every rank.

    A frozen model is not sent for nothing.
    """
    now = _frozen(mode.pipeline.params)
    changed = run_on_all_ranks(
        mode.comm,
        "apply()",
        lambda: [index for index, old in before.items() if not same_bits(now[index], old)],
    )
    for index in sorted(set().union(*changed)):
        whole = gather_whole(mode.comm, mode.plan, index, now, mode.params)
        local_part(mode.params[index]).copy_(whole)


@contextmanager
def _hidden_gradients(shard: Shard) -> Iterator[None]:
    """Hide the gradients of a shard from an update that must not see them."""
    hidden = [(tensor, tensor.grad) for _, tensor in shard]
    for tensor, _ in hidden:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, grad in hidden:
            tensor.grad = grad
