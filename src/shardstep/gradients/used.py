"""Tracks which parameters had a gradient on any rank.

The optimizer skips a parameter without a gradient, as under DDP. Whether a parameter had one on any
rank travels with each round of reductions, behind a note of the rank's position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from shardstep.comm import Comm, Operation, Work


class OutOfStepError(RuntimeError):
    """Ranks are at different places of the training loop, or have different options."""


class BatchSkippedError(OutOfStepError):
    """Another rank gave this batch up with `recover()`; call `recover()` here, too."""


class Notes(Protocol):
    """Writes and compares the notes that travel with the flags.

    Attributes:
        nbytes: the length of a note.
        rounds: the number of notes so far.
        kept: the number of reduced gradients that this round adds to.
        zeroed: the number of reduced gradients that were set to zero in place so far.
    """

    nbytes: int
    rounds: int
    kept: int
    zeroed: int

    def write(self, given_up: bool = False) -> bytes:
        """Return this rank's note."""

    def read(self, rows: torch.Tensor) -> None:
        """Compare the notes of all ranks, and raise if they differ. Called on every rank."""

    def even_out(self) -> Iterator[None]:
        """Yield whenever this rank has to send a note, until all are at the same position.

        Called on every rank. The first note comes before the ranks compare.
        """


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


class UsedParams:
    """The parameters that had a gradient since the gradients were cleared."""

    def __init__(
        self, comm: Comm, trained: Sequence[int], device: torch.device, notes: Notes
    ) -> None:
        self._comm = comm
        self._trained = trained
        self._device = device
        self._notes = notes
        self._here: set[int] = set()
        self._zeroed: set[int] = set()
        # One entry per round: the notes and flags of all ranks.
        self._told: list[tuple[Work, torch.Tensor]] = []
        self._num_compared = 0
        self._differed = False
        # The first entry that counts, for parameters whose gradient was cleared in between.
        self._cleared_at: dict[int, int] = {}

    def zero(self, params: set[int]) -> None:
        """Note that these were set to zero; count each once between two rounds."""
        self._notes.zeroed += len(params - self._zeroed)
        self._zeroed |= params

    def clear(self, params: Iterable[int], now_used: Iterable[int] = ()) -> None:
        """Forget every earlier gradient of `params`; note that `now_used` have one on this rank."""
        self._here.difference_update(params)
        if self._told:
            self._cleared_at.update(dict.fromkeys(params, len(self._told)))
        self._here.update(now_used)

    def clear_all(self) -> None:
        """Forget every gradient."""
        if not self._differed:
            self.compare()
        self.drop()

    def drop(self) -> None:
        """Forget every gradient, and notes that were not compared."""
        for work, _ in self._told:
            work.wait()
        self._told.clear()
        self._num_compared = 0
        self._differed = False
        self._cleared_at.clear()
        self._here.clear()

    def tell(self, given_up: bool = False) -> None:
        """Tell every rank which parameters had a gradient here. Called on every rank."""
        size = len(self._trained)
        if not size:
            return
        self._zeroed.clear()
        every = len(self._here) == size
        flags = b"\1" * size if every else bytes(index in self._here for index in self._trained)
        own = self._notes.write(given_up) + flags
        self._told.append(exchange_rows(self._comm, own, self._device))

    def compare(self) -> None:
        """Wait for the notes of all ranks, and compare them."""
        for work, rows in self._told[self._num_compared :]:
            work.wait()
            self._differed = True
            self._notes.read(rows[:, : self._notes.nbytes])
            self._differed = False
            self._num_compared += 1

    def fold(self) -> None:
        """Merge the flags of all rounds so far into one entry, to bound their number."""
        self.compare()
        if len(self._told) < 2:
            return
        merged = torch.zeros_like(self._told[0][1])
        flags = merged[:, self._notes.nbytes :]
        for number, (_, rows) in enumerate(self._told):
            flags |= rows[:, self._notes.nbytes :]
            cleared = [param for param, at in self._cleared_at.items() if at == number + 1]
            if cleared:
                flags[:, [self._trained.index(param) for param in cleared]] = 0
        self._told = [(self._told[-1][0], merged)]
        self._num_compared = 1
        self._cleared_at.clear()

    def among(self, params: set[int]) -> set[int]:
        """Return those of `params` that have a gradient on any rank."""
        self.compare()
        used = params & self._here
        if used != params:
            # Reading the flags synchronises an accelerator, so do it only if they matter.
            for number, (_, rows) in enumerate(self._told):
                told = rows[:, self._notes.nbytes :].any(dim=0).tolist()
                used |= {
                    index
                    for index, flag in zip(self._trained, told, strict=True)
                    if flag and index in params and number >= self._cleared_at.get(index, 0)
                }
        return used

    def nowhere(self) -> bool:
        """Return whether no parameter has a gradient on any rank."""
        return not self._here and not self.among(set(self._trained))
