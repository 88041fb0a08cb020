"""This rank's pieces, as tensors that an ordinary optimizer can step on."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import torch

from shardstep.params.dtensor import is_dtensor, local_part
from shardstep.params.masters import StepTensors
from shardstep.params.storage import flat
from shardstep.plan import Piece

FreeMemory = Callable[[torch.Tensor, int], None]
"""Given a tensor and an address, moves the tensor's state away from that address."""


class Shard:
    """The tensors that one rank's optimizer steps on.

    A part of a parameter is a flat view of it. An entire parameter is itself, so that the optimizer
    finds `param.grad` and keys its state as the user expects. With `separate`, it is another tensor
    on the same memory, because `param.grad` is not the gradient to step on. A DTensor is
    represented by its local tensor, and a piece in `wide` by its wider step tensor.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        params: Sequence[torch.Tensor],
        separate: bool,
        wide: StepTensors,
    ) -> None:
        self._params = params
        self._separate = separate
        self.wide = wide
        self.pieces = pieces
        self._tensors = {piece.param: self._make(piece) for piece in pieces}
        self.views = [(piece, each) for piece, each in self if each is not params[piece.param]]
        self._widened = [(piece, tensor) for piece, tensor in self if piece.param in wide]
        self._point(())

    def _make(self, piece: Piece) -> torch.Tensor:
        param = self._params[piece.param]
        separate = self._separate or piece.param in self.wide or is_dtensor(param)
        if piece.entire and not separate:
            return param
        return torch.nn.Parameter(self._view(piece), requires_grad=param.requires_grad)

    def _view(self, piece: Piece) -> torch.Tensor:
        """Return the piece's memory: in its parameter, or in its wider step tensor."""
        if piece.param in self.wide:
            return self.wide.place(piece)
        param = local_part(self._params[piece.param])
        return param.detach() if piece.entire else flat(param)[piece.param_interval.slice]

    def __iter__(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield each piece with the tensor that is stepped on, by parameter number."""
        return ((piece, self._tensors[piece.param]) for piece in self.pieces)

    def in_group(self, params: range) -> list[tuple[int, torch.Tensor]]:
        """Return the tensors of these parameters, each with its parameter's number."""
        return [(index, self._tensors[index]) for index in params if index in self._tensors]

    def repoint(self) -> None:
        """Follow the parameters to where their data lies now; the tensor objects stay."""
        self.wide.repoint()
        self._point(self.views)

    def _point(self, views: Iterable[tuple[Piece, torch.Tensor]]) -> None:
        """Point these tensors at their pieces, and remember the addresses of all."""
        for piece, tensor in views:
            tensor.data = self._view(piece)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors.values()]

    def refresh(self) -> None:
        """Give every step tensor its parameter's value, before a step."""
        if self.wide.refresh():
            self._point(self._widened)

    def write_back(self, free_memory: FreeMemory, among: Container[int] | None = None) -> bool:
        """Write back step tensors of these parameters. Return True if a parameter has moved.

        `free_memory` is called for each tensor that the optimizer pointed at other memory.
        """
        moved = self._copy_reassigned(free_memory)
        self.wide.write_back(among)
        return moved

    def release(self) -> None:
        """Free what only the step needed."""
        if self.wide.release():
            self._point(self._widened)

    def _copy_reassigned(self, free_memory: FreeMemory) -> bool:
        """Copy back views that the optimizer pointed at other memory by assigning `p.data`.

        Return True if `p` was a parameter, which has moved now.
        """
        before = zip(self._tensors.items(), self._addresses, strict=True)
        moved = [(n, each, address) for (n, each), address in before if each.data_ptr() != address]
        if not moved:
            return False
        for _, tensor, address in moved:
            free_memory(tensor, address)
        numbers = {number for number, _, _ in moved}
        for piece, tensor in self.views:
            if piece.param in numbers:
                self._view(piece).copy_(tensor.detach())
        self.repoint()
        return any(tensor is self._params[number] for number, tensor, _ in moved)
