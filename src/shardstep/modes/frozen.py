"""Changes that `apply` makes to frozen parameters, which no gather covers."""

from __future__ import annotations

import torch

from shardstep.comm import Comm
from shardstep.comm.consensus import run_on_all_ranks
from shardstep.params.dtensor import local_part
from shardstep.params.flat import flat
from shardstep.params.same_bits import same_bits
from shardstep.params.sharded_params import ShardedParams
from shardstep.plan import Piece
from shardstep.state.state_dict import gather_whole


class FrozenPieces:
    """This rank's pieces of frozen parameters.

    A frozen model is not sent for nothing: only parameters that have changed are.
    """

    def __init__(self, params: ShardedParams, comm: Comm) -> None:
        self._params = params
        self._comm = comm
        self._pieces = [
            piece
            for piece in params.shard.pieces
            if comm.world_size > 1 and not params.trainable[piece.param]
        ]
        self._before: list[tuple[Piece, torch.Tensor]] = []

    def _part(self, piece: Piece) -> torch.Tensor:
        param = local_part(self._params.params[piece.param])
        return param.detach() if piece.entire else flat(param)[piece.param_interval.slice]

    def remember(self) -> None:
        """Copy the pieces as they are now."""
        self._before = [(piece, self._part(piece).clone()) for piece in self._pieces]

    def _changed(self) -> list[int]:
        return [
            piece.param
            for piece, before in self._before
            if not same_bits(self._part(piece), before)
        ]

    @torch.no_grad()
    def send_changed(self) -> None:
        """Send every parameter of which a rank has changed its piece. Called on every rank."""
        changed = run_on_all_ranks(self._comm, "apply()", self._changed)
        for index in sorted(set().union(*changed)):
            own = {p.param: self._part(p) for p in self._pieces if p.param == index}
            param = self._params.params[index]
            whole = gather_whole(self._comm, self._params.plan, index, own, self._params.params)
            local_part(param).copy_(whole)
