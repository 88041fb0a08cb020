"""All parameters under one plan: their storage, and this rank's pieces as tensors to step on."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import torch

from shardstep.params.dtensor import is_dtensor, local_part
from shardstep.params.masters import Masters, StepCopies, StepTensors
from shardstep.params.stochastic_rounding import StochasticRounding
from shardstep.params.storage import BucketViews, OwnStorage, ParamStorage, flat
from shardstep.plan import Piece, ShardPlan

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


class ShardedParams:
    """The parameters of an optimizer under one plan, left alone until `attach` is called.

    `step_dtypes` has the parameters that are stepped on in a wider dtype, by number. With
    `rounding`, their wide copies are rounded stochastically and not kept as masters. With
    `separate`, entire parameters get a separate step tensor.
    """

    def __init__(
        self,
        plan: ShardPlan,
        params: Sequence[torch.Tensor],
        group_rank: int,
        bucket_views: bool,
        separate: bool,
        step_dtypes: Mapping[int, torch.dtype],
        rounding: StochasticRounding | None,
    ) -> None:
        self.plan = plan
        self.params = params
        self.trainable = [spec.trainable for spec in plan.specs]
        self.frozen = [index for index, trains in enumerate(self.trainable) if not trains]
        self.step_dtypes = step_dtypes
        storage = BucketViews if bucket_views else OwnStorage
        self.storage: ParamStorage = storage(plan, params, group_rank)
        pieces = tuple(sorted(plan.pieces(group_rank), key=lambda piece: piece.param))
        narrow = [piece for piece in pieces if piece.param in step_dtypes]
        wide: StepTensors = (
            Masters(narrow, params, step_dtypes, self.storage.flat)
            if rounding is None
            else StepCopies(narrow, params, step_dtypes, self.storage.flat, rounding)
        )
        self.shard = Shard(pieces, params, separate, wide)

    def attach(self) -> None:
        """Take the parameters in, wherever their data lies now."""
        self.storage.attach()
        self.shard.repoint()

    def unchanged(self) -> bool:
        """Return True if no parameter was moved, frozen or unfrozen since `attach`."""
        with torch._C.DisableTorchFunctionSubclass():  # do not wait for parameters in flight
            # As `is_trainable`, written out: it is asked of every parameter three times a step.
            now = [param.requires_grad or param.grad is not None for param in self.params]
            return self.trainable == now and self.storage.intact()

    def write_back(self, free_memory: FreeMemory, among: Container[int] | None = None) -> None:
        """Write updated pieces of these parameters, or of all, back. See `Shard.write_back`."""
        if self.shard.write_back(free_memory, among):
            self.attach()

    def mark_changed(self, among: Iterable[int] | None = None) -> None:
        """Tell autograd that these parameters, or all that have a gradient, were written to.

        A backward pass on the old values then fails on every rank, as after any optimizer's step.
        """
        changed = None if among is None else [self.params[index] for index in among]
        if changed is None:
            with torch._C.DisableTorchFunctionSubclass():
                changed = [param for param in self.params if param.grad is not None]
        torch.autograd.graph.increment_version(changed)
