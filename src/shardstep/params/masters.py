"""Tensors that the optimizer steps on in place of 16-bit pieces: the same elements in fp32.

Two kinds implement `StepTensors`. `Masters` are kept from step to step, and the model sees them
rounded. `StepCopies` exist during a step only, and are rounded stochastically.

Note [Writes to a parameter that has a master]

A user may write to a parameter between two steps: load a checkpoint, clamp weights, swap an average
in. The master does not know, and its rounding at the end of the next step would silently undo the
write. So before each step the piece is compared with the rounding of its master. Where an element
differs in a bit, the master takes the parameter's value. This costs one pass over this rank's
pieces and misses nothing. An autograd version counter would be cheaper, but does not see writes
through `.data`. A write of the value that the parameter already has is no change: the master keeps
its extra precision.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from typing_extensions import override

from shardstep.params.dtensor import local_part
from shardstep.params.stochastic_rounding import StochasticRounding
from shardstep.params.storage import flat
from shardstep.plan import Piece
from shardstep.plan.placement import aligned

CHUNK = 1 << 18
"""Elements compared at a time on a CPU: few enough to stay in its cache."""


class StepTensors(Protocol):
    """Tensors of a wider dtype than the parameters they stand for."""

    def __contains__(self, param: object) -> bool:
        """Return whether this rank's piece of this parameter has one."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of them while they exist."""

    def place(self, piece: Piece) -> torch.Tensor:
        """Return the tensor for `piece`: flat, or in the parameter's shape for an entire one."""

    def repoint(self) -> None:
        """Follow the parameters to where their data lies now."""

    def refresh(self) -> bool:
        """Take the parameters' values before a step. Return whether tensors have moved."""

    def write_back(self, among: Container[int] | None = None) -> None:
        """Round into these parameters, or into all."""

    def release(self) -> bool:
        """Free what only the step needed. Return whether tensors have moved."""

    def values(self) -> dict[int, torch.Tensor]:
        """Return what must be saved beyond the parameters, by parameter number."""

    def set_values(self, values: Mapping[int, torch.Tensor] | None) -> None:
        """Copy these in, for the parameters this has; None takes the parameters' values."""


@dataclass(slots=True)
class _Stretch:
    """Pieces of one bucket, back to back.

    Attributes:
        pieces: the pieces, by ascending offset.
        offsets: where each starts in `wide`.
        numel: elements of all of them, padding included.
        wide: their elements in the wider dtype, flat.
    """

    pieces: list[Piece]
    offsets: list[int]
    numel: int
    wide: torch.Tensor | None = None


class _WidePieces(StepTensors):
    """Pieces laid back to back in a wider dtype, and where they lie in their parameters.

    Args:
        pieces: the pieces of this rank that are stepped on in a wider dtype.
        params: all parameters, in the plan's order.
        dtypes: the wider dtype by parameter number.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        params: Sequence[torch.Tensor],
        dtypes: Mapping[int, torch.dtype],
    ) -> None:
        self._params = params
        self._dtypes = dtypes
        # The plan's strides: a parameter may get others before there is another plan.
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
        """Bytes of all tensors while they exist."""
        return sum(
            stretch.numel * self._dtypes[stretch.pieces[0].param].itemsize
            for stretch in self._stretches
        )

    def _allocate(self, stretch: _Stretch) -> torch.Tensor:
        first = stretch.pieces[0].param
        return torch.empty(
            stretch.numel, dtype=self._dtypes[first], device=self._params[first].device
        )

    def _find_narrow(self) -> None:
        """Remember where each piece lies in its parameter."""
        for stretch in self._stretches:
            for piece in stretch.pieces:
                # `.data`: writing back an unchanged parameter must not look like a change to
                # autograd. The pipeline marks those that a step has changed.
                whole = flat(local_part(self._params[piece.param]).data)
                self._narrow[piece.param] = whole[piece.param_interval.slice]

    def place(self, piece: Piece) -> torch.Tensor:
        """Return the tensor for `piece`: flat, or in the parameter's shape for an entire one."""
        stretch, offset = self._found[piece.param]
        assert stretch.wide is not None
        if piece.entire:
            shape = local_part(self._params[piece.param]).shape
            return stretch.wide.as_strided(shape, self._strides[piece.param], offset)
        return stretch.wide[offset : offset + piece.param_interval.numel]


class Masters(_WidePieces):
    """Wide copies that are kept from step to step.

    Args:
        pieces: the pieces of this rank that have a master.
        params: all parameters, in the plan's order.
        dtypes: the masters' dtype by parameter number.
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
        self.set_values(None)

    def repoint(self) -> None:
        """Follow the parameters, and join pieces that lie back to back into runs."""
        self._find_narrow()
        self._runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for stretch in self._stretches:
            assert stretch.wide is not None
            stretch.wide = stretch.wide.to(self._params[stretch.pieces[0].param].device)
            for piece, offset in zip(stretch.pieces, stretch.offsets, strict=True):
                self._add_run(piece.param, stretch.wide, offset)

    def _add_run(self, param: int, wide: torch.Tensor, offset: int) -> None:
        """Append this piece as a run, or extend the last run if it is adjacent in memory."""
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

    def refresh(self) -> bool:
        """See Note [Writes to a parameter that has a master]."""
        for wide, narrow in self._runs:
            # On an accelerator, asking whether anything has changed would synchronise.
            chunk = CHUNK if wide.device.type == "cpu" else max(1, wide.numel())
            for start in range(0, wide.numel(), chunk):
                _refresh(wide[start : start + chunk], narrow[start : start + chunk])
        return False

    def write_back(self, among: Container[int] | None = None) -> None:
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

    @override
    def release(self) -> bool:
        return False

    def values(self) -> dict[int, torch.Tensor]:
        """Return each master, refreshed from its parameter.

        A parameter that has changed its form since the plan was made is not compared with.
        """
        values = {}
        for stretch in self._stretches:
            for piece in stretch.pieces:
                values[piece.param] = master = self.place(piece)
                param, before = local_part(self._params[piece.param]), self._narrow[piece.param]
                form = (param.stride(), param.dtype, param.device)
                if form == (self._strides[piece.param], before.dtype, before.device):
                    _refresh(flat(master), flat(param.data)[piece.param_interval.slice])
        return values

    def set_values(self, values: Mapping[int, torch.Tensor] | None) -> None:
        """Copy these in; None takes the parameters' values."""
        if values is None:
            for wide, narrow in self._runs:
                wide.copy_(narrow)
            return
        for stretch in self._stretches:
            for piece in stretch.pieces:
                if piece.param in values:
                    self.place(piece).copy_(values[piece.param])


class StepCopies(_WidePieces):
    """Wide copies that exist during a step and are rounded stochastically.

    Args:
        pieces: the pieces of this rank that are stepped on in a wider dtype.
        params: all parameters, in the plan's order.
        dtypes: that dtype by parameter number.
        rounding: the sequence of roundings.
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
        """Return the copy during a step; between steps, a NaN placeholder without memory."""
        if self._found[piece.param][0].wide is not None:
            return super().place(piece)
        if piece.param not in self._placeholders:
            param = local_part(self._params[piece.param])
            shape = param.shape if piece.entire else (piece.param_interval.numel,)
            nan = torch.full((), torch.nan, dtype=self._dtypes[piece.param], device=param.device)
            self._placeholders[piece.param] = nan.expand(shape)
        return self._placeholders[piece.param]

    def repoint(self) -> None:
        """Follow the parameters."""
        self._find_narrow()
        self._placeholders: dict[int, torch.Tensor] = {}

    def refresh(self) -> bool:
        """Copy the parameters' pieces."""
        self._rounding.step += 1
        for stretch in self._stretches:
            stretch.wide = self._allocate(stretch)
            narrow = [self._narrow[piece.param] for piece in stretch.pieces]
            wide = [flat(self.place(piece)) for piece in stretch.pieces]
            torch._foreach_copy_(wide, narrow)
        return bool(self._stretches)

    def write_back(self, among: Container[int] | None = None) -> None:
        """Round stochastically; repeating it in the same step gives the same result."""
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

    def release(self) -> bool:
        """Free the copies."""
        for stretch in self._stretches:
            stretch.wide = None
        return bool(self._stretches)

    @override
    def values(self) -> dict[int, torch.Tensor]:
        return {}

    @override
    def set_values(self, values: Mapping[int, torch.Tensor] | None) -> None:
        pass


def _refresh(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    """Copy those elements of `narrow` that are not the rounding of `wide`."""
    bits = {2: torch.int16, 4: torch.int32}.get(narrow.itemsize, torch.uint8)
    rounded, given = wide.to(narrow.dtype).view(bits), narrow.view(bits)
    if wide.device.type == "cpu" and _same(rounded, given):
        return
    if narrow.itemsize == 1:
        narrow = narrow.to(wide.dtype)  # torch does not promote numbers of 8 bits
    torch.where(rounded == given, wide, narrow, out=wide)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two flat CPU tensors are equal, comparing eight bytes at a time."""
    fits = all(
        tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.itemsize % 8 == 0
        for tensor in (a, b)
    )
    return torch.equal(a.view(torch.int64), b.view(torch.int64)) if fits else torch.equal(a, b)
