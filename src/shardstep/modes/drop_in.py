"""Drop-in mode (ZeRO-1): DDP or the user synchronises gradients before `step()`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from shardstep.comm import Comm
from shardstep.comm.join import JoinContext
from shardstep.gradients.unsynchronised import SynchronisedCheck
from shardstep.modes.base import Mode
from shardstep.modes.join import keep_gradients, provide_gradients


class DropIn(Mode):
    """Gradients are equal on all ranks when `step()` is called; it gathers before it returns."""

    title = "drop-in (ZeRO-1)"
    separate = False

    def __init__(
        self,
        comm: Comm,
        join: JoinContext,
        module: torch.nn.Module | None,
        bucket_views: bool,
    ) -> None:
        super().__init__(comm, join, module)
        self.bucket_views = bucket_views
        self._synchronised = SynchronisedCheck(comm)

    @override
    def before_step(self) -> None:
        if not self.join.shadowing:
            params = self.pipeline.params
            self.watch.check(params.params)
            if self.join.enabled:
                self.join.notify()
                provide_gradients(self.comm, self.plan, self.groups, joined=False)
            else:
                self._synchronised.check(params.plan.specs, params.params)
        self.lockstep.meet(self.comm, self.pipeline.params)

    @override
    def shadow(self, step: Callable[[], object], zero_grad: Callable[[bool], object]) -> None:
        with self.join.shadow(), keep_gradients(self.params):
            provide_gradients(self.comm, self.plan, self.groups, joined=True)
            step()
