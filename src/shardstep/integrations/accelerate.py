"""Hugging Face Accelerate: `prepare` with sharded optimizers among the objects."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer

from shardstep.integrations.sharded import give_no_sync, has_no_sync_of, sharded
from shardstep.optimizer import ZeroRedundancyOptimizer

_OTHERS = (
    DistributedType.DEEPSPEED,
    DistributedType.FSDP,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """Prepare objects as `accelerator.prepare` does, and return them in the same order.

    Called on every rank. A module that a sharded optimizer has as `module=` gets no DDP wrapper.
    `accelerator.accumulate`, `no_sync` and `save_state` then work through the optimizer.

    Args:
        accelerator: the accelerator; not one for DeepSpeed, FSDP, Megatron or XLA.
        *objects: models, optimizers, data loaders and schedulers.

    Raises:
        ValueError: if the accelerator shards by itself or knows of one rank only, or the module of
            an optimizer is missing.
    """
    if accelerator.distributed_type in _OTHERS:
        raise ValueError(
            f"expected an accelerator that would use DDP, got {accelerator.distributed_type}, "
            "which shards or reduces gradients itself; configure Accelerate for multi-GPU or CPU"
        )
    optimizers = [found for each in objects if (found := _sharded(each)) is not None]
    for each in optimizers:
        if accelerator.num_processes == 1 < each.world_size:
            raise ValueError(
                f"rank {each.rank}: the accelerator sees 1 process, but the optimizer has "
                f"{each.world_size} ranks, so all would train on the same batches; on CPUs, pass "
                "Accelerator(cpu=True), or use_cpu=True to TrainingArguments"
            )
    modules = {id(each.mode.module): each for each in optimizers if each.mode.module is not None}
    missing = modules.keys() - {id(each) for each in objects}
    if missing:
        raise ValueError(
            "an optimizer with module= must be prepared together with its module; pass the "
            f"{type(modules[missing.pop()].mode.module).__name__} to the same prepare()"
        )
    prepared = list(objects)
    # Schedulers last: each looks for its optimizer among those that are prepared.
    for number, each in sorted(enumerate(objects), key=lambda pair: _turn(pair[1])):
        found = _sharded(each)
        if id(each) in modules:
            prepared[number] = _prepare_module(accelerator, modules[id(each)])
        elif found is not None and not isinstance(each, AcceleratedOptimizer):
            prepared[number] = _prepare_optimizer(accelerator, found)
        else:
            # Of the class: the Trainer mixin puts this function in the instance's place.
            prepared[number] = Accelerator.prepare(accelerator, each)
    return tuple(prepared) if len(prepared) != 1 else prepared[0]


def _sharded(each: Any) -> ZeroRedundancyOptimizer | None:
    return sharded(each) if isinstance(each, torch.optim.Optimizer) else None


def _turn(each: Any) -> int:
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return next((turn for turn, kind in enumerate(kinds) if isinstance(each, kind)), len(kinds))


def _prepare_module(
    accelerator: Accelerator, optimizer: ZeroRedundancyOptimizer
) -> torch.nn.Module:
    module = optimizer.mode.module
    assert module is not None
    # As `accelerator.prepare` marks models, so that a second call does not wrap the forward again.
    # Another optimizer comes with another accelerator, which may cast differently.
    module._is_accelerate_prepared = has_no_sync_of(optimizer)  # type: ignore[assignment]
    give_no_sync(optimizer)
    # With `evaluation_mode` it does all but wrap the model in DDP.
    model: torch.nn.Module = accelerator.prepare_model(module, evaluation_mode=True)
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    return model


def _prepare_optimizer(
    accelerator: Accelerator, optimizer: ZeroRedundancyOptimizer
) -> AcceleratedOptimizer:
    # State is made on the parameters' devices. Placing it would ask each rank for all of it.
    wrapped = accelerator.prepare_optimizer(optimizer, device_placement=False)
    everywhere = accelerator.project_configuration.save_on_each_node

    def consolidate(models: object, weights: object, folder: object) -> None:
        optimizer.consolidate_state_dict(to="all" if everywhere else 0)

    def state_dict() -> dict[str, Any]:
        # `save_state` asks every rank, and writes the main process's answer.
        return optimizer.state_dict() if everywhere or optimizer.rank == 0 else {}

    accelerator.register_save_state_pre_hook(consolidate)
    wrapped.state_dict = state_dict
    wrapped._is_accelerate_prepared = True
    return wrapped
