"""ZeRO-2's gradients: reduce-scattered to their owners while backward runs.

A parameter's gradient stays in `param.grad` until all gradients of its bucket are there. Then they
are copied into a buffer and scaled by 1/N as DDP scales them. A `ShardedGrad` placeholder takes
their place, and the buffer is reduce-scattered. One pass over all buckets is a *round*. A round
begins with the first gradient and ends with the backward pass; a gradient that has not come by then
counts as zero. Buckets leave in the plan's reverse order, which is about the order of backward,
whatever order the gradients come in: the collectives of a rank never depend on its data.

Rounds add up in the shard until the gradients are cleared.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import takewhile
from types import NoneType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from shardstep.comm import Comm, span
from shardstep.comm.join import JoinContext
from shardstep.gradients.feeders import Feeder, Taken
from shardstep.gradients.lanes import lanes
from shardstep.gradients.lockstep import EMPTY, GIVEN_UP, NO_BACKWARD, Lockstep, UsedParams
from shardstep.gradients.norms import ShardNorms
from shardstep.gradients.sharded_grad import ShardedGrad
from shardstep.params.sharded_params import ShardedParams
from shardstep.precision import MixedPrecision


class Phase(Enum):
    """The progress of gradients on their way to the pieces."""

    OWED = auto()
    """Local gradients may be waiting: a round is due before the step."""
    REDUCED = auto()
    """Every local gradient was sent."""
    COLLECTED = auto()
    """Every piece has its gradient."""


@dataclass(slots=True)
class _Round:
    """One pass over all buckets.

    Attributes:
        missing: the gradients that each lane waits for.
        asked_for: whether a call that needs gradients began it, and no backward pass.
        launched: the number of lanes that were launched.
        taken: the gradients of the next lane, if launching it has failed.
        cleared: the parameters whose earlier gradients no longer count.
        used: the parameters that have a gradient on this rank.
        noted: whether the note behind the last lane was sent.
    """

    missing: list[set[int]]
    asked_for: bool
    launched: int = 0
    taken: Taken | None = None
    cleared: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    noted: bool = False


class GradReducer(ShardNorms):
    """Reduces gradients to their owners.

    Args:
        comm: the ranks, on connections that carry nothing else.
        params: the parameters and this rank's pieces, as tensors separate from the parameters.
        feeder: where the local gradients come from.
        precision: the dtypes in which gradients travel and are stepped on.
        overlap: whether buckets leave during backward, or all at its end.
        join: announces actions to joined ranks; None if DDP shadows them.
        lockstep: the position of this rank, which travels with each round.
    """

    def __init__(
        self,
        comm: Comm,
        params: ShardedParams,
        feeder: Feeder,
        precision: MixedPrecision,
        overlap: bool,
        join: JoinContext | None,
        lockstep: Lockstep,
    ) -> None:
        self._comm = comm
        self._plan = plan = params.plan
        self._pieces = {piece.param: tensor for piece, tensor in params.shard}
        self._feeder = feeder
        self._overlap = overlap
        self._join = join
        self._lockstep = lockstep
        self._lock = threading.RLock()
        self.params = params.params
        self.trained = params.trained
        self.placeholders: dict[int, ShardedGrad] = {}
        for index in self.trained:
            param, spec = self.params[index], plan.specs[index]
            dtype = precision.step_dtype(spec.dtype)
            self.placeholders[index] = ShardedGrad(param, index, spec.name, self, dtype)
        self.lanes = lanes(comm, params, precision)
        self._order = list(self.lanes)
        self.used = UsedParams(comm, params, self.trained, lockstep)
        self._phase = Phase.OWED
        self._round: _Round | None = None
        self._fresh = False  # whether a round has ended since the last step
        self._in_backward = False
        self.ran_backward = False  # since gradients were last cleared or sent
        self.paused = False
        self._norms = {}
        feeder.attach(self)

    @property
    @override
    def nbytes(self) -> int:
        return self.lanes.pool_nbytes + self.lanes.nbytes(self._feeder.lends_memory)

    # ---------------------------------------------------------------------------------- a round

    def hook(self, param: int) -> RemovableHandle:
        """Register a hook of autograd that counts each gradient of a parameter in."""
        return _hook(self.params[param], weakref.ref(self), param)

    def gradient_ready(self, param: int, final: bool = True) -> None:
        """Count a gradient in, and launch its bucket if that was the last and no hook is left."""
        # Models over several devices run their backward in several threads.
        with self._lock:
            if self.paused:
                hold_back = partial(self._feeder.hold_back, param)
                hold_back() if final else at_end_of_backward(hold_back)
                return
            current = self._round
            if current is None:
                self.announce("round")
                current = self._begin_round(by_gradient=True)
            lane = self.lanes.number_of[param]
            missing = current.missing[lane]
            if param in missing and final:
                missing.remove(param)
                if not missing and self._overlap and self._is_next():
                    waiting = current.missing
                    while current.launched < len(waiting) and not waiting[current.launched]:
                        self._launch(current)
            elif lane < current.launched:
                raise RuntimeError(
                    f"the gradient of parameter {self._plan.specs[param].name!r} came twice in "
                    "one backward pass, the second time after it was sent; if the model uses "
                    "activation checkpointing, pass use_reentrant=False"
                )

    def _is_next(self) -> bool:
        """Return whether the reducers that this backward pass reached before have sent all.

        A rank may get the gradients of one model late or not at all. If another model's buckets
        went ahead there, ranks would wait for each other in a circle.
        """
        earlier = takewhile(lambda other: other is not self, list(_reached))
        return not self._in_backward or all(
            other._round is not None and other._round.noted for other in earlier
        )

    def _launch(self, current: _Round) -> None:
        """Launch the next bucket, complete or not, and the note behind the last."""
        lane = self._order[current.launched]
        with span("reduce", lane.bucket.index):
            if current.taken is None:
                current.taken = taken = self._feeder.take(lane.params)
                pairs = zip(lane.params, taken.grads, strict=True)
                current.used += [index for index, grad in pairs if grad is not None]
                current.cleared += taken.cleared
            # If this raises, the other ranks wait for the rest of this bucket all the same.
            self.lanes.send(lane, current.taken)
        current.taken = None
        current.launched += 1
        if current.launched == len(self._order):  # at once: one order over all connections
            self._send_note(current)

    def _send_note(self, current: _Round) -> None:
        empty = not current.used and not self._lockstep.kept
        marks = (EMPTY | NO_BACKWARD * current.asked_for) * empty
        self.used.send(current.cleared, current.used, marks)
        current.noted = True

    def expect_backward(self) -> None:
        """End the round with the backward pass that this is called in.

        Called before its gradients come. Inner passes, such as those of reentrant activation
        checkpointing, end earlier.
        """
        with self._lock:
            self.ran_backward = True
            if not self._in_backward and not self.paused:
                self._in_backward = True
                _reached[self] = None
                at_end_of_backward(self._end_backward)

    def _leave_backward(self) -> None:
        self._in_backward = False
        _reached.pop(self, None)

    def _end_backward(self) -> None:
        with self._lock:
            self._leave_backward()
            if self._round is not None:
                self._finish_round(self._round)

    def _finish_interrupted(self) -> None:
        """Finish a backward pass that was left before its end. Called on every rank.

        It began on all ranks. Before the first gradient there is no round, but others may wait.
        """
        if self._in_backward and self._round is None:
            self._begin_round()
        if self._round is not None:
            self._feeder.before_end()
            self._finish_round(self._round)
        self._leave_backward()

    def _begin_round(self, by_gradient: bool = False) -> _Round:
        asked_for, self.ran_backward = not (by_gradient or self.ran_backward), False
        self._lockstep.kept = len(self._feeder.present(check=by_gradient).kept)
        self.lanes.wait()
        self._norms.clear()
        if self._lockstep.kept:
            self.used.fold()
        else:
            self._forget_all()
        if self._phase is Phase.COLLECTED:
            self._phase = Phase.REDUCED
        current = self._round = _Round([set(lane.params) for lane in self._order], asked_for)
        if not self._in_backward and self._feeder.ends_with_backward:
            # A round that was given up is no longer the current one.
            at_end_of_backward(
                lambda: self._finish_round(current) if self._round is current else None
            )
        return current

    def _finish_round(self, current: _Round) -> None:
        with self._lock:
            while current.launched < len(self._order):
                self._launch(current)
            if not current.noted:
                self._send_note(current)
            self._round, self._fresh = None, True
            self._phase = Phase.OWED if self.paused else Phase.REDUCED

    # ----------------------------------------------------------------------------- between rounds

    def check_forward(self) -> None:
        """Raise if the last backward pass was left before its end. Called before a forward pass."""
        begun = self._in_backward or self._round is not None
        if begun and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                "the last backward pass did not finish; call zero_grad() on every rank "
                "before going on"
            )

    @override
    def pause(self) -> None:
        self._feeder.pause()
        self.paused = True
        # Set here and not when a gradient comes: the same on every rank, whatever its data.
        self._phase = Phase.OWED

    @override
    def resume(self) -> None:
        if self.paused:  # and not detached meanwhile
            self.paused = False
            self._feeder.resume()

    @override
    def collect(self) -> None:
        """Finish the reductions and give each piece its gradient.

        A rank on which no gradient came, or whose gradients were held back by `no_sync`, takes
        part in a round now. So does one on which the user replaced `param.grad`: the new gradient
        counts, as for any optimizer.
        """
        self._finish_interrupted()
        types = self._feeder.present().types
        due = types == {NoneType} or not types <= {ShardedGrad, NoneType}  # cleared or replaced
        if due or self._phase is not Phase.COLLECTED:
            if self._phase is Phase.OWED or due:
                self.announce("round")
                self.shadow_round()
                types = self._feeder.present().types
            self.lanes.wait()
            used = self.used.among(self.lanes.held)
            for param, tensor in self._pieces.items():
                tensor.grad = self.lanes.grads.get(param) if param in used else None
            if not self.paused:
                self._phase = Phase.COLLECTED
            if not used and self.used.nowhere():
                self._drop()  # as for any optimizer, a parameter without gradient has None
        if NoneType in types:
            # The user has cleared some by hand, for this step to leave those parameters alone.
            for param, tensor in self._pieces.items():
                if self.params[param].grad is None:
                    tensor.grad = None

    @override
    def collect_once(self) -> None:
        if self._phase is not Phase.COLLECTED or self._in_backward:
            self.collect()

    @override
    def release(self) -> None:
        self._fresh = False  # gradients stay until zero()

    @override
    def zero(self, set_to_none: bool) -> None:
        """Clear the gradients; give up a round that backward left unfinished.

        The rest of such a round is sent all the same: other ranks may have finished it.
        """
        if not set_to_none:
            self._feeder.check_zeroing()
            self.announce("zero")
        with self._lock:
            self._finish_interrupted()
            self.lanes.wait()
            self._drop() if set_to_none else self.zero_some(self.trained)

    def recover(self) -> None:
        """Give the batch up: even out the rounds of all ranks, and drop all gradients.

        Called on every rank, wherever an error has left it. Others may be waiting for a round that
        this rank never began. So a round of zeros comes before the ranks compare how far they are.
        """
        with self._lock:
            if self._round is not None and self._round.noted:
                self._finish_round(self._round)
            if self._round is None and self._fresh and self.used.agrees():
                raise RuntimeError(
                    "every rank has finished this backward pass, so the others take its step; call "
                    "step() here too, or zero_grad() if all ranks skip the batch"
                )
            first = self._round.launched if self._round is not None else 0
            self._round = None
            self._leave_backward()
            works = []
            for _ in self._lockstep.even_out(self._comm):
                works += self.lanes.launch_zeros(first)
                self.used.send(marks=GIVEN_UP)
                first = 0
            for work in works:
                work.wait()
            self.lanes.wait()
            self.used.drop()
            self._drop()

    def zero_some(self, params: Sequence[int]) -> None:
        """Set the gradients of these parameters to zero, on this rank's pieces of them."""
        self._feeder.check_zeroing()
        self.lanes.wait()
        sharded = {i for i in params if isinstance(self.params[i].grad, ShardedGrad)}
        self.used.zero(sharded - self._feeder.aside)
        for index in params:
            accumulated = self.placeholders[index].incoming
            if accumulated is not None:
                # A gradient of zero still is one: the parameter is stepped on.
                self.placeholders[index].incoming = torch.zeros_like(accumulated)
        self.lanes.clear(params)
        self._norms.clear()

    def _drop(self) -> None:
        """Leave no gradient and no placeholder."""
        for index, placeholder in self.placeholders.items():
            self.params[index].grad = placeholder.incoming = None
        for tensor in self._pieces.values():
            tensor.grad = None
        self.lanes.drop()
        self._norms.clear()
        self._forget_all()

    def _forget_all(self) -> None:
        self.used.clear_all()
        self._fresh = self.ran_backward = False
        self._phase = Phase.OWED

    @override
    def has_gradients(self) -> bool:
        return any(self.params[index].grad is not None for index in self.trained)

    @override
    def detach(self) -> None:
        self.zero(set_to_none=True)
        self.paused = False
        self._feeder.detach()

    @override
    def full(self, param: int) -> torch.Tensor | None:
        self.collect()
        if self.params[param].grad is None or not self.used.among({param}):
            return None
        return self.lanes.gather_full(param)

    # ------------------------------------------------- joined ranks shadow those that have data

    @override
    def announce(self, kind: str, arguments: Callable[[], list[Any]] = list) -> None:
        if self._join is not None and self._join.enabled and not self._join.shadowing:
            self.used.compare()  # as joined ranks have, behind the last action
            # Clearing gradients is not announced; all ranks act on those that were not cleared.
            action = [kind, sorted(self._feeder.present().kept), arguments()]
            self._join.announce(self._comm, action)

    def shadow_round(self) -> None:
        """Take part in a round with whatever gradients there are. Called on every rank."""
        self._finish_round(self._begin_round())


def _hook(param: Any, reducer: weakref.ref[GradReducer], index: int) -> RemovableHandle:
    """Tell `reducer` of each gradient of `param`, after all other hooks, which may change it."""

    def gradient_ready(tensor: torch.Tensor) -> None:
        target, hooks = reducer(), handle.hooks_dict_ref()
        if target is not None and hooks is not None:
            is_last = next(reversed(hooks)) == handle.id
            if not is_last:
                # From the next pass on. Torch calls them in the order of insertion.
                hooks[handle.id] = hooks.pop(handle.id)
            target.gradient_ready(index, is_last)

    handle: RemovableHandle = param.register_post_accumulate_grad_hook(gradient_ready)
    return handle


_reached: weakref.WeakKeyDictionary[GradReducer, None] = weakref.WeakKeyDictionary()
"""Reducers of the models in the current backward pass, in the order in which it reached them."""


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Call `callback` at the end of the running backward pass; return False if there is none."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True
