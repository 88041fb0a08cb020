"""Buffers through which the gradients of each bucket travel to their owners."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from typing_extensions import override

from shardstep.comm import Comm, Operation, Work, span
from shardstep.gradients.feeders import Taken
from shardstep.params.flat import flat
from shardstep.params.sharded_params import ShardedParams
from shardstep.plan import (
    POOL,
    Bucket,
    Interval,
    Message,
    ShardPlan,
    messages_of,
    pool_sizes,
)
from shardstep.precision import MixedPrecision


@dataclass(slots=True)
class _Packing:
    """A message, and the places of its gradients.

    Attributes:
        message: the part of the bucket that it carries.
        comm: the connection on which it travels.
        buffer: where gradients are packed, in the wire dtype; every POOL-th message shares it.
        parts: of each gradient its number in the lane, the elements that travel here (None for
            all), and their place in `buffer`.
        own: the part of this rank's segment that it brings.
    """

    message: Message
    comm: Comm
    buffer: torch.Tensor
    parts: list[tuple[int, slice | None, torch.Tensor]]
    own: slice


class _Own(NamedTuple):
    """This rank's piece of one parameter of a lane.

    Attributes:
        param: the number of the parameter.
        number: its number in the lane.
        elements: the elements of it; None for all.
        form: the shape, the strides and the offset of its gradient in the shard.
    """

    param: int
    number: int
    elements: slice | None
    form: tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(slots=True)
class Lane:
    """One bucket's way through a round.

    Attributes:
        bucket: the bucket.
        params: the numbers of its parameters.
        pieces: this rank's pieces of them.
        like: an empty tensor of the dtype that is stepped on, on the bucket's device.
        numel: the length of this rank's segment.
        packings: the messages in which it travels.
        shard: this rank's segment of the reduced gradient, from the launch until it is cleared.
        arriving: memory for the segment of this round, while its messages are launched.
        num_launched: the messages that were launched; not 0 only if launching the rest failed.
    """

    bucket: Bucket
    params: list[int]
    pieces: list[_Own]
    like: torch.Tensor
    numel: int
    packings: list[_Packing]
    shard: torch.Tensor | None = None
    arriving: torch.Tensor | None = None
    num_launched: int = 0

    def new_shard(self) -> torch.Tensor:
        """Return memory for this rank's segment."""
        return self.like.new_empty(self.numel)


@dataclass(slots=True)
class _InFlight:
    """A message on its way: once `work` is done, `arrive` puts the result in its place."""

    bucket: int
    work: Work
    arrive: Callable[[], None] | None


class Lanes:
    """The lanes of all training buckets, in the order in which backward fills them.

    Attributes:
        grads: this rank's part of each reduced gradient that has arrived, by parameter.
        held: the parameters of which this rank has a piece.
        number_of: the number of each parameter's lane.
        pool_nbytes: the bytes of all buffers for messages.
    """

    def __init__(self, comm: Comm, params: ShardedParams, precision: MixedPrecision) -> None:
        self._comm = comm
        self._plan = params.plan
        self._lanes = _make_lanes(params.plan, params.params, comm, precision)
        self.number_of = {p: number for number, lane in enumerate(self._lanes) for p in lane.params}
        self.held = {piece.param for lane in self._lanes for piece in lane.pieces}
        self.grads: dict[int, torch.Tensor] = {}
        self._in_flight: deque[_InFlight] = deque()
        self.pool_nbytes = sum(pool_sizes(params.plan, precision).values())

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def nbytes(self, lent: bool = False) -> int:
        """Return the bytes of all shards; with `lent` memory, of those that do not fit into it."""
        return sum(
            lane.numel * lane.like.itemsize
            for lane in self._lanes
            if not lent or lane.like.dtype != lane.bucket.dtype
        )

    @property
    def norm_dtype(self) -> torch.dtype:
        """The dtype in which the norm of all gradients is computed."""
        dtypes = {lane.like.dtype.to_real() for lane in self._lanes}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def send(self, lane: Lane, taken: Taken) -> None:
        """Pack a bucket and launch its reduce-scatter. Called on every rank.

        The result is added to the earlier gradients of `taken.kept`. Once it is there, it moves to
        `taken.memory`. After an error, such as a lack of memory, a second call with the same
        arguments launches the messages that the first has not.
        """
        grads = list(map(_dense, taken.grads))
        kept, memory = taken.kept, taken.memory  # and not `taken`, which would keep the gradients
        if lane.shard is None:
            lane.shard = lane.new_shard()
            kept.clear()
        if lane.arriving is None:
            lane.arriving = lane.new_shard() if kept else lane.shard
        held, out = lane.shard, lane.arriving

        def arrive() -> None:
            if kept:
                self.clear(index for index in lane.params if index not in kept)
                held.add_(out)
            else:
                self._place(lane, memory)

        last = lane.packings[-1]
        for packing in lane.packings[lane.num_launched :]:
            while len(self._in_flight) >= POOL:
                self._wait_for_oldest()
            self._pack(lane, grads, packing)
            cuts = packing.message.cuts
            work = packing.comm.reduce_scatter(packing.buffer, cuts, out[packing.own])
            lane.num_launched += 1
            end = arrive if packing is last else None
            self._in_flight.append(_InFlight(lane.bucket.index, work, end))
        lane.arriving, lane.num_launched = None, 0

    def _place(self, lane: Lane, memory: Sequence[torch.Tensor | None]) -> None:
        """Leave reduced gradients in the shard, or move all to `memory` if there is room."""
        assert lane.shard is not None
        self.grads |= {piece.param: lane.shard.as_strided(*piece.form) for piece in lane.pieces}
        places = [memory[piece.number] for piece in lane.pieces] if memory else []
        fitting = [each for each in places if each is not None and each.dtype == lane.like.dtype]
        if len(fitting) == len(lane.pieces):
            for (param, _, elements, _), place in zip(lane.pieces, fitting, strict=True):
                own = place if elements is None else flat(place)[elements]
                self.grads[param] = own.copy_(self.grads[param])
            lane.shard = None

    def launch_zeros(self, first: int = 0) -> list[Work]:
        """Launch the rest of a round with zeros and drop the result, without a wait.

        `first` is the first bucket that was not launched, or not all of it.
        """
        works = []
        for lane in self._lanes[first:]:
            for packing in lane.packings[lane.num_launched :]:
                zeros, out = torch.zeros_like(packing.buffer), lane.new_shard()[packing.own]
                works.append(packing.comm.reduce_scatter(zeros, packing.message.cuts, out))
            lane.arriving, lane.num_launched = None, 0
        return works

    @torch.no_grad()
    def _pack(self, lane: Lane, grads: Sequence[torch.Tensor | None], packing: _Packing) -> None:
        """Copy gradients into the buffer of a message, scaled by 1/N and rounded once."""
        scale = 1.0 / self._comm.world_size
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for number, elements, view in packing.parts:
            grad = grads[number]
            if grad is None:
                view.zero_()
                continue
            if elements is not None:
                grad = flat(grad, self._plan.specs[lane.params[number]].stride)[elements]
            sources.append(grad)
            targets.append(view)
        if any(dtype.itemsize > packing.buffer.itemsize for dtype in {g.dtype for g in sources}):
            for grad, view in zip(sources, targets, strict=True):
                view.copy_(grad * scale if grad.itemsize > view.itemsize else grad)
                if grad.itemsize <= view.itemsize:
                    view.mul_(scale)
        else:
            if sources:
                torch._foreach_copy_(targets, sources)
            packing.buffer.mul_(scale)  # one kernel for the message, padding included

    def _wait_for_oldest(self) -> None:
        oldest = self._in_flight[0]
        with span("wait for reduce", oldest.bucket):
            oldest.work.wait()
        self._in_flight.popleft()
        if oldest.arrive is not None:
            oldest.arrive()

    def wait(self) -> None:
        """Wait for every message in flight."""
        while self._in_flight:
            self._wait_for_oldest()

    def clear(self, params: Iterable[int]) -> None:
        """Set this rank's part of these reduced gradients to zero."""
        for index in self.grads.keys() & set(params):
            self.grads[index].zero_()

    def drop(self) -> None:
        """Free the reduced gradients."""
        self.grads.clear()
        for lane in self._lanes:
            lane.shard = None

    def gather_full(self, param: int) -> torch.Tensor:
        """Return the whole reduced gradient of one parameter. Called on every rank."""
        spec = self._plan.specs[param]
        lane = self._lanes[self.number_of[param]]
        slot = next(slot for slot in lane.bucket.slots if slot.param == param)
        here = Interval(slot.bucket_offset, slot.bucket_offset + slot.numel)
        cuts = [0]
        for group_rank in range(self._comm.world_size):
            held = here.intersect(lane.bucket.segment(group_rank))
            cuts.append(max(cuts[-1], held.stop - here.start if held.numel else 0))
        whole = lane.like.new_zeros(slot.numel)
        own = whole[cuts[self._comm.group_rank] : cuts[self._comm.group_rank + 1]]
        grad = self.grads.get(param)
        if grad is not None and own.numel():
            own.copy_(flat(grad, spec.stride if grad.shape == spec.shape else None))
        self._comm.all_gather(whole, cuts, Operation.FULL).wait()
        return whole.as_strided(spec.shape, spec.stride)


class SoloLanes(Lanes):
    """The lanes of a single rank: nothing travels, and gradients are kept as they are."""

    @override
    def send(self, lane: Lane, taken: Taken) -> None:
        owned = set(taken.cleared)
        for param, grad in zip(lane.params, map(_dense, taken.grads), strict=True):
            held = self.grads.get(param) if param in taken.kept else None
            if grad is None:
                if held is None:
                    self.grads.pop(param, None)
            elif held is None:
                # Autograd may have added one tensor to several placeholders, or an expanded one.
                dtype, copy = lane.like.dtype, param not in owned
                self.grads[param] = grad.detach().to(dtype, copy=copy)
            else:
                held.add_(grad)

    @override
    def launch_zeros(self, first: int = 0) -> list[Work]:
        return []


def lanes(comm: Comm, params: ShardedParams, precision: MixedPrecision) -> Lanes:
    """Return the lanes for the ranks of `comm`."""
    return (Lanes if comm.world_size > 1 else SoloLanes)(comm, params, precision)


def _make_lanes(
    plan: ShardPlan, params: Sequence[torch.Tensor], comm: Comm, precision: MixedPrecision
) -> list[Lane]:
    """Return a lane per training bucket, in the order in which backward fills them."""
    sizes = pool_sizes(plan, precision)
    pool: dict[tuple[str, int], torch.Tensor] = {}
    lanes: list[Lane] = []
    number = 0
    for bucket in reversed(plan.training_buckets):
        device = params[bucket.slots[0].param].device
        wire = precision.wire_dtype(bucket.dtype)
        packings = []
        for message in messages_of(bucket, wire.itemsize) if plan.world_size > 1 else ():
            # Every POOL-th message of a device shares a buffer, which is as long as its longest.
            place = (bucket.device, number % POOL)
            if place not in pool:
                pool[place] = torch.zeros(sizes[place], dtype=torch.uint8, device=device)
            buffer = pool[place][: message.numel * wire.itemsize].view(wire)
            own = message.own(comm.group_rank).slice
            parts = _parts(plan, message, buffer)
            packings.append(_Packing(message, comm.queue(number), buffer, parts, own))
            number += 1
        lanes.append(
            Lane(
                bucket,
                [slot.param for slot in bucket.slots],
                _own_pieces(plan, bucket, comm.group_rank),
                torch.empty(0, dtype=precision.step_dtype(bucket.dtype), device=device),
                bucket.segment(comm.group_rank).numel,
                packings,
            )
        )
    return lanes


def _own_pieces(plan: ShardPlan, bucket: Bucket, group_rank: int) -> list[_Own]:
    """Return a rank's pieces of a bucket, and the places of their gradients in its shard."""
    number_of = {slot.param: number for number, slot in enumerate(bucket.slots)}
    found = []
    for piece in bucket.pieces(group_rank):
        spec, start = plan.specs[piece.param], piece.bucket_offset - bucket.cuts[group_rank]
        elements = None if piece.entire else piece.param_interval.slice
        form = (spec.shape, spec.stride, start)
        if elements is not None:
            form = ((piece.param_interval.numel,), (1,), start)
        found.append(_Own(piece.param, number_of[piece.param], elements, form))
    return found


def _parts(
    plan: ShardPlan, message: Message, buffer: torch.Tensor
) -> list[tuple[int, slice | None, torch.Tensor]]:
    """Return the gradients that travel in a message, and their places in `buffer`."""
    if message.numel < message.bucket.numel:
        return [
            (number, elements.slice, buffer[offset : offset + elements.numel])
            for _, number, elements, offset in message.parts()
        ]
    specs = [plan.specs[slot.param] for slot in message.bucket.slots]
    return [
        (number, None, buffer.as_strided(spec.shape, spec.stride, slot.bucket_offset))
        for number, (slot, spec) in enumerate(zip(message.bucket.slots, specs, strict=True))
    ]


def _dense(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad if grad is None or grad.layout is torch.strided else grad.to_dense()
