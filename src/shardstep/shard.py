"""This rank's pieces, as tensors that an ordinary optimizer can step on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardstep.buffers import flat
from shardstep.plan import Piece, ShardPlan


class Shard:
    """What one rank owns under a plan.

    A piece that is part of a parameter is a flat view of it. A piece that is a whole parameter is
    the parameter itself, whose gradient is where the optimizer looks for it and whose state is
    keyed as the user expects; or, with `apart`, a tensor beside it that shares its memory, for when
    the gradient of the piece is not what the user sees in `param.grad`.

    Args:
        plan: the placement.
        params: all parameters of the optimizer, in the plan's order.
        group_rank: whose pieces these are.
        apart: whether whole parameters too get a tensor of their own.
    """

    def __init__(
        self, plan: ShardPlan, params: Sequence[torch.Tensor], group_rank: int, apart: bool
    ) -> None:
        self._params = params
        self._apart = apart
        self.pieces = tuple(sorted(plan.pieces(group_rank), key=lambda piece: piece.param))
        self._tensors = {piece.param: self._make(piece) for piece in self.pieces}
        self.views = [
            (piece, tensor) for piece, tensor in self if tensor is not params[piece.param]
        ]
        self._remember()

    def _make(self, piece: Piece) -> torch.Tensor:
        param = self._params[piece.param]
        if piece.entire and not self._apart:
            return param
        return torch.nn.Parameter(self._view(piece), requires_grad=param.requires_grad)

    def _view(self, piece: Piece) -> torch.Tensor:
        """Where the piece lies in its parameter's memory."""
        param = self._params[piece.param]
        return param.detach() if piece.entire else flat(param)[piece.param_interval.slice]

    def _remember(self) -> None:
        self._addresses = [tensor.data_ptr() for tensor in self._tensors.values()]

    def __iter__(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Each piece and what the local optimizer steps on for it, by number of the parameter."""
        return ((piece, self._tensors[piece.param]) for piece in self.pieces)

    def in_group(self, params: range) -> list[tuple[int, torch.Tensor]]:
        """The pieces of the parameters numbered `params`, each with its parameter's number."""
        return [(index, self._tensors[index]) for index in params if index in self._tensors]

    def repoint(self) -> None:
        """Follow the parameters to where their data lies now, keeping the piece objects."""
        for piece, tensor in self.views:
            tensor.data = self._view(piece)
        self._remember()

    def settle(self) -> bool:
        """Take back what an optimizer wrote beside its tensors instead of into them.

        Some optimizers assign `p.data` a new tensor. Where `p` is a view of a parameter, the values
        are copied to where they belong; where it is the parameter, that has moved, as the
        optimizer wanted.

        Returns:
            Whether any parameter of this shard has moved.
        """
        now = [tensor.data_ptr() for tensor in self._tensors.values()]
        if now == self._addresses:
            return False
        before = dict(zip(self._tensors, self._addresses, strict=True))
        for piece, tensor in self.views:
            if tensor.data_ptr() != before[piece.param]:
                self._view(piece).copy_(tensor.detach())
        moved = any(
            tensor is self._params[index] and tensor.data_ptr() != before[index]
            for index, tensor in self._tensors.items()
        )
        self.repoint()
        return moved
