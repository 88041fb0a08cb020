"""Hugging Face `Trainer`: a callback for drop-in optimizers, a mixin for `module=`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_optimizer import is_optimizer_factory
from transformers.trainer_utils import SaveStrategy

from shardstep.integrations.accelerate import prepare
from shardstep.integrations.sharded import require_module, sharded
from shardstep.optimizer import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object


class ConsolidateOnSave(TrainerCallback):
    """Gathers the optimizer's state before the Trainer saves it, which it does on one rank."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Consolidate if a save follows. Called on every rank."""
        best = args.save_strategy == SaveStrategy.BEST and control.should_evaluate
        if (control.should_save or best) and not args.save_only_model:
            consolidate(kwargs["optimizer"], args)

    on_epoch_end = on_step_end


def consolidate(optimizer: torch.optim.Optimizer | None, args: TrainingArguments) -> None:
    """Gather the state on each rank that the Trainer saves on. Called on every rank."""
    found = None if optimizer is None else sharded(optimizer)
    if found is not None:
        found.consolidate_state_dict(to="all" if args.save_on_each_node else 0)


class ShardstepTrainerMixin(Trainer):
    """Makes a Trainer shard its optimizer with `module=`, in place of DDP.

    List it before `Trainer`. The class and options are those that the Trainer would use: from
    `args.optim`, or from `optimizer_cls_and_kwargs`. An optimizer given as
    `optimizers=(optimizer, scheduler)` must be a `ZeroRedundancyOptimizer` with `module=`.
    """

    shardstep_options: ClassVar[dict[str, Any]] = {}
    """More arguments for `ZeroRedundancyOptimizer`, such as `layout` or `precision`."""

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and let it prepare sharded optimizers."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare = partial(prepare, self.accelerator)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimizer. Called on every rank."""
        given = self.optimizer_cls_and_kwargs
        if self.optimizer is None:
            model = self.model if model is None else model
            chosen, options = given or self.get_optimizer_cls_and_kwargs(self.args, model)
            if is_optimizer_factory(chosen):
                raise ValueError(
                    f"optim={self.args.optim!r} is not an optimizer class but a factory; pass "
                    "optimizer_cls_and_kwargs=(a class, its options)"
                )
            if chosen is not ZeroRedundancyOptimizer:
                options = {"optimizer_class": chosen, **options}
            options = {"module": model, **self.shardstep_options, **options}
            self.optimizer_cls_and_kwargs = (ZeroRedundancyOptimizer, options)
        try:
            optimizer = super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = given
        require_module(optimizer, type(self).__name__)
        return optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        consolidate(self.optimizer, self.args)
        super()._save_optimizer_and_scheduler(output_dir)
