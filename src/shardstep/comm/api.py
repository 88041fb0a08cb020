"""The interface of communication: operations, works in flight, and the ranks of one group.

`SoloComm` implements it for a single rank, `GroupComm` for several.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from operator import length_hint, methodcaller
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd import profiler
from typing_extensions import override

from shardstep.plan.plan import MAX_BUCKET_BYTES

if TYPE_CHECKING:
    from shardstep.comm.headers import Headers


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Block until the result may be used (on an accelerator: by the current stream).

        A second call returns at once.
        """


class Operation(Enum):
    """The purposes of collectives. An error names them, and messages of each have their own tags.

    The data of a rank that calls another one than its peers are not taken for theirs.
    """

    GATHER = "gathering parameters"
    REDUCE = "reducing gradients"
    USED = "telling which parameters have gradients"
    CLIP = "computing the norm of the gradients"
    UNSCALE = "looking for infinite gradients"
    BUFFERS = "copying buffers"
    START = "copying initial values"
    FULL = "gathering a whole gradient"
    LOAD = "copying loaded values"
    VERIFY = "comparing parameters"
    NOTES = "comparing notes with the other ranks"
    ERRORS = "ending the step"
    RECOVER = "recovering from an error"
    HEADER = "comparing calls with the other ranks"


ALONE = (
    "look for a batch, a forward or backward pass, a step or another call that only some ranks make"
)
LATE = f"a rank stopped, or made another call: {ALONE}"
GONE = (
    "a peer has ended or failed: its own error says why; if it has none, it was killed, or it had "
    "fewer batches: see Join"
)

Finish = Callable[[], object]
"""The rest of an operation, to be done once its works are complete."""


@contextmanager
def naming(operation: str, peer: Callable[[], str] = str) -> Iterator[None]:
    """Name `operation` and `peer` in every error of the backend, and add a hint at the cause."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(f"shardstep: {operation} failed")  # loops catch it by its class
        raise
    except (RuntimeError, ValueError) as error:
        text = f"{peer()}{error}"
        late = "timed out" in text.lower() or "timeout" in text.lower()
        hint = f" ({LATE})" if late else f" ({GONE})" if "by peer" in text else ""
        raise RuntimeError(f"shardstep: {operation} failed: {text}{hint}") from error


class Launched(Work):
    """The backend works of one operation, and calls that finish it, made once and in order.

    The header comes first. If it raises, the operation has not failed: recovering may end it.
    """

    def __init__(
        self,
        operation: str,
        works: Sequence[Any],
        finish: Sequence[Finish] = (),
        header: Work | None = None,
    ) -> None:
        self._operation = operation
        self._works = works
        self._finish = finish
        self._header = header
        self._error: BaseException | None = None

    @override
    def wait(self) -> None:
        if self._error is not None:
            # An operation that failed or was interrupted stays incomplete.
            raise RuntimeError(f"shardstep: {self._operation} failed before") from self._error
        if self._header is not None:
            self._header.wait()
        works = self._works
        left = iter(works)
        waits = map(_WAIT, left)
        try:
            with naming(self._operation, lambda: _peer(works, length_hint(left))):
                # Gloo hangs on a work that was waited for before, and a signal handler may wait for
                # the same works. Python calls it after a call: not from here to the end of `deque`.
                if self._works:
                    self._works = ()
                    deque(waits, maxlen=0)
            finish, self._finish = self._finish, ()
            for act in finish:
                act()
        except BaseException as error:
            self._error = error
            raise


_WAIT = methodcaller("wait")


def _peer(works: Sequence[Any], num_left: int) -> str:
    """Return the peer of the last work that was waited for."""
    peer = getattr(works[-1 - num_left], "peer", None)
    return "" if peer is None else f"{peer}: "


def segments(flat: torch.Tensor, cuts: Sequence[int]) -> list[torch.Tensor]:
    """Return the part of a flat tensor between each two cuts."""
    return [flat[start:stop] for start, stop in pairwise(cuts)]


_NO_SPAN = nullcontext()


def span(name: str, bucket: int | None = None) -> AbstractContextManager[object]:
    """Return a context that shows as `shardstep::name` in a profiler that is running."""
    # torch's own function looks for observers at each call, which takes longer.
    if not profiler._is_profiler_enabled:
        return _NO_SPAN
    number = "" if bucket is None else f" bucket {bucket}"
    return profiler.record_function(f"shardstep::{name}{number}")


@dataclass(slots=True)
class Ledger:
    """Calls made and bytes sent by this rank, by operation."""

    calls: Counter[str] = field(default_factory=Counter)
    nbytes_sent: Counter[str] = field(default_factory=Counter)

    def note(self, operation: str, nbytes: int) -> None:
        """Add one call of `operation` that sends `nbytes`."""
        self.calls[operation] += 1
        self.nbytes_sent[operation] += nbytes


class Comm(Protocol):
    """Communication among the ranks of one group.

    Every rank of the group calls the same methods in the same order, except for `send` and
    `receive`. A launched operation needs no further help from its rank: the other ranks can finish
    theirs before this one waits.

    Attributes:
        group: the process group; None for a single rank without one.
        group_rank: this rank in it.
        world_size: the number of ranks.
        ledger: calls made and bytes sent.
        min_bucket_bytes: the smallest bucket that is worth a separate launch.
        headers: compares the calls of all ranks; None if they are not compared.
    """

    group: dist.ProcessGroup | None
    group_rank: int
    world_size: int
    ledger: Ledger
    min_bucket_bytes: int
    headers: Headers | None = None

    def all_gather(
        self, buffer: torch.Tensor, cuts: Sequence[int], operation: Operation = Operation.GATHER
    ) -> Work:
        """Fill flat `buffer` with the segments of all other ranks.

        Called on every rank, each with its own segment in place. `cuts` are the `world_size + 1`
        bounds of the segments. `operation` is named in errors.
        """

    def reduce_scatter(self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        """Sum this rank's segment of flat `buffer` over all ranks into `out`.

        Called on every rank. `buffer` travels in its own dtype and is left unspecified. Over Gloo
        the sum is taken in the wider dtype of `buffer` and `out`, elsewhere in that of `buffer`.
        """

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return the payload of every rank, of any length, in rank order. Called on every rank."""

    def share_error(self, error: Exception | None) -> Work:
        """Tell all ranks whether this one has failed. Called on every rank.

        Waiting raises a `RuntimeError` on the other ranks if one has. Where reading the answer
        would hold up the accelerator, as over NCCL alone, nothing is told.
        """

    def compare_calls(self, other: Comm) -> None:
        """Raise from now on if ranks make different calls, here or on connections `other`.

        Called on every rank. Where the host does not wait for data, as over NCCL, nothing is done.
        """

    def recovering(self) -> AbstractContextManager[None]:
        """Return a context in which ranks end calls that an error has interrupted on one of them.

        Entered on every rank, wherever an error has left it. Ranks that wait for this one's next
        call raise a `BatchSkippedError`.
        """

    def send(self, data: torch.Tensor, target: int) -> None:
        """Send flat bytes to group rank `target`, which calls `receive`."""

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Receive flat bytes from group rank `source`, which calls `send`."""

    def new_connection(self, backend: str | None = None) -> Comm:
        """Connect the same ranks once more, with separate queues. Called on every rank."""

    def new_pair(self) -> tuple[Comm, Comm]:
        """Connect the same ranks twice, for reductions and gathers. Called on every rank.

        Over NCCL, odd messages of each travel on the other: see `queue`. So use both for one
        optimizer.
        """
        return self.new_connection(), self.new_connection()

    def queue(self, number: int) -> Comm:
        """Return the connection for the message of this number in its round or step.

        NCCL serves a group with one thread and one stream, which may be slower than the network.
        The number decides, not a count of calls. So a rank that failed amid a round sends the rest
        where the others wait. And one that repeats a round alone, to recover, finds all ranks
        connected: NCCL connects them at a group's first message, and waits there.
        """
        return self


def all_gather_json(comm: Comm, value: Any) -> list[Any]:
    """Return the `value` of every rank, which JSON can hold. Called on every rank."""
    return [json.loads(text) for text in comm.all_gather_bytes(json.dumps(value).encode())]


def all_gather_rows(comm: Comm, own: torch.Tensor, operation: Operation) -> torch.Tensor:
    """Return the flat tensors of all ranks, of one length, as rows. Called on every rank."""
    rows = torch.zeros(comm.world_size, len(own), dtype=own.dtype, device=own.device)
    rows[comm.group_rank] = own
    comm.all_gather(rows.view(-1), range(0, rows.numel() + 1, len(own)), operation).wait()
    return rows


NOTHING_TO_DO = Launched("nothing", ())


class SoloComm(Comm):
    """A single rank, which already has everything."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.group_rank = 0
        self.world_size = 1
        self.ledger = Ledger()
        self.min_bucket_bytes = MAX_BUCKET_BYTES

    @override
    def all_gather(
        self, buffer: torch.Tensor, cuts: Sequence[int], operation: Operation = Operation.GATHER
    ) -> Work:
        self.ledger.note("all_gather", 0)
        return NOTHING_TO_DO

    @override
    def reduce_scatter(self, buffer: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> Work:
        self.ledger.note("reduce_scatter", 0)
        if out is not buffer:
            out.copy_(buffer)
        return NOTHING_TO_DO

    @override
    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        self.ledger.note("all_gather_bytes", 0)
        return [payload]

    @override
    def share_error(self, error: Exception | None) -> Work:
        return NOTHING_TO_DO

    @override
    def compare_calls(self, other: Comm) -> None:
        pass

    @override
    def recovering(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def send(self, data: torch.Tensor, target: int) -> None:
        raise AssertionError("a single rank has no rank to send to")

    @override
    def receive(self, data: torch.Tensor, source: int) -> None:
        raise AssertionError("a single rank has no rank to receive from")

    @override
    def new_connection(self, backend: str | None = None) -> SoloComm:
        return SoloComm(self.group)


PACK_NBYTES = 4 * 2**20
"""Tensors travel together up to this size: a model may have hundreds of small buffers."""


def broadcast(
    comm: Comm, tensors: Iterable[torch.Tensor], source: int, operation: Operation
) -> None:
    """Copy the values that group rank `source` has to every rank.

    Called on every rank, with tensors of the same shapes and dtypes in the same order.
    """
    if comm.world_size == 1:
        return
    for pack in _packs(tensors):
        in_place = len(pack) == 1 and pack[0].is_contiguous()  # parameters may be large
        wire = pack[0].view(-1) if in_place else torch.cat([tensor.reshape(-1) for tensor in pack])
        cuts = [0] * (source + 1) + [wire.numel()] * (comm.world_size - source)
        comm.all_gather(wire, cuts, operation).wait()
        if not in_place and comm.group_rank != source:
            parts = wire.split([tensor.numel() for tensor in pack])  # type: ignore[no-untyped-call]
            views = [part.view(tensor.shape) for tensor, part in zip(pack, parts, strict=True)]
            torch._foreach_copy_(pack, views)


def _packs(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors of one dtype and device up to `PACK_NBYTES`, in the order given."""
    packs: list[list[torch.Tensor]] = []
    open_packs: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    room: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        kind, nbytes = (tensor.dtype, tensor.device), tensor.nbytes
        if room[kind] < nbytes:
            open_packs[kind], room[kind] = [], PACK_NBYTES
            packs.append(open_packs[kind])
        room[kind] -= nbytes
        open_packs[kind].append(tensor.detach())
    return packs
