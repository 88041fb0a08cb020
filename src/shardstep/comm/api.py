"""What the rest of the library asks of communication, and the answer of a single rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until its result may be used (on an accelerator: by the current stream).

        May be called again, and returns at once then.
        """


@dataclass(slots=True)
class Ledger:
    """What went through the door: calls and bytes sent by this rank, by operation."""

    calls: Counter[str] = field(default_factory=Counter)
    nbytes_sent: Counter[str] = field(default_factory=Counter)

    def note(self, operation: str, nbytes: int) -> None:
        """Add one call of `operation` that sends `nbytes`."""
        self.calls[operation] += 1
        self.nbytes_sent[operation] += nbytes


class Comm(Protocol):
    """What the rest of the library asks of communication.

    Every method is called on every rank of the group, in the same order, except `send` and
    `receive`, which are called on the two ranks concerned. What was launched goes on by itself: a
    rank that waits for its result needs the others to have launched it, and nothing else of them.

    Attributes:
        group_rank: this rank within the group.
        world_size: number of ranks in the group.
        ledger: what this rank has sent so far.
        relaying: whether segments of different lengths are relayed where that is less.
    """

    group_rank: int
    world_size: int
    ledger: Ledger
    relaying: bool

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, if there is one."""

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Work:
        """Fill flat `buffer` with every rank's segment; this rank's is there already.

        Called on every rank. `cuts` are the `world_size + 1` bounds of the segments.
        """

    def reduce_scatter(self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        """Put the sum over all ranks of this rank's segment of flat `buffer` into `out`.

        Called on every rank. `buffer` is left in an unspecified state. What travels has its dtype;
        if `out` has a wider one, the exchange way adds up in that, and the collective way in the
        dtype that travels.
        """

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's `payload`, in rank order. Called on every rank; payloads may differ."""

    def send(self, data: torch.Tensor, target: int) -> None:
        """Send flat bytes to group rank `target`, which calls `receive`."""

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Receive flat bytes from group rank `source`, which calls `send`."""

    def new_connection(self, backend: str | None = None) -> Comm:
        """The same ranks on other connections, whose traffic does not queue behind this one's.

        Called on every rank. `backend` is another than this one's, if given.
        """


class Done:
    """A collective that had nothing to do."""

    def wait(self) -> None:
        """Return at once."""


class SoloComm:
    """One rank, which has everything already.

    Args:
        group: the process group of one that it stands for, if there is one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.group_rank = 0
        self.world_size = 1
        self.ledger = Ledger()
        self.relaying = False

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> Work:
        """Nothing to fetch."""
        self.ledger.note("all_gather", 0)
        return Done()

    def reduce_scatter(self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        """The sum over one rank is what it has."""
        self.ledger.note("reduce_scatter", 0)
        if out is not buffer:
            out.copy_(buffer)
        return Done()

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Its own payload."""
        self.ledger.note("all_gather_bytes", 0)
        return [payload]

    def send(self, data: torch.Tensor, target: int) -> None:
        """There is nobody to send to."""
        raise AssertionError("a single rank sends nothing")

    def receive(self, data: torch.Tensor, source: int) -> None:
        """There is nobody to receive from."""
        raise AssertionError("a single rank receives nothing")

    def new_connection(self, backend: str | None = None) -> SoloComm:
        """Another single rank."""
        return SoloComm(self.group)
