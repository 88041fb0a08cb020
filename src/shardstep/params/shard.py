"""This rank's pieces, as tensors that an ordinary optimizer can step on."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import torch

from shardstep.params.dtensor import is_dtensor, local_part
from shardstep.params.masters import StepTensors
from shardstep.params.storage import flat
from shardstep.plan import Piece, ShardPlan

Widen = Callable[[Sequence[Piece], Sequence[torch.Tensor]], StepTensors]
"""Makes the tensors of a wider dtype, for those of a rank's pieces that are to have one."""


LetGo = Callable[[torch.Tensor, int], None]
"""Given a tensor and the address of its memory, sees to it that nobody else uses that."""


class Shard:
    """What one rank owns under a plan.

    A piece that is part of a parameter is a flat view of it. A piece that is a whole parameter is
    the parameter itself, whose gradient is where the optimizer looks for it and whose state is
    keyed as the user expects; or, with `apart`, a tensor beside it that shares its memory, for when
    the gradient of the piece is not what the user sees in `param.grad`. A DTensor is its local
    tensor here, and always has one beside it. Where a piece has a tensor of a wider dtype to be
    stepped on, it is that, in memory of its own.

    Args:
        plan: the placement.
        params: all parameters of the optimizer, in the plan's order.
        group_rank: whose pieces these are.
        apart: whether whole parameters too get a tensor of their own.
        widen: makes the tensors of a wider dtype.
    """

    def __init__(
        self,
        plan: ShardPlan,
        params: Sequence[torch.Tensor],
        group_rank: int,
        apart: bool,
        widen: Widen,
    ) -> None:
        self._params = params
        self._apart = apart
        self.pieces = tuple(sorted(plan.pieces(group_rank), key=lambda piece: piece.param))
        self._wide = widen(self.pieces, params)
        self._tensors = {piece.param: self._make(piece) for piece in self.pieces}
        self.views = [
            (piece, tensor) for piece, tensor in self if tensor is not params[piece.param]
        ]
        self._widened = [(piece, tensor) for piece, tensor in self if piece.param in self._wide]
        self._remember()

    def _make(self, piece: Piece) -> torch.Tensor:
        param = self._params[piece.param]
        apart = self._apart or piece.param in self._wide or is_dtensor(param)
        if piece.entire and not apart:
            return param
        return torch.nn.Parameter(self._view(piece), requires_grad=param.requires_grad)

    def _view(self, piece: Piece) -> torch.Tensor:
        """Where the piece lies: in its parameter's memory, or in that of its wider tensor."""
        if piece.param in self._wide:
            return self._wide.place(piece)
        param = local_part(self._params[piece.param])
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
        self._wide.repoint()
        self._place(self.views)

    def _place(self, views: Iterable[tuple[Piece, torch.Tensor]]) -> None:
        for piece, tensor in views:
            tensor.data = self._view(piece)
        self._remember()

    def begin(self) -> None:
        """A step is to come: let every tensor hold what its parameter holds."""
        if self._wide.begin():
            self._place(self._widened)

    def settle(self, let_go: LetGo, among: Container[int] | None = None) -> bool:
        """Let the parameters hold what an optimizer has made of the tensors of their pieces.

        Args:
            let_go: called for each tensor that was given other memory, before its own is used
                again.
            among: the numbers of the parameters that were stepped on; None for all.

        Returns:
            Whether any parameter of this shard has moved.
        """
        moved = self._take_back(let_go)
        self._wide.settle(among)
        return moved

    def end(self) -> None:
        """The step is over: let go of what was there for it alone."""
        if self._wide.end():
            self._place(self._widened)

    def masters(self) -> dict[int, torch.Tensor]:
        """The masters of the pieces that have one, by number of the parameter.

        Flat for a part of a parameter, in the parameter's shape for an entire one; not copies.
        """
        return self._wide.values()

    @property
    def wide_nbytes(self) -> int:
        """Bytes of the tensors of a wider dtype, while they are there."""
        return self._wide.nbytes

    def take_masters(self, masters: Mapping[int, torch.Tensor] | None) -> None:
        """Copy these into the masters of the pieces that have one; None: make them anew."""
        self._wide.take(masters)

    def _take_back(self, let_go: LetGo) -> bool:
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
        for index, tensor in self._tensors.items():
            if tensor.data_ptr() != before[index]:
                let_go(tensor, before[index])
        for piece, tensor in self.views:
            if tensor.data_ptr() != before[piece.param]:
                self._view(piece).copy_(tensor.detach())
        moved = any(
            tensor is self._params[index] and tensor.data_ptr() != before[index]
            for index, tensor in self._tensors.items()
        )
        self.repoint()
        return moved
