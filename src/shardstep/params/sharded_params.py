"""All parameters under one plan: their storage, and this rank's pieces of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch

from shardstep.params.masters import Masters, StepCopies, StepTensors
from shardstep.params.shard import FreeMemory, Shard
from shardstep.params.stochastic_rounding import StochasticRounding
from shardstep.params.storage import BucketViews, OwnStorage, ParamStorage
from shardstep.plan import ShardPlan


class ShardedParams:
    """The parameters of an optimizer under one plan, left alone until `attach` is called.

    `step_dtypes` has the parameters that are stepped on in a wider dtype, by number. With
    `rounding`, their wide copies are rounded stochastically and not kept as masters. With
    `separate`, entire parameters get a separate step tensor.
    """

    def __init__(
        self,
        plan: ShardPlan,
        params: Sequence[torch.Tensor],
        group_rank: int,
        bucket_views: bool,
        separate: bool,
        step_dtypes: Mapping[int, torch.dtype],
        rounding: StochasticRounding | None,
    ) -> None:
        self.plan = plan
        self.params = params
        self.trainable = [spec.trainable for spec in plan.specs]
        self.step_dtypes = step_dtypes
        storage = BucketViews if bucket_views else OwnStorage
        self.storage: ParamStorage = storage(plan, params, group_rank)
        pieces = tuple(sorted(plan.pieces(group_rank), key=lambda piece: piece.param))
        narrow = [piece for piece in pieces if piece.param in step_dtypes]
        wide: StepTensors = (
            Masters(narrow, params, step_dtypes, self.storage.flat)
            if rounding is None
            else StepCopies(narrow, params, step_dtypes, self.storage.flat, rounding)
        )
        self.shard = Shard(pieces, params, separate, wide)

    def attach(self) -> None:
        """Take the parameters in, wherever their data lies now."""
        self.storage.attach()
        self.shard.repoint()

    def intact(self) -> bool:
        """Return True if every parameter's data lies where `attach` left it."""
        # Asking a parameter in flight for its address must not wait for it.
        with torch._C.DisableTorchFunctionSubclass():
            return self.storage.intact()

    def unchanged(self) -> bool:
        """Return True if no parameter was moved, frozen or unfrozen since `attach`."""
        with torch._C.DisableTorchFunctionSubclass():
            # As `is_trainable`, written out: it is asked of every parameter three times a step.
            now = [param.requires_grad or param.grad is not None for param in self.params]
            return self.trainable == now and self.storage.intact()

    def write_back(self, free_memory: FreeMemory, among: Container[int] | None = None) -> None:
        """Write updated pieces of these parameters, or of all, back. See `Shard.write_back`."""
        if self.shard.write_back(free_memory, among):
            self.attach()

    def mark_changed(self, among: Iterable[int] | None = None) -> None:
        """Tell autograd that these parameters, or all that have a gradient, were written to.

        A backward pass on the old values then fails on every rank, as after any optimizer's step.
        """
        changed = None if among is None else [self.params[index] for index in among]
        if changed is None:
            with torch._C.DisableTorchFunctionSubclass():
                changed = [param for param in self.params if param.grad is not None]
        torch.autograd.graph.increment_version(changed)
