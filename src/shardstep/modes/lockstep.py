"""Checks that all ranks are at the same step and round, with the same options.

Each rank describes its position in a note of a few numbers. Where this optimizer reduces gradients,
notes travel with the flags of used parameters, at no extra message. Elsewhere each step sends one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shardstep.comm import Comm, all_gather_json
from shardstep.gradients.used import BatchSkippedError, OutOfStepError, exchange_rows

if TYPE_CHECKING:
    from shardstep.modes.base import Mode

GIVEN_UP, JOINED, EDITED = 1, 2, 4
"""Marks of a note: the batch was given up, the rank has no data left, groups were edited."""

FORM = struct.Struct("=8q")
COUNTS = {
    "raised": "calls of step() that raised",
    "steps": "calls of step()",
    "loads": "calls of load_state_dict()",
    "kept": "gradients that were not cleared",
    "zeroed": "gradients that were set to zero",
    "rounds": "reductions of gradients",
}
WAITED_FOR = frozenset({"cpu"})
"""Kinds of devices whose notes are compared at once. Reading those of others would hold them up."""

PLAIN = frozenset({float, int, bool, str, type(None)})


class Lockstep:
    """Writes this rank's notes, and compares those of all ranks.

    Attributes:
        rounds: the number of notes so far: one for each round of reductions.
        kept: the number of reduced gradients that this round adds to.
        zeroed: the number of reduced gradients that were set to zero in place so far.
        steps: the number of calls of `step()`.
        raised: the number of those that raised.
        loads: the number of calls of `load_state_dict()`.
        recovery_comm: the ranks, on connections of the CPU, if notes are to be waited for on every
            device. Where reductions run in one order, these can be used amid a round.
    """

    nbytes = FORM.size

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self.rounds = self.steps = self.raised = self.loads = self.kept = self.zeroed = 0
        self._options: list[list[tuple[str, Any]]] = []
        self._digest = 0
        self._arriving: Callable[[], list[list[int]]] | None = None
        self.recovery_comm: Comm | None = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Count a step, and an error of this rank in it."""
        try:
            yield
        except OutOfStepError:
            raise
        except BaseException:
            self.raised += 1
            raise
        finally:
            self.steps += 1

    # ---------------------------------------------------------------------------------- the notes

    def write(self, given_up: bool = False) -> bytes:
        """Return this rank's note."""
        self.rounds += 1
        marks = (
            GIVEN_UP * given_up
            + JOINED * self._mode.join.shadowing
            + EDITED * (self._mode.pipeline.local.hand_edit() is not None)
        )
        options = plain_options(self._mode.groups)
        if options != self._options:
            self._options = options
            self._digest = _digest(options)
        counts = (getattr(self, name) for name in COUNTS)
        return FORM.pack(marks, *counts, self._digest)

    def waits_on(self, device: torch.device) -> bool:
        """Return whether a rank waits for the others' notes before it takes the step."""
        return self.recovery_comm is not None or device.type in WAITED_FOR

    def read(self, rows: torch.Tensor) -> None:
        """Compare the notes of all ranks, one row each. Called on every rank.

        Unless asked for, an accelerator is not waited for: these notes are compared when the next
        ones are read.

        Raises:
            OutOfStepError: on every rank, naming a difference.
        """
        arrived, self._arriving = self._arriving, _fetch(rows)
        if self.waits_on(rows.device):
            arrived, self._arriving = self._arriving, None
        if arrived is not None:
            self._compare(arrived())

    def meet(self) -> None:
        """Send this rank's note to all ranks and compare theirs. Called on every rank."""
        if self._mode.comm.world_size > 1:
            device = self._mode.pipeline.params.params[0].device
            work, rows = exchange_rows(self._mode.comm, self.write(), device)
            work.wait()
            self.read(rows)

    def even_out(self) -> Iterator[None]:
        """Yield whenever this rank has to send a note, until all are at the same position.

        Called on every rank. The first note comes before the ranks compare.
        """
        yield
        self._arriving = None
        comm = self.recovery_comm or self._mode.comm
        said = all_gather_json(comm, [getattr(self, name) for name in COUNTS])
        highest = dict(zip(COUNTS, map(max, zip(*said, strict=True)), strict=True))
        for _ in range(highest["rounds"] - self.rounds):
            yield
        vars(self).update(highest)

    # --------------------------------------------------------------------------------- differences

    def _compare(self, notes: Sequence[Sequence[int]]) -> None:
        first = notes[0]
        if first[0] == 0 and all(note == first for note in notes):
            return
        for rank, (marks, *_) in enumerate(notes):
            if marks & GIVEN_UP:
                raise BatchSkippedError(
                    f"rank {rank} has given this batch up; call recover() on every rank, and go on "
                    "with the next batch"
                )
        present = [(rank, note) for rank, note in enumerate(notes) if not note[0] & JOINED]
        source, first = present[0]
        if any(note[0] & EDITED or note[-1] != first[-1] for _, note in present):
            self._compare_options()
        for position, what in enumerate(COUNTS.values(), start=1):
            for rank, note in present:
                if note[position] != first[position]:
                    raise OutOfStepError(
                        f"ranks are out of step: rank {source} counts {first[position]} {what} "
                        f"where rank {rank} counts {note[position]}; do the same on all ranks, and "
                        "call recover() on every rank after an error that you catch"
                    )

    def _compare_options(self) -> None:
        """Name the option that differs. Called on every rank."""
        options = [{key: _text(value) for key, value in group} for group in self._options]
        own = [self._mode.join.shadowing, self._mode.local.hand_edit(), options]
        said = all_gather_json(self._mode.comm, own)
        for rank, (_, edit, _) in enumerate(said):
            if edit:
                raise ValueError(f"rank {rank}: {edit}")
        present = [(rank, groups) for rank, (joined, _, groups) in enumerate(said) if not joined]
        source, expected = present[0]
        for rank, groups in present:
            for number, (theirs, these) in enumerate(zip(expected, groups, strict=True)):
                for key in sorted(theirs.keys() | these.keys()):
                    if theirs.get(key) != these.get(key):
                        raise OutOfStepError(
                            f"option {key!r} of group {number} is {theirs.get(key, 'missing')} on "
                            f"rank {source} and {these.get(key, 'missing')} on rank {rank}; each "
                            "rank would update its part of the model with its own"
                        )


def plain_options(groups: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, Any]]]:
    """Return the options of groups, as far as ranks can compare them without a wait."""
    return [
        [
            (key, value if type(value) in PLAIN else _plain(value))
            for key, value in group.items()
            if key != "params" and key != "param_names"
        ]
        for group in groups
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        small = value.device.type == "cpu" and value.numel() <= 8
        return value.tolist() if small else tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return [each if type(each) in PLAIN else _plain(each) for each in value]
    return value if isinstance(value, (float, int, str)) else type(value).__name__


def _text(value: Any) -> str:
    return repr(float(value) if type(value) is int else value)  # 1 and 1.0 are equal options


def _digest(options: Sequence[Sequence[tuple[str, Any]]]) -> int:
    compared = [sorted((key, _text(value)) for key, value in group) for group in options]
    raw = hashlib.blake2b(repr(compared).encode(), digest_size=7).digest()
    return int.from_bytes(raw, "little")


def _fetch(rows: torch.Tensor) -> Callable[[], list[list[int]]]:
    """Start to copy notes to the CPU. The result waits for the copy."""
    numbers_of_ranks = rows.reshape(-1).view(torch.int64).view(len(rows), -1)
    copied = numbers_of_ranks.to("cpu", non_blocking=True)
    event = torch.Event(rows.device) if rows.device.type != "cpu" else None
    if event is not None:
        event.record()

    def numbers() -> list[list[int]]:
        if event is not None:
            event.synchronize()
        found: list[list[int]] = copied.tolist()
        return found

    return numbers
