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

from shardstep.plan.estimate import DtypePolicy, Share, StateSize, pool_sizes, shares
from shardstep.plan.messages import message_lengths
from shardstep.plan.placement import aligned
from shardstep.plan.plan import ShardPlan
from shardstep.plan.spec import ParamSpec

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


@dataclass(frozen=True)
class Job:
    """A model with its optimizer: parameters with layouts, dtypes, state of each parameter."""

    specs: Sequence[ParamSpec]
    policy: DtypePolicy
    state_sizes: Sequence[StateSize]
    bucket_bytes: int | None = None

    def plan(self, world_size: int) -> ShardPlan:
        """Return the plan of this package for `world_size` ranks."""
        if world_size not in self._last_plan:
            made = ShardPlan.make(self.specs, world_size, bucket_bytes=self.bucket_bytes)
            self._last_plan.clear()
            self._last_plan[world_size] = made
        return self._last_plan[world_size]

    @cached_property
    def _last_plan(self) -> dict[int, ShardPlan]:
        return {}

    def module_mode(self, world_size: int) -> Footprint:
        """ZeRO-2: `module=`."""
        plan = self.plan(world_size)
        return self._sharded(
            plan,
            parameters=self._frozen + sum(bucket.nbytes for bucket in plan.training_buckets),
            gradients=lambda share: share.gradient_nbytes,
            buffers=self._buffers(plan),
            reduced=lambda share: share.reduce_nbytes_sent,
        )

    def _buffers(self, plan: ShardPlan) -> int:
        """Return the bytes of packed messages, and of the longest bucket before it is packed."""
        longest = max((bucket.nbytes for bucket in plan.training_buckets), default=0)
        return sum(pool_sizes(plan, self.policy).values()) + longest if plan.world_size > 1 else 0

    def drop_in(self, world_size: int) -> Footprint:
        """ZeRO-1 under DDP, without `module=`."""
        plan = self.plan(world_size)
        messages = [
            numel * bucket.dtype.itemsize
            for bucket in plan.training_buckets
            for numel in message_lengths(bucket, bucket.dtype.itemsize)
        ]
        return self._sharded(
            plan,
            parameters=self._frozen + self._trained,
            gradients=lambda share: self._trained,
            buffers=max(
                max(messages, default=0) * min(2, len(messages)) if world_size > 1 else 0,
                self._longest,
            ),
            reduced=lambda share: 2 * self._ring(world_size, self._wire),
        )

    def _sharded(
        self,
        plan: ShardPlan,
        parameters: int,
        gradients: Callable[[Share], int],
        buffers: int,
        reduced: Callable[[Share], int],
    ) -> Footprint:
        each = shares(plan, self.policy, self.state_sizes)
        fullest = max(each, key=lambda s: s.master_nbytes + s.state_nbytes + gradients(s))
        sent = [reduced(share) + share.gather_nbytes_sent for share in each]
        return Footprint(
            parameters=parameters,
            gradients=gradients(fullest),
            masters=fullest.master_nbytes,
            state=fullest.state_nbytes,
            buffers=buffers,
            imbalance=_imbalance([share.nbytes for share in each]),
            sent=round(fmean(sent)),
            sent_most=max(sent),
        )

    def ddp(self, world_size: int) -> Footprint:
        """DDP with the whole optimizer on every rank."""
        masters = sum(map(self._master, self.specs))
        state = sum(map(self._state, range(len(self.specs))))
        return self._under_ddp(masters, state, 1.0, 2 * self._ring(world_size, self._wire))

    def _under_ddp(self, masters: int, state: int, imbalance: float, sent: int) -> Footprint:
        everything = self._frozen + self._trained
        return Footprint(
            everything, self._trained, masters, state, self._longest, imbalance, sent, sent
        )

    def torch_zero(self, world_size: int) -> Footprint:
        """Torch's `ZeroRedundancyOptimizer` under DDP, with its greedy placement."""
        numels, masters, states = ([0] * world_size for _ in range(3))
        loads = [(0, rank) for rank in range(world_size)]
        for group in sorted({spec.group for spec in self.specs}):
            own = [index for index, spec in enumerate(self.specs) if spec.group == group]
            # The largest first, to the rank with the fewest elements.
            for index in sorted(own, key=lambda index: -self.specs[index].numel):
                load, rank = heapq.heappop(loads)
                heapq.heappush(loads, (load + self.specs[index].numel, rank))
                numels[rank] += self.specs[index].numel
                masters[rank] += self._master(self.specs[index])
                states[rank] += self._state(index)
        fullest = max(range(world_size), key=lambda rank: masters[rank] + states[rank])
        # Each owner broadcasts its parameters, which the other ranks pass on.
        sent = 2 * self._ring(world_size, self._wire) + self._ring(world_size, self._trained)
        return self._under_ddp(masters[fullest], states[fullest], _imbalance(numels), sent)

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


def _imbalance(held: Sequence[int]) -> float:
    mean = fmean(held)
    return max(held) / mean if mean else 1.0
