"""The step: every mode takes it.

    gradient -> bucket -> shard -> update -> shard -> bucket -> parameter

`Stepper.step` is the whole of it: ranks compare their positions, the plan follows changes of the
parameters, and `Pipeline.step` runs the stages. A step that DDP's buckets drive, one at a time, and
a change outside of a step (`apply`) go through the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from shardstep.comm import OutOfStepError, span
from shardstep.gather import ParamGather
from shardstep.gradients import GradientSource
from shardstep.local.local_optimizer import LocalOptimizer
from shardstep.local.multi_class import optimizer_name
from shardstep.params.module import ModuleBuffers
from shardstep.params.sharded_params import ShardedParams
from shardstep.state.view import ShardView

T = TypeVar("T")
Closure = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a step under one plan. A change of the plan makes another pipeline.

    Attributes:
        params: the plan, the storage, this rank's pieces and their masters.
        gradients: where the pieces' gradients come from.
        local: the unmodified optimizer class on the pieces.
        gather: sends updated parameters to all ranks.
        buffers: the module's buffers, sent after each step.
    """

    params: ShardedParams
    gradients: GradientSource
    local: LocalOptimizer
    gather: ParamGather
    buffers: ModuleBuffers

    def step(self, evaluation: Evaluation | None = None, **kwargs: Any) -> float | None:
        """Take one step. Called on every rank."""
        closure = None if evaluation is None else partial(evaluation.loss, self)
        failed = False

        def act() -> float | None:
            nonlocal failed
            try:
                loss: float | None = self.local.step(closure, **kwargs)
            except Exception:
                # The other ranks wait for this one's pieces; if a closure raised, not yet.
                failed = evaluation is None or not evaluation.running
                raise
            return loss

        try:
            with self.stepping():
                loss = self.update(self._collected(), act)
        except Exception as error:
            if failed:
                self._finish(error)
            raise
        self._finish(None)
        return loss

    def _finish(self, error: Exception | None) -> None:
        """Send the parameters and buffers, as they are, and the error of this rank's step."""
        self.mark_changed()
        self.gather.end_step(error)
        # A forward pass has changed them on each rank in its own way. DDP evens them out before the
        # next one. Here evaluation, which need not run on all ranks, finds the same buffers too.
        self.buffers.send()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Surround one or several updates: parameters and masters are up to date.

        Entered on every rank.

        Raises:
            ValueError: if the user has changed which parameters the groups have.
        """
        self.gather.wait()
        if (edit := self.params.hand_edit()) is not None:
            raise ValueError(edit)
        shard = self.params.shard
        with shard.stepping() if shard.wide.needed else nullcontext():
            yield

    @contextmanager
    def _collected(self) -> Iterator[None]:
        self.gradients.collect()
        try:
            yield
        finally:
            self.gradients.release()

    def update(
        self,
        gradients: AbstractContextManager[None],
        act: Callable[[], T],
        among: Collection[int] | None = None,
    ) -> T:
        """Update this rank's pieces, and write them back to their parameters.

        In the context `gradients`, every piece has its gradient, or None.
        """
        with gradients:
            try:
                with span("step"):
                    return act()
            finally:
                self.write_back(among)

    def write_back(self, among: Collection[int] | None = None) -> None:
        """Write updated pieces of these parameters, or of all, back to them."""
        if self.params.shard.write_back(self.local.let_go, among):
            self.params.attach()

    def mark_changed(self, among: Iterable[int] | None = None) -> None:
        """Let autograd see that these parameters, or all that have a gradient, were written to.

        A backward pass on the old values then fails on every rank, as after any optimizer's step.
        """
        params = self.params.params
        with torch._C.DisableTorchFunctionSubclass():  # do not wait for parameters in flight
            changed = (
                [param for param in params if param.grad is not None]
                if among is None
                else [params[index] for index in among]
            )
        torch.autograd.graph.increment_version(changed)

    def detach(self, params: Iterable[int]) -> None:
        """Remove all hooks, and give these parameters storage of their own."""
        self.gather.detach()
        self.gradients.detach()
        self.params.storage.detach(params)


class Evaluation:
    """A closure that was evaluated before the step.

    Its gradients and those that `no_sync()` held back are then reduced together.

    Attributes:
        running: True while the optimizer asks for the loss, and after that has raised.
    """

    def __init__(self, closure: Closure) -> None:
        self._closure = closure
        self.running = False
        with torch.enable_grad():
            self._losses = [closure()]

    def loss(self, pipeline: Pipeline) -> float:
        """Return the loss; evaluate the closure once more if it was returned before."""
        again = not self._losses
        if again and pipeline.params.plan.world_size > 1:
            # Between two evaluations, each rank has moved only its own pieces.
            raise RuntimeError(
                f"{optimizer_name(pipeline.local.optim)} evaluates its closure more than once in a "
                "step, which a sharded optimizer cannot do; use it unsharded"
            )
        if again:
            pipeline.write_back()  # the model reads the parameters
        self.running = True
        loss = self._closure() if again else self._losses.pop()
        pipeline.gradients.collect()
        self.running = False
        return loss


class Stepper(ShardView):
    """Steps with the pipeline of the plan in force."""

    def step(self, closure: Closure | None = None, **kwargs: Any) -> float | None:
        """Take one step. Called on every rank."""
        try:
            evaluation = None if closure is None else Evaluation(closure)
            self.before_step()
            self.follow(stepping=True)
            return self.pipeline.step(evaluation, **kwargs)
        except OutOfStepError:
            raise
        except BaseException:
            self.lockstep.raised += 1
            raise
        finally:
            self.lockstep.steps += 1

    def before_step(self) -> None:
        """Check that all ranks are at the same step with the same options. Called on every rank.

        Ranks that have data let joined ranks take part.
        """
        raise NotImplementedError

    def follow(self, stepping: bool = False) -> None:
        """Adapt to changes of the parameters since the last step. Called on every rank."""
        if not self.pipeline.params.unchanged():
            self.adapt(stepping)

    def adapt(self, stepping: bool) -> None:
        """Attach the parameters again, or change the plan. Called on every rank."""
        raise NotImplementedError

    def after_zero_grad(self) -> None:
        """Adapt to parameters that are frozen now and had a gradient, if this mode does."""
