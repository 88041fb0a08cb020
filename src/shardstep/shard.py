"""This rank's pieces, as tensors that an ordinary optimizer can step on.

A piece that is a whole parameter is the parameter itself: its gradient is where the optimizer
looks for it, and its state is keyed as the user expects. A piece that is part of a parameter is a
flat view of it, and is lent the matching part of the gradient for the time of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardstep.buffers import flat
from shardstep.plan import Piece, ShardPlan


class Shard:
    """What one rank owns under a plan.

    Args:
        plan: the placement.
        params: all parameters of the optimizer, in the plan's order.
        group_rank: whose pieces these are.
    """

    def __init__(self, plan: ShardPlan, params: Sequence[torch.Tensor], group_rank: int) -> None:
        self._params = params
        self.pieces = tuple(sorted(plan.pieces(group_rank), key=lambda piece: piece.param))
        self._tensors = {piece.param: self._make(piece) for piece in self.pieces}
        self._cut = [piece for piece in self.pieces if not piece.entire]
        self._cut_anywhere = [
            (plan.specs[slot.param].name, params[slot.param])
            for bucket in plan.buckets
            for slot in bucket.slots
            if _is_cut(slot.footprint.start, slot.bucket_offset + slot.numel, bucket.cuts)
        ]
        self._addresses: list[int] = []
        self._remember()

    def _make(self, piece: Piece) -> torch.Tensor:
        param = self._params[piece.param]
        if piece.entire:
            return param
        return torch.nn.Parameter(self._view(piece), requires_grad=param.requires_grad)

    def _view(self, piece: Piece) -> torch.Tensor:
        return flat(self._params[piece.param])[piece.param_interval.slice]

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
        for piece in self._cut:
            self._tensors[piece.param].data = self._view(piece)
        self._remember()

    def settle(self) -> bool:
        """Take back what an optimizer wrote beside its tensors instead of into them.

        Some optimizers assign `p.data` a new tensor. For a part of a parameter the values are
        copied to where they belong; a whole parameter has moved, as the optimizer wanted.

        Returns:
            Whether any whole parameter of this shard has moved.
        """
        if self._addresses == [tensor.data_ptr() for tensor in self._tensors.values()]:
            return False
        for piece in self._cut:
            self._view(piece).copy_(self._tensors[piece.param].detach().reshape(-1))
        entire = [p.param for p in self.pieces if p.entire]
        before = dict(zip(self._tensors, self._addresses, strict=True))
        moved = any(self._params[index].data_ptr() != before[index] for index in entire)
        self.repoint()
        return moved

    def lend_gradients(self) -> None:
        """Point each part of a parameter at its part of that parameter's gradient.

        Raises:
            ValueError: if a parameter that is cut anywhere has a sparse gradient; found on every
                rank, whether or not it owns a part of it.
        """
        for name, param in self._cut_anywhere:
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise ValueError(
                    f"parameter {name!r} has a sparse gradient, which cannot be cut into slices; "
                    'construct the optimizer with layout="whole"'
                )
        for piece in self._cut:
            param = self._params[piece.param]
            self._tensors[piece.param].grad = (
                None
                if param.grad is None
                else flat(param.grad, param.stride())[piece.param_interval.slice]
            )

    def return_gradients(self) -> None:
        """Let go of the gradients, so that `zero_grad()` can free them."""
        for piece in self._cut:
            self._tensors[piece.param].grad = None


def _is_cut(start: int, stop: int, cuts: Sequence[int]) -> bool:
    """Whether a cut falls strictly between `start` and `stop`."""
    if isinstance(cuts, range):
        return stop > start and start // cuts.step != (stop - 1) // cuts.step
    return False
