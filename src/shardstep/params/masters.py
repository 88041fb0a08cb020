"""What an optimizer steps on in place of a 16-bit piece: the same elements in fp32.

Two kinds, with the same methods: `Masters` stay from one step to the next, and what the model sees
is their rounding; `Copies` are made for a step from what the model sees, and rounded at random.

Note [Writes to a parameter that has a master]

A user may write to a parameter between two steps: load a checkpoint, clamp weights, swap an average
in. The master does not know, and its rounding, at the end of the next step, would undo the write
without a word. So before each step the parameter's piece is compared with the rounding of the
master, and where an element differs in a bit, the master takes the parameter's value. It costs one
pass over this rank's share, and nothing gets past it: an autograd version counter would be cheaper,
but does not see writes through `.data`. A write of the very value that the parameter has is no
change, and the master keeps what it knows beyond the parameter's precision.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardstep.params.dtensor import local_part
from shardstep.params.stochastic_rounding import StochasticRounding
from shardstep.params.storage import flat
from shardstep.plan import Piece
from shardstep.plan.placement import aligned

CHUNK = 1 << 18
"""How many elements are compared at a time on a CPU: few enough to stay in its cache."""


class StepTensors(Protocol):
    """Tensors of a wider dtype than the parameters they stand for."""

    def __contains__(self, param: object) -> bool:
        """Whether this rank's piece of the parameter with this number has one."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, while they are there."""

    def place(self, piece: Piece) -> torch.Tensor:
        """Where the optimizer's tensor for `piece` lies: flat, or in the parameter's shape."""

    def repoint(self) -> None:
        """Follow the parameters to where their data lies now."""

    def begin(self) -> bool:
        """A step is to come: hold what the parameters hold. Returns whether places have changed."""

    def settle(self, among: Container[int] | None = None) -> None:
        """Round into the parameters with these numbers, or all."""

    def end(self) -> bool:
        """The step is over. Returns whether places have changed."""

    def values(self) -> dict[int, torch.Tensor]:
        """What is worth keeping beyond the parameters, by number of the parameter."""

    def take(self, values: Mapping[int, torch.Tensor] | None) -> None:
        """Hold these instead, of those that this has; None for what the parameters hold."""


@dataclass(slots=True)
class _Stretch:
    """Pieces of one bucket, back to back.

    Attributes:
        pieces: the pieces, by ascending offset.
        offsets: where each lies in `wide`.
        numel: how many elements they take together, padding included.
        wide: their elements in the wider dtype, flat.
    """

    pieces: list[Piece]
    offsets: list[int]
    numel: int
    wide: torch.Tensor | None = None


class _Laid:
    """What both kinds have in common: pieces laid back to back, and where they lie in parameters.

    Args:
        pieces: those of this rank's pieces that are to have a tensor of a wider dtype.
        params: all parameters, in the plan's order.
        dtypes: the wider dtype, by number of the parameter.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        params: Sequence[torch.Tensor],
        dtypes: Mapping[int, torch.dtype],
    ) -> None:
        self._params = params
        self._dtypes = dtypes
        # Those of the plan, whatever the parameters have by the time that there is another one.
        self._strides = {p.param: local_part(params[p.param]).stride() for p in pieces}
        self._stretches: list[_Stretch] = []
        self._found: dict[int, tuple[_Stretch, int]] = {}
        by_bucket: dict[int, list[Piece]] = {}
        for piece in sorted(pieces, key=lambda piece: piece.bucket_offset):
            by_bucket.setdefault(piece.bucket, []).append(piece)
        for held in by_bucket.values():
            stretch = _Stretch(held, [], 0)
            for piece in held:
                stretch.offsets.append(stretch.numel)
                self._found[piece.param] = (stretch, stretch.numel)
                stretch.numel += aligned(piece.param_interval.numel)
            self._stretches.append(stretch)
        self._narrow: dict[int, torch.Tensor] = {}

    def __contains__(self, param: object) -> bool:
        return param in self._found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, while they are there."""
        return sum(
            stretch.numel * self._dtypes[stretch.pieces[0].param].itemsize
            for stretch in self._stretches
        )

    def _allocate(self, stretch: _Stretch) -> torch.Tensor:
        first = stretch.pieces[0].param
        return torch.empty(
            stretch.numel, dtype=self._dtypes[first], device=self._params[first].device
        )

    def _look(self) -> None:
        """Remember where each piece lies in its parameter."""
        for stretch in self._stretches:
            for piece in stretch.pieces:
                # `.data`: a parameter that is written back unchanged is not to look changed to
                # autograd. Those that a step has changed are told so by the optimizer.
                whole = flat(local_part(self._params[piece.param]).data)
                self._narrow[piece.param] = whole[piece.param_interval.slice]

    def place(self, piece: Piece) -> torch.Tensor:
        """Where the optimizer's tensor for `piece` lies."""
        stretch, offset = self._found[piece.param]
        assert stretch.wide is not None
        if piece.entire:
            shape = local_part(self._params[piece.param]).shape
            return stretch.wide.as_strided(shape, self._strides[piece.param], offset)
        return stretch.wide[offset : offset + piece.param_interval.numel]


class Masters(_Laid):
    """Kept from step to step. Without pieces, it does nothing.

    Args:
        pieces: those of this rank's pieces that are to have a master.
        params: all parameters, in the plan's order.
        dtypes: the masters' dtype, by number of the parameter.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        params: Sequence[torch.Tensor],
        dtypes: Mapping[int, torch.dtype],
    ) -> None:
        super().__init__(pieces, params, dtypes)
        for stretch in self._stretches:
            stretch.wide = self._allocate(stretch)
        self.repoint()
        self.take(None)

    def repoint(self) -> None:
        """Follow the parameters, and find where several of them lie back to back."""
        self._look()
        self._runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for stretch in self._stretches:
            assert stretch.wide is not None
            stretch.wide = stretch.wide.to(self._params[stretch.pieces[0].param].device)
            for piece, offset in zip(stretch.pieces, stretch.offsets, strict=True):
                self._add(piece.param, stretch.wide, offset)

    def _add(self, param: int, wide: torch.Tensor, offset: int) -> None:
        """Make this piece a run of its own, or part of the last one if it lies right behind it."""
        narrow = self._narrow[param]
        if self._runs:
            last, before = self._runs[-1]
            adjacent = (
                wide.data_ptr() == last.untyped_storage().data_ptr()
                and offset == last.storage_offset() + last.numel()
                and narrow.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
                and narrow.storage_offset() == before.storage_offset() + before.numel()
            )
            if adjacent:
                numel = last.numel() + narrow.numel()
                self._runs[-1] = (
                    last.as_strided((numel,), (1,)),
                    before.as_strided((numel,), (1,)),
                )
                return
        self._runs.append((wide[offset : offset + narrow.numel()], narrow))

    def begin(self) -> bool:
        """See Note [Writes to a parameter that has a master]."""
        for wide, narrow in self._runs:
            # An accelerator is not asked whether anything has changed: it would have to be waited
            # for.
            chunk = CHUNK if wide.device.type == "cpu" else max(1, wide.numel())
            for start in range(0, wide.numel(), chunk):
                _follow(wide[start : start + chunk], narrow[start : start + chunk])
        return False

    def settle(self, among: Container[int] | None = None) -> None:
        """Round to nearest."""
        pairs = self._runs
        if among is not None:
            pairs = [
                (flat(self.place(piece)), self._narrow[piece.param])
                for stretch in self._stretches
                for piece in stretch.pieces
                if piece.param in among
            ]
        if pairs:
            wides, narrows = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(narrows, wides)

    def end(self) -> bool:
        """Nothing: they stay."""
        return False

    def values(self) -> dict[int, torch.Tensor]:
        """Each master, in step with its parameter, wherever that lies now.

        A parameter that has another form by now, for which there is no plan yet, is not compared
        with: what lies where it was is not the parameter any more.
        """
        values = {}
        for stretch in self._stretches:
            for piece in stretch.pieces:
                values[piece.param] = master = self.place(piece)
                param, before = local_part(self._params[piece.param]), self._narrow[piece.param]
                form = (param.stride(), param.dtype, param.device)
                if form == (self._strides[piece.param], before.dtype, before.device):
                    _follow(flat(master), flat(param.data)[piece.param_interval.slice])
        return values

    def take(self, values: Mapping[int, torch.Tensor] | None) -> None:
        """Hold these, or what the parameters hold."""
        if values is None:
            for wide, narrow in self._runs:
                wide.copy_(narrow)
            return
        for stretch in self._stretches:
            for piece in stretch.pieces:
                if piece.param in values:
                    self.place(piece).copy_(values[piece.param])


class StepCopies(_Laid):
    """Made for a step and rounded at random; between steps there is nothing.

    Args:
        pieces: those of this rank's pieces that are to be stepped on in a wider dtype.
        params: all parameters, in the plan's order.
        dtypes: that dtype, by number of the parameter.
        rounding: how they are rounded.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        params: Sequence[torch.Tensor],
        dtypes: Mapping[int, torch.dtype],
        rounding: StochasticRounding,
    ) -> None:
        super().__init__(pieces, params, dtypes)
        self._rounding = rounding
        self.repoint()

    def place(self, piece: Piece) -> torch.Tensor:
        """During a step, the copy; between steps, something of its form without memory."""
        if self._found[piece.param][0].wide is not None:
            return super().place(piece)
        if piece.param not in self._nothing:
            param = local_part(self._params[piece.param])
            shape = param.shape if piece.entire else (piece.param_interval.numel,)
            # Not a number: whoever takes it for the parameter is to notice.
            nothing = torch.full(
                (), torch.nan, dtype=self._dtypes[piece.param], device=param.device
            )
            self._nothing[piece.param] = nothing.expand(shape)
        return self._nothing[piece.param]

    def repoint(self) -> None:
        """Follow the parameters."""
        self._look()
        self._nothing: dict[int, torch.Tensor] = {}

    def begin(self) -> bool:
        """Copy the parameters' pieces."""
        self._rounding.step += 1
        for stretch in self._stretches:
            stretch.wide = self._allocate(stretch)
            narrow = [self._narrow[piece.param] for piece in stretch.pieces]
            wide = [flat(self.place(piece)) for piece in stretch.pieces]
            torch._foreach_copy_(wide, narrow)
        return bool(self._stretches)

    def settle(self, among: Container[int] | None = None) -> None:
        """Round at random; again in the same step gives the same."""
        for stretch in self._stretches:
            assert stretch.wide is not None
            for piece, offset in zip(stretch.pieces, stretch.offsets, strict=True):
                if among is None or piece.param in among:
                    narrow = self._narrow[piece.param]
                    self._rounding.round_into(
                        narrow,
                        stretch.wide[offset : offset + narrow.numel()],
                        piece.param,
                        piece.param_interval.start,
                    )

    def end(self) -> bool:
        """Let the copies go."""
        for stretch in self._stretches:
            stretch.wide = None
        return bool(self._stretches)

    def values(self) -> dict[int, torch.Tensor]:
        """Nothing is kept."""
        return {}

    def take(self, values: Mapping[int, torch.Tensor] | None) -> None:
        """Nothing is kept."""


def _follow(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    """Take over those elements of `narrow` that are not the rounding of `wide`."""
    bits = {2: torch.int16, 4: torch.int32}.get(narrow.itemsize, torch.uint8)
    rounded, given = wide.to(narrow.dtype).view(bits), narrow.view(bits)
    if wide.device.type == "cpu" and _same(rounded, given):
        return
    if narrow.itemsize == 1:
        narrow = narrow.to(wide.dtype)  # torch does not promote numbers of 8 bits
    torch.where(rounded == given, wide, narrow, out=wide)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two flat CPU tensors hold the same; eight bytes at a time if that is possible."""
    fits = all(
        tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.itemsize % 8 == 0
        for tensor in (a, b)
    )
    return torch.equal(a.view(torch.int64), b.view(torch.int64)) if fits else torch.equal(a, b)
