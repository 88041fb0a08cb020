"""Buffers through which the gradients of each bucket travel to their owners."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardstep.comm import Comm, Operation, Work
from shardstep.comm.spans import span
from shardstep.gradients.feeders import Feeder
from shardstep.gradients.used import UsedParams
from shardstep.params.sharded_params import ShardedParams
from shardstep.plan import POOL, Bucket, Interval, Piece, ShardPlan, pool_sizes
from shardstep.precision import MixedPrecision


@dataclass(slots=True)
class Lane:
    """One bucket's way through a round.

    Attributes:
        bucket: the bucket.
        params: the numbers of its parameters.
        buffer: where its gradients are packed, in the wire dtype; every POOL-th bucket shares it.
        views: each parameter's part of `buffer`, in the parameter's shape.
        shard: this rank's segment of the reduced gradient, in the dtype that is stepped on.
    """

    bucket: Bucket
    params: list[int]
    buffer: torch.Tensor
    views: list[torch.Tensor]
    shard: torch.Tensor


@dataclass(slots=True)
class _InFlight:
    """A launched bucket: once `work` is done, `arrive` puts the result in its place."""

    bucket: int
    work: Work
    arrive: Callable[[], None]


class Lanes:
    """The lanes of all training buckets, in the order in which backward fills them."""

    def __init__(self, comm: Comm, params: ShardedParams, precision: MixedPrecision) -> None:
        self._comm = comm
        self._plan = params.plan
        self._lanes = _make_lanes(params.plan, params.params, comm.group_rank, precision)
        self.number_of = {p: number for number, lane in enumerate(self._lanes) for p in lane.params}
        self.grads = {
            piece.param: _piece_view(params.plan, self._lanes[self.number_of[piece.param]], piece)
            for piece in params.shard.pieces
            if piece.param in self.number_of
        }
        """This rank's part of the reduced gradient of each parameter."""
        self._in_flight: deque[_InFlight] = deque()

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    @property
    def sizes(self) -> list[int]:
        """The number of parameters in each lane."""
        return [len(lane.params) for lane in self._lanes]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards and buffers, shared ones counted once."""
        tensors = [tensor for lane in self._lanes for tensor in (lane.buffer, lane.shard)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def norm_dtype(self) -> torch.dtype:
        """The dtype in which the norm of all gradients is computed."""
        dtypes = {lane.shard.dtype.to_real() for lane in self._lanes}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def launch(self, number: int, feeder: Feeder, used: UsedParams) -> None:
        """Pack a bucket and launch its reduce-scatter. Called on every rank."""
        lane = self._lanes[number]
        with span("reduce", lane.bucket.index):
            self._launch(lane, feeder, used)

    def _launch(self, lane: Lane, feeder: Feeder, used: UsedParams) -> None:
        while len(self._in_flight) >= POOL:
            self._wait_for_oldest()
        kept = feeder.kept(lane.params)
        buffer, views, out = lane.buffer, lane.views, lane.shard
        if kept:
            out = torch.empty_like(lane.shard)
            if buffer is lane.shard:
                buffer, views = out, _param_views(self._plan, lane.bucket, out)
        grads = feeder.take(lane.params)
        used.add(i for i, grad in zip(lane.params, grads, strict=True) if grad is not None)
        self._pack(grads, views, buffer)

        def arrive() -> None:
            if out is not lane.shard:
                self.clear(index for index in lane.params if index not in kept)
                lane.shard.add_(out)

        work = self._comm.reduce_scatter(buffer, lane.bucket.cuts, out)
        self._in_flight.append(_InFlight(lane.bucket.index, work, arrive))

    def launch_zeros(self, first: int = 0) -> list[Work]:
        """Launch these buckets with zeros and drop the result; nothing waits for another rank."""
        return [
            self._comm.reduce_scatter(
                torch.zeros_like(lane.buffer), lane.bucket.cuts, torch.empty_like(lane.shard)
            )
            for lane in self._lanes[first:]
        ]

    @torch.no_grad()
    def _pack(
        self,
        grads: Sequence[torch.Tensor | None],
        views: Sequence[torch.Tensor],
        buffer: torch.Tensor,
    ) -> None:
        """Copy the gradients of a bucket into its buffer, scaled by 1/N and rounded once."""
        scale = 1.0 / self._comm.world_size
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for grad, view in zip(grads, views, strict=True):
            if grad is None:
                view.zero_()
            else:
                sources.append(grad if grad.layout is torch.strided else grad.to_dense())
                targets.append(view)
        if any(grad.itemsize > buffer.itemsize for grad in sources):
            for grad, view in zip(sources, targets, strict=True):
                view.copy_(grad * scale if grad.itemsize > view.itemsize else grad)
                if grad.itemsize <= view.itemsize:
                    view.mul_(scale)
        else:
            if sources:
                torch._foreach_copy_(targets, sources)
            if scale != 1.0:
                buffer.mul_(scale)  # one kernel for the bucket, padding included

    def _wait_for_oldest(self) -> None:
        oldest = self._in_flight[0]
        with span("wait for reduce", oldest.bucket):
            oldest.work.wait()
        self._in_flight.popleft()
        oldest.arrive()

    def wait(self) -> None:
        """Wait for every bucket in flight."""
        while self._in_flight:
            self._wait_for_oldest()

    def clear(self, params: Iterable[int]) -> None:
        """Set this rank's part of these reduced gradients to zero."""
        for index in params:
            if index in self.grads:
                self.grads[index].zero_()

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
        whole = torch.zeros(slot.numel, dtype=lane.shard.dtype, device=lane.shard.device)
        own = whole[cuts[self._comm.group_rank] : cuts[self._comm.group_rank + 1]]
        if own.numel():
            own.copy_(self.grads[param].detach().as_strided((own.numel(),), (1,)))
        self._comm.all_gather(whole, cuts, Operation.FULL).wait()
        return whole.as_strided(spec.shape, spec.stride)


def _make_lanes(
    plan: ShardPlan, params: Sequence[torch.Tensor], group_rank: int, precision: MixedPrecision
) -> list[Lane]:
    """Return a lane per training bucket, in the order in which backward fills them."""
    order = list(reversed(plan.training_buckets))
    devices = [params[bucket.slots[0].param].device for bucket in order]
    # Every POOL-th bucket of a device shares a buffer, which is as long as its longest.
    sizes = pool_sizes(plan, precision)
    pool: dict[tuple[str, int], torch.Tensor] = {}
    lanes: list[Lane] = []
    for number, (bucket, device) in enumerate(zip(order, devices, strict=True)):
        place = (bucket.device, number % POOL)
        numel = bucket.segment(group_rank).numel
        shard = torch.zeros(numel, dtype=precision.step_dtype(bucket.dtype), device=device)
        if plan.world_size == 1:
            buffer = shard  # nothing travels: gradients are packed where they are kept
        else:
            if place not in pool:
                pool[place] = torch.zeros(sizes[place], dtype=torch.uint8, device=device)
            wire = precision.wire_dtype(bucket.dtype)
            buffer = pool[place][: bucket.numel * wire.itemsize].view(wire)
        members = [slot.param for slot in bucket.slots]
        lanes.append(Lane(bucket, members, buffer, _param_views(plan, bucket, buffer), shard))
    return lanes


def _param_views(plan: ShardPlan, bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Return each parameter's part of `buffer`, in the parameter's shape and strides."""
    start = buffer.storage_offset()
    return [
        buffer.as_strided(
            plan.specs[slot.param].shape, plan.specs[slot.param].stride, start + slot.bucket_offset
        )
        for slot in bucket.slots
    ]


def _piece_view(plan: ShardPlan, lane: Lane, piece: Piece) -> torch.Tensor:
    """Return the part of the lane's shard that belongs to `piece`."""
    start = piece.bucket_offset - lane.bucket.segment(piece.group_rank).start
    if piece.entire:
        spec = plan.specs[piece.param]
        return lane.shard.as_strided(spec.shape, spec.stride, start)
    return lane.shard[start : start + piece.param_interval.numel]
