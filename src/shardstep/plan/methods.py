"""Memory and traffic of one rank under each way of training: this package, DDP, FSDP2 and others.

Activations and temporary tensors of the optimizer's step are not counted. Masters are counted for
every method, so that all train with the same numbers. Gradients of DDP are its buckets'
(`gradient_as_bucket_view=True`).
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from shardstep.plan.estimate import StateSize, pool_sizes, shares
from shardstep.plan.messages import message_lengths
from shardstep.plan.placement import aligned
from shardstep.plan.plan import ShardPlan
from shardstep.plan.spec import ParamSpec
from shardstep.precision import MixedPrecision

MAX_RANKS = 16_384


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that the fullest rank holds, and bytes sent in a step.

    Attributes:
        buffers: memory beyond the columns before it, for messages and for gradients on their way
            into them.
        imbalance: the optimizer work of the fullest rank as a multiple of the mean.
        sent: sent by a rank per step, the mean over ranks.
        sent_most: sent by the rank that sends most, over a backend without a ring (Gloo).
    """

    parameters: int
    gradients: int
    masters: int
    state: int
    buffers: int
    imbalance: float
    sent: int
    sent_most: int

    @property
    def peak(self) -> int:
        """The bytes of all columns together."""
        return self.parameters + self.gradients + self.masters + self.state + self.buffers


class _Rank(NamedTuple):
    """Bytes that one rank holds and sends; `work` is its part of the optimizer's."""

    gradients: int
    masters: int
    state: int
    work: int
    sent: int


def _fullest(ranks: Sequence[_Rank], parameters: int, buffers: int) -> Footprint:
    """Return the footprint of the fullest rank; all hold the same parameters and buffers."""
    fullest = max(ranks, key=lambda rank: rank.gradients + rank.masters + rank.state)
    work, sent = [rank.work for rank in ranks], [rank.sent for rank in ranks]
    imbalance = max(work) / fmean(work) if any(work) else 1.0
    held = (fullest.gradients, fullest.masters, fullest.state)
    return Footprint(parameters, *held, buffers, imbalance, round(fmean(sent)), max(sent))


@dataclass(frozen=True)
class Job:
    """A model with its optimizer: parameters with layouts, dtypes, state of each parameter."""

    specs: Sequence[ParamSpec]
    policy: MixedPrecision
    state_sizes: Sequence[StateSize]
    bucket_bytes: int | None = None

    def plan(self, world_size: int) -> ShardPlan:
        """Return the plan of this package for `world_size` ranks."""
        return ShardPlan.make(self.specs, world_size, bucket_bytes=self.bucket_bytes)

    def module_mode(self, world_size: int) -> Footprint:
        """ZeRO-2: `module=`."""
        plan = self.plan(world_size)
        buckets = [bucket.nbytes for bucket in plan.training_buckets]
        # Packed messages, and the longest bucket before it is packed.
        buffers = sum(pool_sizes(plan, self.policy).values()) + max(buckets, default=0)
        ranks = [
            _Rank(
                share.gradient_nbytes,
                share.master_nbytes,
                share.state_nbytes,
                work=share.nbytes,
                sent=share.reduce_nbytes_sent + share.gather_nbytes_sent,
            )
            for share in shares(plan, self.policy, self.state_sizes)
        ]
        return _fullest(ranks, self._frozen + sum(buckets), buffers if world_size > 1 else 0)

    def drop_in(self, world_size: int) -> Footprint:
        """ZeRO-1 under DDP, without `module=`."""
        plan = self.plan(world_size)
        messages = [
            numel * bucket.dtype.itemsize
            for bucket in plan.training_buckets
            for numel in message_lengths(bucket, bucket.dtype.itemsize)
        ]
        packed = max(messages, default=0) * min(2, len(messages)) if world_size > 1 else 0
        sent = 2 * self._ring(world_size, self._wire)
        ranks = [
            _Rank(
                self._trained,
                share.master_nbytes,
                share.state_nbytes,
                work=share.nbytes,
                sent=sent + share.gather_nbytes_sent,
            )
            for share in shares(plan, self.policy, self.state_sizes)
        ]
        return _fullest(ranks, self._frozen + self._trained, max(packed, self._longest))

    def ddp(self, world_size: int) -> Footprint:
        """DDP with the whole optimizer on every rank."""
        masters = sum(map(self._master, self.specs))
        state = sum(map(self._state, range(len(self.specs))))
        sent = 2 * self._ring(world_size, self._wire)
        every = _Rank(self._trained, masters, state, work=1, sent=sent)
        return _fullest([every], self._frozen + self._trained, self._longest)

    def torch_zero(self, world_size: int) -> Footprint:
        """Torch's `ZeroRedundancyOptimizer` under DDP, with its greedy placement."""
        # Each owner broadcasts its parameters, which the other ranks pass on.
        sent = 2 * self._ring(world_size, self._wire) + self._ring(world_size, self._trained)
        ranks = [_Rank(self._trained, 0, 0, work=0, sent=sent)] * world_size
        loads = [(0, rank) for rank in range(world_size)]
        for group in sorted({spec.group for spec in self.specs}):
            own = [index for index, spec in enumerate(self.specs) if spec.group == group]
            # The largest first, to the rank with the fewest elements.
            for index in sorted(own, key=lambda index: -self.specs[index].numel):
                load, rank = heapq.heappop(loads)
                load += self.specs[index].numel
                heapq.heappush(loads, (load, rank))
                masters = ranks[rank].masters + self._master(self.specs[index])
                state = ranks[rank].state + self._state(index)
                ranks[rank] = _Rank(self._trained, masters, state, work=load, sent=sent)
        return _fullest(ranks, self._frozen + self._trained, self._longest)

    def fsdp2(self, world_size: int) -> Footprint:
        """FSDP2 with one unit per block, resharded after forward.

        Every parameter is cut along its first dimension. The sharded parameter is the master. The
        root stays gathered. So do two blocks, the one at work and the next, and one's gradients.
        """
        blocks: Counter[str] = Counter()
        gathered: Counter[str] = Counter()
        parameters = gradients = state = 0
        for index, spec in enumerate(self.specs):
            rows = spec.shape[0] if spec.shape else 1
            own = spec.numel // max(rows, 1) * -(-rows // world_size)
            itemsize = self._step_itemsize(spec)
            parameters += own * itemsize
            block = block_of(spec.name)
            gathered[block] += spec.nbytes
            if spec.trainable:
                gradients += own * itemsize
                state += self._state(index) * own // max(spec.numel, 1)
                blocks[block] += spec.numel * self.policy.wire_dtype(spec.dtype).itemsize
        root = gathered.pop("", 0)
        largest = max(gathered.values(), default=0)
        buffers = root + min(2, len(gathered)) * largest + max(blocks.values(), default=0)
        sent = self._ring(world_size, root + 2 * sum(gathered.values()))
        sent += self._ring(world_size, self._wire)
        trained = sum(spec.numel * self._step_itemsize(spec) for spec in self.specs)
        return Footprint(
            parameters,
            gradients,
            0,
            state,
            buffers if world_size > 1 else 0,
            parameters * world_size / (trained or 1),
            sent,
            sent,
        )

    @cached_property
    def _trained(self) -> int:
        return sum(spec.nbytes for spec in self.specs if spec.trainable)

    @cached_property
    def _longest(self) -> int:
        """The bytes of the longest gradient, which DDP copies to its bucket."""
        return max((spec.nbytes for spec in self.specs if spec.trainable), default=0)

    @cached_property
    def _frozen(self) -> int:
        return sum(spec.nbytes for spec in self.specs if not spec.trainable)

    @cached_property
    def _wire(self) -> int:
        trained = [spec for spec in self.specs if spec.trainable]
        return sum(spec.numel * self.policy.wire_dtype(spec.dtype).itemsize for spec in trained)

    def _step_itemsize(self, spec: ParamSpec) -> int:
        return self.policy.step_dtype(spec.dtype).itemsize

    def _master(self, spec: ParamSpec) -> int:
        wide = spec.trainable and self.policy.step_dtype(spec.dtype) != spec.dtype
        return aligned(spec.numel) * self._step_itemsize(spec) if wide else 0

    def _state(self, index: int) -> int:
        spec = self.specs[index]
        return self.state_sizes[index].of(spec.numel) if spec.trainable else 0

    @staticmethod
    def _ring(world_size: int, nbytes: int) -> int:
        """Return the bytes that a rank sends to gather or reduce `nbytes` in a ring."""
        return nbytes * (world_size - 1) // world_size


def block_of(name: str) -> str:
    """Return the repeated block that a parameter belongs to, such as `layers.3`; "" for none."""
    match = re.match(r"(.*?\.)?\d+(?=\.)", name)
    return match[0] if match else ""


def fewest_ranks(method: Callable[[int], Footprint], memory: int) -> int | None:
    """Return the smallest number of ranks whose peak is at most `memory`; None if there is none."""
    high = 1
    while method(high).peak > memory:
        if high >= MAX_RANKS:
            return None
        high *= 2
    low = high // 2 + 1
    while low < high:
        middle = (low + high) // 2
        if method(middle).peak <= memory:
            high = middle
        else:
            low = middle + 1
    return high
