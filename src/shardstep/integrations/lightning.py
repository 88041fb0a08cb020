"""Lightning: strategies for `module=`, for the Trainer and for Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer
from typing_extensions import override

from shardstep.integrations.sharded import give_no_sync, require_module


class ShardstepStrategy(DDPStrategy):
    """A strategy in which the optimizers reduce gradients, in place of a DDP wrapper.

    `configure_optimizers` returns one or more `ZeroRedundancyOptimizer` with `module=self`, or with
    a part of it. Without `module=`, use `strategy="ddp"`.
    """

    strategy_name = "shardstep"

    @override
    def configure_ddp(self) -> None:
        pass  # the optimizers reduce

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        # Those of the last `fit` let go of the model, unless the user keeps them and returns them
        # again.
        self.optimizers, self.lr_scheduler_configs = [], []
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            require_module(optimizer, type(self).__name__)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        # Through `__call__`, so that the hooks of `module=self` run as those of a DDP wrapper do.
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(
                self.lightning_module, self.lightning_module, "training_step", *args, **kwargs
            )

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(require_module(optimizer, type(self).__name__).no_sync())
            yield


class ShardstepFabricStrategy(FabricDDPStrategy):
    """The same for Fabric. `fabric.setup` takes optimizers with `module=` only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _SyncControl()
        self._reduced = False

    @override
    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override]
        return module  # the optimizer reduces

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        give_no_sync(require_module(optimizer, type(self).__name__))
        self._reduced = True
        return optimizer

    @override
    def backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not self._reduced:
            raise RuntimeError(
                f"{type(self).__name__} does not wrap the model in DDP and has no optimizer that "
                "reduces gradients; pass a ZeroRedundancyOptimizer with module= to "
                "fabric.setup_optimizers"
            )
        super().backward(tensor, *args, **kwargs)


class _SyncControl(_BackwardSyncControl):
    @override
    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool
    ) -> AbstractContextManager[None]:
        return module.no_sync() if enabled else nullcontext()  # type: ignore[operator]
