"""Drop-in mode (ZeRO-1): DDP or the user synchronises gradients before `step()`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from shardstep.comm import Comm, all_gather_json
from shardstep.comm.join import JoinContext
from shardstep.modes.base import Mode
from shardstep.modes.join import keep_gradients, provide_gradients
from shardstep.params.dtensor import is_dtensor
from shardstep.params.inputs import ParamsArgument
from shardstep.params.names import unwrapped

CHECKED_STEPS, CHECKED_PARAMS, CHECKED_ELEMENTS = 2, 4, 16
"""A few gradients are compared between ranks, in the first steps."""

TOLERANCE = 1e-3
"""Sums over ranks may round differently on each. The gradients of different batches differ more."""


class DropIn(Mode):
    """Gradients are equal on all ranks when `step()` is called; it gathers before it returns."""

    title = "drop-in (ZeRO-1)"
    separate = False

    def __init__(
        self,
        comm: Comm,
        join: JoinContext,
        given: ParamsArgument,
        bucket_views: bool,
    ) -> None:
        super().__init__(comm, join, given.module)
        self.watched = None if given.watched is None else unwrapped(given.watched)
        self.bucket_views = bucket_views
        self._checks_left = CHECKED_STEPS if comm.world_size > 1 else 0

    @override
    def before_step(self) -> None:
        if not self.join.shadowing:
            self.watch.check(self.pipeline.params.params)
            if self.join.enabled:
                self.join.notify()
                provide_gradients(self.comm, self.plan, self.groups, joined=False)
            elif self._checks_left:
                self._checks_left -= 1
                self._check_synchronised()
        self.lockstep.exchange(self.comm, self.pipeline.params)

    def _check_synchronised(self) -> None:
        """Raise on every rank if gradients differ, naming one. Called on every rank."""
        params = self.pipeline.params
        few = params.trained[:: max(1, len(params.trained) // CHECKED_PARAMS)]
        answers = all_gather_json(self.comm, [_sample(params.params[index]) for index in few])
        for index, *samples in zip(few, *answers, strict=True):
            given = {
                rank: torch.tensor(each, device="cpu") for rank, each in enumerate(samples) if each
            }
            first = min(given, default=0)
            for rank, sample in given.items():
                size = max(sample.norm(), given[first].norm())
                if (sample - given[first]).norm() > TOLERANCE * size:
                    name = params.plan.specs[index].name
                    raise RuntimeError(
                        f"the gradient of parameter {name!r} differs between ranks {first} and "
                        f"{rank}: without module=, gradients must be synchronised before "
                        "step(); call the DistributedDataParallel wrapper, not the module in it, "
                        "or pass module= and no DDP"
                    )

    @override
    def shadow(self, step: Callable[[], object], zero_grad: Callable[[bool], object]) -> None:
        with self.join.shadow(), keep_gradients(self.params):
            provide_gradients(self.comm, self.plan, self.groups, joined=True)
            step()


def _sample(param: torch.Tensor) -> list[float]:
    """Return some elements of a gradient; none where there is no gradient to compare."""
    grad = param.grad
    if grad is None or is_dtensor(grad) or grad.layout is not torch.strided or not grad.numel():
        return []
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    flat = real.detach().flatten()
    values = flat[:: max(1, flat.numel() // CHECKED_ELEMENTS)][:CHECKED_ELEMENTS].float().cpu()
    return list(values.nan_to_num(0.0, 0.0, 0.0).tolist())
