"""Notes that ranks compare: their position, and which parameters had a gradient.

Each rank describes its position in a note of a few numbers. All ranks must be at the same step
and round, with the same options. Where this optimizer reduces gradients, notes travel with the
flags of used parameters, at no extra message. Elsewhere each step sends one. The optimizer skips a
parameter that had a gradient on no rank, as under DDP.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardstep.comm import (
    BatchSkippedError,
    Comm,
    Operation,
    OutOfStepError,
    Work,
    all_gather_json,
)
from shardstep.comm.join import JoinContext
from shardstep.params.sharded_params import ShardedParams

GIVEN_UP, JOINED, EDITED, EMPTY, NO_BACKWARD = 1, 2, 4, 8, 16
"""Marks of a note: the batch was given up, the rank has no data left, groups were edited, the rank
has no gradient, and it ran no backward pass either."""

NOTE = struct.Struct("=8q")
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


class _Arriving(NamedTuple):
    """The notes of all ranks on their way, and what this rank wrote its own note of.

    Attributes:
        notes: waits for them, and returns them.
        options: this rank's options then; by now, there may be others.
        edit: the error for its groups then, if they were edited by hand.
    """

    notes: Callable[[], list[list[int]]]
    options: Sequence[Sequence[tuple[str, Any]]]
    edit: str | None


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

    nbytes = NOTE.size

    def __init__(self, join: JoinContext) -> None:
        self._join = join
        self.rounds = self.steps = self.raised = self.loads = self.kept = self.zeroed = 0
        self._options: list[list[tuple[str, Any]]] = []
        self._digest = 0
        self._edit: str | None = None
        self._arriving: _Arriving | None = None
        self.recovery_comm: Comm | None = None

    # ---------------------------------------------------------------------------------- the notes

    def write(self, params: ShardedParams, marks: int = 0) -> bytes:
        """Return this rank's note, with `marks` besides those for `Join` and for edited groups."""
        self._edit = params.hand_edit()
        marks |= JOINED * self._join.shadowing | EDITED * (self._edit is not None)
        options = plain_options(params.groups)
        if options != self._options:
            self._options = options
            self._digest = _digest(options)
        counts = (getattr(self, name) for name in COUNTS)
        return NOTE.pack(marks, *counts, self._digest)

    def waits_on(self, device: torch.device) -> bool:
        """Return whether a rank waits for the others' notes before it takes the step."""
        return self.recovery_comm is not None or device.type in WAITED_FOR

    def read(self, comm: Comm, rows: torch.Tensor) -> None:
        """Compare the notes of all ranks, one row each. Called on every rank.

        Unless asked for, an accelerator is not waited for: these notes are compared when the next
        ones are read.

        Raises:
            OutOfStepError: on every rank, naming a difference.
        """
        arrived, self._arriving = self._arriving, _Arriving(_fetch(rows), self._options, self._edit)
        if self.waits_on(rows.device):
            arrived, self._arriving = self._arriving, None
        if arrived is not None:
            self._compare(comm, arrived)

    def compare_rest(self, comm: Comm) -> None:
        """Compare the notes that were not compared yet, and wait for them.

        Called on every rank. Raises as `read` does.
        """
        arrived, self._arriving = self._arriving, None
        if arrived is not None:
            self._compare(comm, arrived)

    def exchange(self, comm: Comm, params: ShardedParams) -> None:
        """Exchange notes with all ranks and compare them. Called on every rank."""
        if comm.world_size > 1:
            work, rows = exchange_rows(comm, self.write(params), params.params[0].device)
            self.rounds += 1
            work.wait()
            self.read(comm, rows)

    def even_out(self, comm: Comm) -> Iterator[None]:
        """Yield whenever this rank has to send a note, until all are at the same position.

        Called on every rank. The first note comes before the ranks compare.
        """
        with comm.recovering():
            yield
            self._arriving = None
            own = [getattr(self, name) for name in COUNTS]
            counts = all_gather_json(self.recovery_comm or comm, own)
            highest = dict(zip(COUNTS, map(max, zip(*counts, strict=True)), strict=True))
            for _ in range(highest["rounds"] - self.rounds):
                yield
        vars(self).update(highest)

    # --------------------------------------------------------------------------------- differences

    def _compare(self, comm: Comm, arrived: _Arriving) -> None:
        notes = arrived.notes()
        first = notes[0]
        if first[0] == 0 and all(note == first for note in notes):
            return
        for rank, (marks, *_) in enumerate(notes):
            if marks & GIVEN_UP:
                raise BatchSkippedError(rank)
        present = [(rank, note) for rank, note in enumerate(notes) if not note[0] & JOINED]
        source, first = present[0]
        if any(note[0] & EDITED or note[-1] != first[-1] for _, note in present):
            self._compare_options(comm, arrived, [rank for rank, _ in present])
        for position, counted in enumerate(COUNTS.values(), start=1):
            for rank, note in present:
                if note[position] != first[position]:
                    raise OutOfStepError(
                        f"ranks are out of step: rank {source} counts {first[position]} {counted} "
                        f"where rank {rank} counts {note[position]}; do the same on all ranks, and "
                        "call recover() on every rank after an error that you catch"
                    )
        idle = [rank for rank, note in present if note[0] & NO_BACKWARD]
        filled = [rank for rank, note in present if not note[0] & EMPTY]
        if idle and filled:
            raise OutOfStepError(
                f"rank {idle[0]} ran no backward pass where rank {filled[0]} has gradients; "
                "run backward on every rank, with a loss times 0 if a rank has nothing to add"
            )

    def _compare_options(self, comm: Comm, arrived: _Arriving, present: Sequence[int]) -> None:
        """Name the option that differs between the ranks `present`. Called on every rank."""
        own = [{key: _text(value) for key, value in group} for group in arrived.options]
        answers = all_gather_json(comm, [arrived.edit, own])
        for rank, (edit, _) in enumerate(answers):
            if edit:
                raise ValueError(f"rank {rank}: {edit}")
        source, expected = present[0], answers[present[0]][1]
        for rank in present:
            for number, (theirs, these) in enumerate(zip(expected, answers[rank][1], strict=True)):
                for key in sorted(theirs.keys() | these.keys()):
                    if theirs.get(key) != these.get(key):
                        raise OutOfStepError(
                            f"option {key!r} of group {number} is {theirs.get(key, 'missing')} on "
                            f"rank {source} and {these.get(key, 'missing')} on rank {rank}; each "
                            "rank would update its part of the model with its own"
                        )


class UsedParams:
    """The parameters that had a gradient since the gradients were cleared."""

    def __init__(
        self, comm: Comm, params: ShardedParams, trained: Sequence[int], lockstep: Lockstep
    ) -> None:
        self._comm = comm
        self._params = params
        self._trained = trained
        self._device = params.params[trained[0]].device if trained else torch.device("cpu")
        self._lockstep = lockstep
        self._here: set[int] = set()
        self._zeroed: set[int] = set()
        # One entry per round: the notes and flags of all ranks.
        self._rounds: list[tuple[Work, torch.Tensor]] = []
        self._num_compared = 0
        self._differed = False
        # The first entry that counts, for parameters whose gradient was cleared in between.
        self._cleared_at: dict[int, int] = {}

    def zero(self, params: set[int]) -> None:
        """Note that these were set to zero; count each once between two rounds."""
        self._lockstep.zeroed += len(params - self._zeroed)
        self._zeroed |= params

    def clear(self, params: Iterable[int], now_used: Iterable[int] = ()) -> None:
        """Forget every earlier gradient of `params`; note that `now_used` have one on this rank."""
        self._here.difference_update(params)
        if self._rounds:
            self._cleared_at.update(dict.fromkeys(params, len(self._rounds)))
        self._here.update(now_used)

    def clear_all(self) -> None:
        """Forget every gradient."""
        if not self._differed:
            self.compare()
        self.drop()

    def drop(self) -> None:
        """Forget every gradient, and notes that were not compared."""
        for work, _ in self._rounds:
            work.wait()
        self._rounds.clear()
        self._num_compared = 0
        self._differed = False
        self._cleared_at.clear()
        self._here.clear()

    def send(
        self, cleared: Iterable[int] = (), now_used: Iterable[int] = (), marks: int = 0
    ) -> None:
        """Take the changes of a round in, and send this rank's note and flags to all ranks.

        Called on every rank.
        """
        self.clear(cleared, now_used)
        size = len(self._trained)
        if not size:
            return
        self._zeroed.clear()
        every = len(self._here) == size
        flags = b"\1" * size if every else bytes(index in self._here for index in self._trained)
        own = self._lockstep.write(self._params, marks) + flags
        self._rounds.append(exchange_rows(self._comm, own, self._device))
        self._lockstep.rounds += 1

    def compare(self) -> None:
        """Wait for the notes of all ranks, and compare them."""
        for work, rows in self._rounds[self._num_compared :]:
            work.wait()
            self._differed = True
            self._lockstep.read(self._comm, rows[:, : NOTE.size])
            self._differed = False
            self._num_compared += 1

    def agrees(self) -> bool:
        """Return whether the notes of all ranks are equal, once they have come."""
        try:
            self.compare()
        except OutOfStepError:
            return False
        return True

    def fold(self) -> None:
        """Merge the flags of all rounds so far into one entry, to bound their number."""
        self.compare()
        if len(self._rounds) < 2:
            return
        merged = torch.zeros_like(self._rounds[0][1])
        flags = merged[:, NOTE.size :]
        for number, (_, rows) in enumerate(self._rounds):
            flags |= rows[:, NOTE.size :]
            cleared = [param for param, at in self._cleared_at.items() if at == number + 1]
            if cleared:
                flags[:, [self._trained.index(param) for param in cleared]] = 0
        self._rounds = [(self._rounds[-1][0], merged)]
        self._num_compared = 1
        self._cleared_at.clear()

    def among(self, params: set[int]) -> set[int]:
        """Return those of `params` that have a gradient on any rank."""
        self.compare()
        used = params & self._here
        if used != params:
            # Reading the flags synchronises an accelerator, so do it only if they matter.
            for number, (_, rows) in enumerate(self._rounds):
                flags = rows[:, NOTE.size :].any(dim=0).tolist()
                used |= {
                    index
                    for index, flag in zip(self._trained, flags, strict=True)
                    if flag and index in params and number >= self._cleared_at.get(index, 0)
                }
        return used

    def nowhere(self) -> bool:
        """Return whether no parameter has a gradient on any rank."""
        return not self._here and not self.among(set(self._trained))


def exchange_rows(comm: Comm, own: bytes, device: torch.device) -> tuple[Work, torch.Tensor]:
    """Send bytes of one length to every rank. Called on every rank.

    Returns:
        The work, and the bytes of all ranks once it is done, one row each.
    """
    rows = torch.zeros(comm.world_size, len(own), dtype=torch.uint8, device=device)
    source = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    if device.type != "cpu":
        source = source.pin_memory()  # or the copy would wait for all that the device has to do
    rows[comm.group_rank].copy_(source, non_blocking=True)
    cuts = range(0, rows.numel() + 1, len(own))
    return comm.all_gather(rows.view(-1), cuts, Operation.USED), rows


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
    if isinstance(value, float):
        return float(value)  # of NumPy, too
    return value if isinstance(value, (int, str)) else type(value).__name__


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
