"""Step tensors: in place of 16-bit pieces, the local optimizer steps on the same elements in fp32.

Two kinds implement `StepTensors`. `Masters` are kept from step to step, and the model sees them
rounded. `StepCopies` exist during a step only, and are rounded stochastically.

Note [Writes to a parameter that has a master]

A user may write to a parameter between two steps: load a checkpoint, clamp weights, swap an average
in. The next step would silently undo the write. So before each step the piece is compared with the
rounding of its master. Where an element differs in a bit, the master takes the parameter's value.
An autograd version counter would be cheaper, but does not see writes through `.data`. A write of
the value that the parameter already has is no change: the master keeps its extra precision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
from typing_extensions import override

from shardstep.params.dtensor import local_part
from shardstep.params.flat import flat
from shardstep.params.same_bits import as_integers
from shardstep.params.stochastic_rounding import StochasticRounding
from shardstep.plan import Piece
from shardstep.plan.placement import aligned

CHUNK, ACCELERATOR_CHUNK = 1 << 18, 1 << 22
"""Elements compared at a time: few enough to stay in a CPU's cache, or to take little memory."""


@dataclass(eq=False)
class StepTensors(ABC):
    """This rank's pieces in a wider dtype, back to back in one flat tensor per bucket.

    Attributes:
        dtypes: the wider dtype of each parameter that has pieces here, by number.
        flat_param: returns the elements of a parameter in memory order.
        needed: False if there is nothing to do in a step.
    """

    pieces: Sequence[Piece]
    params: Sequence[torch.Tensor]
    dtypes: Mapping[int, torch.dtype]
    flat_param: Callable[[int], torch.Tensor]

    kept: ClassVar[bool] = True
    """True if the tensors stay where they are between steps."""

    def __post_init__(self) -> None:
        # Copies count the steps on every rank, also on one without pieces.
        self.needed = bool(self.pieces) or not self.kept
        self.pieces = sorted(self.pieces, key=lambda piece: (piece.bucket, piece.bucket_offset))
        # The plan's strides: a parameter may get others before there is another plan.
        self._strides = {p.param: local_part(self.params[p.param]).stride() for p in self.pieces}
        self._numels: Counter[int] = Counter()
        self._offsets: dict[int, int] = {}
        for piece in self.pieces:
            self._offsets[piece.param] = self._numels[piece.bucket]
            self._numels[piece.bucket] += aligned(piece.param_interval.numel)
        self._wide: dict[int, torch.Tensor] = {}
        self._narrow: dict[int, torch.Tensor] = {}
        self.repoint()

    def _allocate(self) -> None:
        for bucket, param in {piece.bucket: piece.param for piece in self.pieces}.items():
            dtype, device = self.dtypes[param], self.params[param].device
            self._wide[bucket] = torch.empty(self._numels[bucket], dtype=dtype, device=device)

    def _flat(self, piece: Piece) -> torch.Tensor:
        offset = self._offsets[piece.param]
        return self._wide[piece.bucket][offset : offset + piece.param_interval.numel]

    def __contains__(self, param: object) -> bool:
        return param in self._offsets

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors while they exist."""
        return sum(
            aligned(piece.param_interval.numel) * self.dtypes[piece.param].itemsize
            for piece in self.pieces
        )

    def place(self, piece: Piece) -> torch.Tensor:
        """Return the tensor for `piece`: flat, or in the parameter's shape for an entire one."""
        if not piece.entire:
            return self._flat(piece)
        shape, stride = local_part(self.params[piece.param]).shape, self._strides[piece.param]
        return self._wide[piece.bucket].as_strided(shape, stride, self._offsets[piece.param])

    def repoint(self) -> None:
        """Point at the memory that the parameters have now."""
        for piece in self.pieces:
            # Writing back an unchanged parameter must not look like a change to autograd. The
            # pipeline marks those that a step has changed.
            whole = self.flat_param(piece.param)
            self._narrow[piece.param] = whole[piece.param_interval.slice]

    @abstractmethod
    def refresh(self) -> None:
        """Take the parameters' values before a step."""

    @abstractmethod
    def write_back(self, among: Container[int] | None = None) -> None:
        """Round into these parameters, or into all."""

    def release(self) -> None:
        """Free memory that only a step needs."""
        if not self.kept:
            self._wide.clear()

    def values(self) -> dict[int, torch.Tensor]:
        """Return the values to save in addition to the parameters, by parameter number."""
        return {}

    @abstractmethod
    def set_values(self, values: Mapping[int, torch.Tensor] | None) -> None:
        """Copy these in, for the parameters this has; None takes the parameters' values."""


class Masters(StepTensors):
    """Wide copies that are kept from step to step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_values(None)

    @override
    def repoint(self) -> None:
        super().repoint()
        if not self._wide:
            self._allocate()
        self._runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece in self.pieces:
            narrow = self._narrow[piece.param]
            self._wide[piece.bucket] = self._wide[piece.bucket].to(narrow.device)
            self._add_run(self._flat(piece), narrow)

    def _add_run(self, wide: torch.Tensor, narrow: torch.Tensor) -> None:
        """Append a piece as a run, or extend the last run if both tensors follow it in memory."""
        if self._runs and all(map(_follows, self._runs[-1], (wide, narrow))):
            numel = self._runs[-1][0].numel() + wide.numel()
            wide, narrow = (each.as_strided((numel,), (1,)) for each in self._runs.pop())
        self._runs.append((wide, narrow))

    @override
    def refresh(self) -> None:
        # See Note [Writes to a parameter that has a master].
        for wide, narrow in self._runs:
            _refresh(wide, narrow)

    @override
    def write_back(self, among: Container[int] | None = None) -> None:
        pairs = self._runs
        if among is not None:
            stepped = [piece for piece in self.pieces if piece.param in among]
            pairs = [(self._flat(piece), self._narrow[piece.param]) for piece in stepped]
        if pairs:
            wides, narrows = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(narrows, wides)

    @override
    def values(self) -> dict[int, torch.Tensor]:
        for piece in self.pieces:
            # A parameter that has changed its form since the plan was made is not compared with.
            param, before = local_part(self.params[piece.param]), self._narrow[piece.param]
            form = (param.stride(), param.dtype, param.device)
            if form == (self._strides[piece.param], before.dtype, before.device):
                _refresh(self._flat(piece), flat(param.data)[piece.param_interval.slice])
        return {piece.param: self.place(piece) for piece in self.pieces}

    @override
    def set_values(self, values: Mapping[int, torch.Tensor] | None) -> None:
        if values is None:
            for wide, narrow in self._runs:
                wide.copy_(narrow)
            return
        for piece in self.pieces:
            if piece.param in values:
                self.place(piece).copy_(values[piece.param])


@dataclass(eq=False)
class StepCopies(StepTensors):
    """Wide copies that exist during a step and are rounded stochastically.

    Between steps, each piece has a NaN placeholder without memory.
    """

    rounding: StochasticRounding

    kept = False

    @override
    def place(self, piece: Piece) -> torch.Tensor:
        if piece.bucket in self._wide:
            return super().place(piece)
        if piece.param not in self._placeholders:
            param = local_part(self.params[piece.param])
            shape = param.shape if piece.entire else (piece.param_interval.numel,)
            nan = torch.full((), torch.nan, dtype=self.dtypes[piece.param], device=param.device)
            self._placeholders[piece.param] = nan.expand(shape)
        return self._placeholders[piece.param]

    @override
    def repoint(self) -> None:
        super().repoint()
        self._placeholders: dict[int, torch.Tensor] = {}

    @override
    def refresh(self) -> None:
        self.rounding.step += 1
        self._allocate()
        for _, held in groupby(self.pieces, key=lambda piece: piece.bucket):
            pieces = list(held)
            narrow = [self._narrow[piece.param] for piece in pieces]
            torch._foreach_copy_([self._flat(piece) for piece in pieces], narrow)

    @override
    def write_back(self, among: Container[int] | None = None) -> None:
        for piece in self.pieces:
            if among is None or piece.param in among:
                narrow, start = self._narrow[piece.param], piece.param_interval.start
                self.rounding.round_into(narrow, self._flat(piece), piece.param, start)

    @override
    def set_values(self, values: Mapping[int, torch.Tensor] | None) -> None:
        pass


def _follows(last: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if flat `tensor` starts where flat `last` ends, in the same storage."""
    return (
        tensor.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        and tensor.storage_offset() == last.storage_offset() + last.numel()
    )


def _refresh(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    """Copy those elements of `narrow` that are not the rounding of `wide`."""
    on_cpu = wide.device.type == "cpu"
    chunk = CHUNK if on_cpu else ACCELERATOR_CHUNK
    for start in range(0, wide.numel(), chunk):
        ours, given = wide[start : start + chunk], narrow[start : start + chunk]
        rounded, bits = as_integers(ours.to(given.dtype)), as_integers(given)
        # On an accelerator, asking whether anything has changed would synchronise.
        if on_cpu and _same(rounded, bits):
            continue
        # Torch does not promote numbers of 8 bits.
        given = given.to(ours.dtype) if given.itemsize == 1 else given
        torch.where(rounded == bits, ours, given, out=ours)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two flat CPU tensors are equal, comparing eight bytes at a time."""
    fits = all(
        tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.itemsize % 8 == 0
        for tensor in (a, b)
    )
    return torch.equal(a.view(torch.int64), b.view(torch.int64)) if fits else torch.equal(a, b)
