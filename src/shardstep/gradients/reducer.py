"""From gradients as they come out of backward to this rank's shard of their mean.

This is the gradient half of ZeRO-2. A parameter's gradient stays in `param.grad` until all
gradients of its bucket are there; then they are copied into a buffer, scaled by 1/N as DDP scales
them, a `ShardedGrad` takes their place, and the buffer is reduce-scattered. One pass over all
buckets is a *round*. A round begins with the first gradient that comes and ends with the backward
pass; what has not come by then counts as zero. Buckets always go in the plan's reverse order, which
is about the order of backward, whatever order the gradients come in: which collectives a rank
issues never depends on its data.

Rounds add up in the shard until `zero`. Whether a parameter had a gradient on any rank at all
travels with each round, because one that had none is skipped by the optimizer, as under DDP.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardstep.comm import Comm, Work
from shardstep.gradients.clip import clip_norm, unscale
from shardstep.gradients.sharded_grad import ShardedGrad
from shardstep.params.shard import Shard
from shardstep.plan import Bucket, Interval, ShardPlan
from shardstep.precision import MixedPrecision

POOL = 4
"""How many buckets may be on their way at once. A full pool holds backward up until the oldest has
arrived, which bounds the memory and still keeps the wire busy."""


Announce = Callable[[str, Callable[[], list[Any]]], None]
"""Tells joined ranks what is to be shadowed; the arguments are made only if there may be any."""


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Call back when the backward pass that this is called in comes to its end.

    Returns:
        Whether there is one; if not, nothing is called.
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


_watching: weakref.WeakSet[GradReducer] = weakref.WeakSet()


def refuse_watched(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Make sure that nobody else takes the gradients of those of these that train away.

    Raises:
        ValueError: if somebody does.
    """
    watched = {id(param) for gradients in _watching for param in gradients.watched}
    for name, param in named:
        if param.requires_grad and id(param) in watched:
            raise ValueError(
                f"parameter {name!r} has its gradient reduced by another optimizer with module=, "
                "and each of the two would find a part of it; call detach() on that one first"
            )


@dataclass(slots=True)
class _Lane:
    """One bucket's way through a round.

    Attributes:
        bucket: the bucket.
        params: numbers of its parameters.
        buffer: where its gradients are packed, in the dtype in which they travel; shared with every
            POOL-th bucket.
        views: where each parameter lies in the buffer, in the parameter's shape.
        shard: this rank's segment of the reduced gradient, in the dtype that is stepped on.
    """

    bucket: Bucket
    params: list[int]
    buffer: torch.Tensor
    views: list[torch.Tensor]
    shard: torch.Tensor


@dataclass(slots=True)
class _InFlight:
    """A bucket that was launched: when `pending` is done, `arrive` puts the result in its place."""

    pending: Work
    arrive: Callable[[], None]


@dataclass(slots=True)
class _Round:
    """One pass over all buckets: which gradients have come, and how many lanes have left."""

    missing: list[int]
    come: set[int]
    launched: int = 0


class GradReducer:
    """Gradients are reduced to their owners while backward runs.

    Args:
        comm: the ranks, on connections that carry nothing else.
        plan: the placement.
        params: all parameters, in the plan's order.
        shard: this rank's pieces, as tensors apart from the parameters.
        overlap: whether buckets leave during backward, or all at its end.
        announce: called before each batch of collectives that a rank without data has to shadow,
            with what it is and what that rank has to know of it.
        precision: in which dtype gradients travel, and in which they are added up and stepped on.
    """

    def __init__(
        self,
        comm: Comm,
        plan: ShardPlan,
        params: Sequence[torch.Tensor],
        shard: Shard,
        overlap: bool,
        announce: Announce,
        precision: MixedPrecision,
    ) -> None:
        self._comm = comm
        self._plan = plan
        self._params = params
        self._shard = shard
        self._overlap = overlap
        self._announce = announce
        self._precision = precision
        self._lock = threading.RLock()
        self._trained = [index for index, spec in enumerate(plan.specs) if spec.trainable]
        self._dtypes = [precision.step_dtype(spec.dtype) for spec in plan.specs]
        self._lane_of: dict[int, int] = {}
        self._lanes = self._lay_lanes()
        self._grads = self._grads_of_pieces()
        self._standing = {
            index: ShardedGrad(
                params[index], index, plan.specs[index].name, self, self._dtypes[index]
            )
            for index in self._trained
        }
        self._in_flight: deque[_InFlight] = deque()
        self._round: _Round | None = None
        self._within = False
        self._paused = False
        self._unsent = False
        # Stand-ins for which the shard has nothing yet: what they stand for is with them.
        self._aside: set[int] = set()
        self._rounds = 0
        # Which parameters have a gradient: known here, and as told by the others.
        self._used_here: set[int] = set()
        self._used_elsewhere: list[tuple[Work, torch.Tensor]] = []
        # From which of those on they count, for parameters whose gradient was cleared in between.
        self._cleared_at: dict[int, int] = {}
        self._collected = False
        self._handles: list[Any] = []
        self._watch()

    def _watch(self) -> None:
        """Be told when a gradient is there."""
        _watching.add(self)
        for index in self._trained:
            param: Any = self._params[index]
            if param.requires_grad:
                hook = param.register_post_accumulate_grad_hook(self._hook(index))
                self._handles.append(hook)

    @property
    def watched(self) -> list[torch.Tensor]:
        """The parameters whose gradients are taken away when they come."""
        return [self._params[index] for index in self._trained]

    # ------------------------------------------------------------------------------- laying out

    def _lay_lanes(self) -> list[_Lane]:
        order = list(reversed(self._plan.training_buckets))
        devices = [self._params[bucket.slots[0].param].device for bucket in order]
        wires = [self._precision.wire_dtype(bucket.dtype) for bucket in order]
        sizes = [b.numel * wire.itemsize for b, wire in zip(order, wires, strict=True)]
        # Every POOL-th bucket of a device shares a buffer, which is as long as its longest.
        largest: dict[tuple[torch.device, int], int] = {}
        for number, (device, nbytes) in enumerate(zip(devices, sizes, strict=True)):
            place = (device, number % POOL)
            largest[place] = max(largest.get(place, 0), nbytes)
        pool: dict[tuple[torch.device, int], torch.Tensor] = {}
        lanes: list[_Lane] = []
        for number, (bucket, device) in enumerate(zip(order, devices, strict=True)):
            place = (device, number % POOL)
            segment = bucket.segment(self._comm.group_rank)
            dtype = self._precision.step_dtype(bucket.dtype)
            shard = torch.zeros(segment.numel, dtype=dtype, device=device)
            if self._comm.world_size == 1:
                buffer = shard  # nothing travels: gradients are packed where they are kept
            else:
                if place not in pool:
                    pool[place] = torch.zeros(largest[place], dtype=torch.uint8, device=device)
                buffer = pool[place][: sizes[number]].view(wires[number])
            params = [slot.param for slot in bucket.slots]
            lanes.append(_Lane(bucket, params, buffer, self._views(bucket, buffer), shard))
            self._lane_of.update(dict.fromkeys(params, number))
        return lanes

    def _views(self, bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Where each parameter of `bucket` lies in `buffer`, in the parameter's shape."""
        specs = self._plan.specs
        return [
            buffer.as_strided(
                specs[slot.param].shape,
                specs[slot.param].stride,
                buffer.storage_offset() + slot.bucket_offset,
            )
            for slot in bucket.slots
        ]

    def _grads_of_pieces(self) -> dict[int, torch.Tensor]:
        """For each piece of this rank, its place in the reduced gradient."""
        grads: dict[int, torch.Tensor] = {}
        for piece in self._shard.pieces:
            if piece.param not in self._lane_of:
                continue
            lane = self._lanes[self._lane_of[piece.param]]
            start = piece.bucket_offset - lane.bucket.segment(self._comm.group_rank).start
            part = lane.shard[start : start + piece.param_interval.numel]
            if piece.entire:
                spec = self._plan.specs[piece.param]
                part = lane.shard.as_strided(spec.shape, spec.stride, start)
            grads[piece.param] = part
        return grads

    @property
    def nbytes(self) -> int:
        """Bytes of the reduced gradient and of the buffers it passes through."""
        # Buckets share buffers, and one rank packs gradients where it keeps them.
        tensors = [tensor for lane in self._lanes for tensor in (lane.buffer, lane.shard)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    # ---------------------------------------------------------------------------------- a round

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # A tensor's hooks lie where the garbage collector does not look: one that held this object,
        # which holds the tensor, would keep the model and the optimizer alive for good.
        here = weakref.ref(self)

        def gradient_is_there(param: torch.Tensor) -> None:
            gradients = here()
            if gradients is None:
                return
            # Models over several devices run their backward in several threads.
            with gradients._lock:
                if gradients._paused:
                    gradients._held_back(index)
                else:
                    gradients._arrived(index)

        return gradient_is_there

    def _arrived(self, index: int) -> None:
        """Count a gradient in, and send its bucket off if that was the last."""
        lane = self._lane_of[index]
        current = self._round
        if current is None:
            self._given()
            self._announce("round", list)
            current = self._begin()
        if index in current.come:
            if lane < current.launched:
                raise RuntimeError(
                    f"the gradient of parameter {self._plan.specs[index].name!r} came twice in "
                    "one backward pass, the second time after it was sent; if the model uses "
                    "activation checkpointing, pass use_reentrant=False"
                )
            return
        current.come.add(index)
        current.missing[lane] -= 1
        if self._overlap and lane == current.launched:
            self._launch_complete(current)

    def expect_backward(self) -> None:
        """Called in a backward pass through the model, before its gradients come.

        The round is to end with this pass. Passes within it, such as those of reentrant activation
        checkpointing, end earlier.
        """
        with self._lock:
            if not self._within and not self._paused:
                self._within = True
                at_end_of_backward(self._pass_is_over)

    def _pass_is_over(self) -> None:
        with self._lock:
            self._within = False
            if self._round is not None:
                self._finish_round(self._round)

    def _end_what_began(self) -> None:
        """Finish a backward pass that was left. Called on every rank.

        It began on all ranks, but where it was left before the first gradient came there is no
        round yet: others may have come further, and wait for this rank.
        """
        if self._within and self._round is None:
            self._begin()
        if self._round is not None:
            self._finish_round(self._round)
        self._within = False

    def _begin(self) -> _Round:
        self._settle()
        if not self._held():
            self._forget()
        self._fold_used()
        self._collected = False
        current = self._round = _Round([len(lane.params) for lane in self._lanes], set())
        if not self._within:
            self._end_with_backward(current)
        return current

    def _end_with_backward(self, current: _Round) -> None:
        """See to it that `current` ends with the backward pass that it began in."""
        # A round that was given up is not this one any more.
        at_end_of_backward(lambda: self._finish_round(current) if self._round is current else None)

    def _held(self) -> bool:
        """Whether the shard has gradients that nobody has cleared."""
        return bool(self._kept(self._trained))

    def _launch_complete(self, current: _Round) -> None:
        while current.launched < len(self._lanes) and not current.missing[current.launched]:
            self._launch(current)

    def _finish_round(self, current: _Round) -> None:
        with self._lock:
            while current.launched < len(self._lanes):
                self._launch(current)
            self._tell_used()
            self._round = None
            self._unsent = self._paused  # more may come that is held back
            self._rounds += 1

    def _launch(self, current: _Round) -> None:
        """Send the next bucket off, complete or not."""
        lane = self._lanes[current.launched]
        current.launched += 1
        while len(self._in_flight) >= POOL:
            self._land()
        kept = self._kept(lane.params)
        buffer, views, out = lane.buffer, lane.views, lane.shard
        if kept:
            out = torch.empty_like(lane.shard)
            if buffer is lane.shard:
                buffer, views = out, self._views(lane.bucket, out)
        self._pack(lane.params, views)

        def arrive() -> None:
            if out is not lane.shard:
                self._clear([index for index in lane.params if index not in kept])
                lane.shard.add_(out)

        pending = self._comm.reduce_scatter(buffer, lane.bucket.cuts, out)
        self._in_flight.append(_InFlight(pending, arrive))

    def _pack(self, params: Sequence[int], views: Sequence[torch.Tensor]) -> None:
        """Move the gradients of a bucket into its buffer."""
        scale = 1.0 / self._comm.world_size
        for index, view in zip(params, views, strict=True):
            grad = self._take(index)
            if grad is None:
                view.zero_()
            else:
                self._used_here.add(index)
                if grad.layout is not torch.strided:
                    grad = grad.to_dense()
                _scale(grad.detach(), scale, view)
            self._stand_in(index)

    def _kept(self, params: Sequence[int]) -> set[int]:
        """Those whose gradient nobody has cleared since the last round: it is added to."""
        return {
            index
            for index in params
            if index not in self._aside and isinstance(self._params[index].grad, ShardedGrad)
        }

    def _take(self, index: int) -> torch.Tensor | None:
        """What this rank has to add to the gradient of a parameter."""
        grad = self._params[index].grad
        if isinstance(grad, ShardedGrad):
            self._aside.discard(index)
            return grad.take_incoming()
        self._start_over(index)
        return grad

    def _given(self) -> list[torch.Tensor | None]:
        """What the parameters have for gradients.

        Raises:
            RuntimeError: if one was given another one's stand-in, which has no numbers to give.
        """
        # Parameters in flight, which this backward pass may not use, are not waited for.
        with torch._C.DisableTorchFunctionSubclass():
            grads = [self._params[index].grad for index in self._trained]
        for index, grad in zip(self._trained, grads, strict=True):
            if isinstance(grad, ShardedGrad) and grad is not self._standing[index]:
                raise RuntimeError(
                    f"parameter {self._plan.specs[index].name!r} was given what stands in for the "
                    f"gradient of parameter {grad.param_name!r}, which lies divided among the "
                    f"ranks; give it optimizer.full_grad({grad.param_name!r}), called on every rank"
                )
        return grads

    def _start_over(self, index: int) -> None:
        """Whatever came before for this parameter is not to count any more."""
        self._used_here.discard(index)
        self._cleared_at[index] = len(self._used_elsewhere)
        self._standing[index].take_incoming()
        self._aside.discard(index)

    def _stand_in(self, index: int) -> None:
        self._params[index].grad = self._standing[index]

    def _tell_used(self) -> None:
        """Let every rank know which parameters had a gradient here."""
        size = len(self._trained)
        device = self._params[self._trained[0]].device if self._trained else torch.device("cpu")
        everyone = torch.zeros(self._comm.world_size * size, dtype=torch.uint8, device=device)
        own = everyone[self._comm.group_rank * size : (self._comm.group_rank + 1) * size]
        if len(self._used_here) == size:
            own.fill_(1)
        else:
            flags = [index in self._used_here for index in self._trained]
            own.copy_(torch.tensor(flags, dtype=torch.uint8, device="cpu"))
        cuts = range(0, everyone.numel() + 1, size) if size else ()
        if size:
            self._used_elsewhere.append((self._comm.all_gather(everyone, cuts), everyone))

    def _fold_used(self) -> None:
        """Let one note stand for those of all rounds so far: there may be any number of them."""
        if len(self._used_elsewhere) < 2:
            return
        size = len(self._trained)
        told = torch.zeros_like(self._used_elsewhere[0][1]).view(-1, size)
        for number, (pending, flags) in enumerate(self._used_elsewhere):
            pending.wait()
            told |= flags.view(-1, size)
            over = [p for p, at in self._cleared_at.items() if at == number + 1]
            if over:
                told[:, [self._trained.index(index) for index in over]] = 0
        self._used_elsewhere = [(pending, told.view(-1))]
        self._cleared_at.clear()

    def _land(self) -> None:
        oldest = self._in_flight[0]
        oldest.pending.wait()
        self._in_flight.popleft()
        oldest.arrive()

    def _settle(self) -> None:
        """Wait for everything that is on its way."""
        while self._in_flight:
            self._land()

    # ------------------------------------------------------------------------ between the rounds

    def begin_forward(self) -> None:
        """Called before a forward pass: no backward pass may have been left unfinished.

        Raises:
            RuntimeError: if one was.
        """
        begun = self._within or self._round is not None
        if begun and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                "the last backward pass did not come to its end; call zero_grad() on every rank "
                "before going on"
            )

    @property
    def synchronising(self) -> bool:
        """Whether a backward pass would send what it finds: not under `no_sync`."""
        return not self._paused

    def hold_back(self) -> None:
        """From now on, only add gradients up on each rank. Called on every rank."""
        self._paused = True
        # Set here and not where gradients come: on every rank alike, whatever its data.
        self._unsent = True
        self._collected = False

    def send_again(self) -> None:
        """Let the next backward pass send its gradients, and what was held back with them.

        Called on every rank. Stand-ins take the place of what was held back. It is this rank's
        gradients alone: torch's own clipping or a GradScaler, which read `param.grad`, would take
        them for everybody's. On every rank alike, whatever it found.
        """
        if self._paused:  # and not detached meanwhile
            self._paused = False
            for index in self._trained:
                self._put_aside(index)

    def _put_aside(self, index: int) -> None:
        grad = self._params[index].grad
        if not isinstance(grad, ShardedGrad):
            self._start_over(index)
            self._standing[index].incoming = grad
            self._params[index].grad = self._standing[index]
            self._aside.add(index)

    def _held_back(self, index: int) -> None:
        """A gradient came that is not to be sent yet.

        Autograd would add the next one to it in 16 bits; to a stand-in it is added in the dtype
        that is stepped on.
        """
        if self._dtypes[index] != self._plan.specs[index].dtype:
            self._put_aside(index)

    def collect(self) -> None:
        """Finish the reductions and give each piece its gradient. Called on every rank.

        A rank on which no gradient came, or whose gradients were held back by `no_sync`, takes
        part in a round now. So does one on which `param.grad` was replaced by the user: what is
        there counts, as for any optimizer.
        """
        self._end_what_began()
        grads = self._given()
        replaced = any(grad is not None and not isinstance(grad, ShardedGrad) for grad in grads)
        if replaced or not self._collected:
            held = any(grad is not None for grad in grads)
            if self._rounds == 0 or self._unsent or replaced or not held:
                self._announce("round", list)
                self.shadow_round()
            self._settle()
            used = self._used_anywhere()
            for piece, tensor in self._shard:
                tensor.grad = self._grads[piece.param] if piece.param in used else None
            self._collected = not self._paused
            if not self._used_here and not self._used_among(set(self._trained)):
                self._drop()  # nobody had any: as for any optimizer, there is none now either
        for piece, tensor in self._shard:
            # Cleared by hand, for this step to leave the parameter alone.
            if self._params[piece.param].grad is None:
                tensor.grad = None

    def shadow_round(self) -> None:
        """Take part in a round with whatever gradients there are. Called on every rank."""
        self._finish_round(self._begin())

    def kept(self) -> list[int]:
        """The parameters whose gradient was sent and not cleared: the same on every rank."""
        return sorted(self._kept(self._trained))

    def keep(self, params: Sequence[int]) -> None:
        """Clear the gradients of all others that were sent, as ranks that have data did."""
        for index in self._kept(self._trained).difference(params):
            self._params[index].grad = None

    def _used_anywhere(self) -> set[int]:
        """The parameters of this rank's pieces that have a gradient."""
        return self._used_among(
            {piece.param for piece in self._shard.pieces if piece.param in self._grads}
        )

    def _used_among(self, params: set[int]) -> set[int]:
        """Those of `params` that have a gradient on any rank."""
        for pending, _ in self._used_elsewhere:
            pending.wait()
        used = params & self._used_here
        if used != params:
            # Only now are the flags read, which on an accelerator means waiting for it.
            size = len(self._trained)
            for number, (_, flags) in enumerate(self._used_elsewhere):
                told = flags.view(-1, size).any(dim=0).tolist()
                used |= {
                    index
                    for index, flag in zip(self._trained, told, strict=True)
                    if flag and index in params and number >= self._cleared_at.get(index, 0)
                }
        return used

    def release(self) -> None:
        """Nothing: the gradients stay until `zero`."""

    def zero(self, set_to_none: bool) -> None:
        """Forget the gradients; give up a round that backward left unfinished.

        Called on every rank. The rest of such a round is sent all the same: other ranks may have
        come further, or finished it.
        """
        with self._lock:
            self._end_what_began()
            self._settle()
            if not set_to_none:
                self._zero_grads(self._trained)
                return
            self._drop()

    def _drop(self) -> None:
        """Leave no gradient and no stand-in for one."""
        for index in self._trained:
            self._params[index].grad = None
            self._standing[index].take_incoming()
        for _, tensor in self._shard:
            tensor.grad = None
        self._aside.clear()
        self._forget()

    def _forget(self) -> None:
        for pending, _ in self._used_elsewhere:
            pending.wait()
        self._used_elsewhere.clear()
        self._cleared_at.clear()
        self._used_here.clear()
        self._rounds = 0
        self._unsent = False
        self._collected = False

    def zero_some(self, params: Sequence[int]) -> None:
        """Set the gradients of these parameters to zero, on this rank's pieces of them."""
        self._settle()
        self._zero_grads(params)

    def _zero_grads(self, params: Sequence[int]) -> None:
        for index in params:
            held_back = self._standing[index].take_incoming()
            if held_back is not None:
                # A gradient of zero is one: the parameter is stepped on, even if no other came.
                self._standing[index].incoming = torch.zeros_like(held_back)
        self._clear(params)

    def _clear(self, params: Iterable[int]) -> None:
        for index in params:
            if index in self._grads:
                self._grads[index].zero_()

    # --------------------------------------------------------------------- looking and changing

    def clip_norm(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> torch.Tensor:
        """Clip by the norm over all ranks' shards. Called on every rank."""
        self.collect()
        self._announce("clip", lambda: [max_norm, norm_type, error_if_nonfinite, foreach])
        return self.shadow_clip(max_norm, norm_type, error_if_nonfinite, foreach)

    def shadow_clip(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> torch.Tensor:
        """Take part in clipping. Called on every rank."""
        self.collect()
        lanes = {lane.shard.dtype.to_real() for lane in self._lanes}
        return clip_norm(
            self._comm,
            [tensor for _, tensor in self._shard],
            self._params[0].device,
            torch.float64 if torch.float64 in lanes else torch.float32,
            max_norm,
            norm_type,
            error_if_nonfinite,
            foreach,
        )

    def unscale(
        self, params: Sequence[int], found_inf: torch.Tensor, inv_scale: torch.Tensor
    ) -> None:
        """Unscale these gradients, with one verdict on all ranks. Called on every rank."""
        self.collect()
        self._announce("unscale", lambda: [list(params), inv_scale.item()])
        self._unscale_own(params, found_inf, inv_scale)

    def shadow_unscale(self, params: Sequence[int], inv_scale: float) -> None:
        """Take part in unscaling. Called on every rank."""
        self.collect()
        device = self._params[params[0]].device
        found_inf = torch.zeros((), device=device)
        self._unscale_own(params, found_inf, torch.tensor(inv_scale, device=device))

    def _unscale_own(
        self, params: Sequence[int], found_inf: torch.Tensor, inv_scale: torch.Tensor
    ) -> None:
        wanted = set(params)
        grads = [
            tensor.grad
            for piece, tensor in self._shard
            if piece.param in wanted and tensor.grad is not None
        ]
        unscale(self._comm, grads, found_inf, inv_scale)

    def full(self, param: int) -> torch.Tensor | None:
        """The whole mean gradient of one parameter. Called on every rank."""
        self.collect()
        spec = self._plan.specs[param]
        if self._params[param].grad is None or not self._used_among({param}):
            return None
        bucket = self._lanes[self._lane_of[param]].bucket
        slot = next(slot for slot in bucket.slots if slot.param == param)
        here = Interval(slot.bucket_offset, slot.bucket_offset + slot.numel)
        cuts = [0]
        for group_rank in range(self._comm.world_size):
            held = here.intersect(bucket.segment(group_rank))
            cuts.append(max(cuts[-1], held.stop - here.start if held.numel else 0))
        device = self._params[param].device
        whole = torch.zeros(slot.numel, dtype=self._dtypes[param], device=device)
        own = whole[cuts[self._comm.group_rank] : cuts[self._comm.group_rank + 1]]
        if own.numel():
            own.copy_(self._grads[param].detach().as_strided((own.numel(),), (1,)))
        self._comm.all_gather(whole, cuts).wait()
        return whole.as_strided(spec.shape, spec.stride)

    def held(self) -> bool:
        """Whether there are gradients, sent or not, that nobody has cleared."""
        return any(self._params[index].grad is not None for index in self._trained)

    def detach(self) -> None:
        """Remove the hooks and the stand-ins. Called on every rank."""
        self.zero(set_to_none=True)
        self._paused = False
        for handle in self._handles:
            handle.remove()
        _watching.discard(self)


def _scale(grad: torch.Tensor, scale: float, view: torch.Tensor) -> None:
    """Put `grad`, scaled, into `view`, with one rounding to the narrower of their dtypes."""
    if view.itemsize > grad.itemsize:
        view.copy_(grad).mul_(scale)
    else:
        torch.mul(grad, scale, out=view)
