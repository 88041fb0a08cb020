"""The contestants: ways to train the same model on the same batches, by name.

To add one, write a function that takes a model factory and a `Setup`, returns a `Trainee`, and
carries `@contestant(name, description)`. It raises `UnavailableError` where it cannot run here.
Every rank builds every contestant in the same order, so a builder may make process groups; each
makes its own, or one contestant's messages would queue behind another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adafactor, AdamW

import shardstep

LEARNING_RATE = 3e-4
ADAMW: dict[str, Any] = {"lr": LEARNING_RATE, "fused": True}
MUON: dict[str, Any] = {"lr": 0.02}

ModelFactory = Callable[[], nn.Module]
"""Makes the model with the same weights each time; `model(x, y)` returns `(logits, loss)`."""


class UnavailableError(Exception):
    """This contestant cannot run here; the message says why."""


@dataclass(frozen=True)
class Setup:
    """The options that all contestants share.

    Attributes:
        device: the type of device that the model is on.
        muon: Muon for the matrices of the blocks, and AdamW for the rest; else AdamW for all.
        bucket_bytes: of ours; None for the default.
        compiled: compile as each tool wants it.
    """

    device: str = "cpu"
    muon: bool = False
    bucket_bytes: int | None = None
    compiled: bool = False

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return parameter groups, each with its `optimizer_class` and its options."""
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, param in model.named_parameters():
            inner = self.muon and "blocks." in name and param.dim() == 2
            (matrices if inner else others).append(param)
        groups = [{"params": others, "optimizer_class": AdamW, **ADAMW}]
        if matrices:
            groups.append({"params": matrices, "optimizer_class": torch.optim.Muon, **MUON})
        return groups

    def optimizer(self, model: nn.Module, make: Callable[..., Any] | None = None) -> Any:
        """Return an optimizer for each group as one; `make(params, cls, **options)` makes each."""
        make = make or (lambda params, cls, **options: cls(params, **options))
        made = [make(g.pop("params"), g.pop("optimizer_class"), **g) for g in self.groups(model)]
        return made[0] if len(made) == 1 else _Several(made)


class _Several:
    """Optimizers that step one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


class Trainee:
    """A model under training in the plain loop: forward, backward, step, clear the gradients.

    Attributes:
        model: what is called, wrapper included.
        optimizer: what is stepped.
        local_optimizer: the one whose state and gradients are this rank's share.
        to_compile: the modules to compile, if it is asked for; None for the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        local_optimizer: Any = None,
        to_compile: Sequence[nn.Module] | None = None,
    ) -> None:
        self.model: Any = model
        self.optimizer = optimizer
        self.local_optimizer = local_optimizer or getattr(optimizer, "optim", optimizer)
        self.to_compile = [model] if to_compile is None else to_compile

    def step(self, x: Tensor, y: Tensor, after_backward: Callable[[], None] | None = None) -> float:
        """Train on one batch and return this rank's loss. Called on every rank."""
        loss = self.model(x, y)[1]
        self.backward(loss)
        if after_backward is not None:
            after_backward()
        self.update()
        return float(loss.detach())

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, synchronised or about to be."""
        loss.backward()

    def update(self) -> None:
        """Change the parameters and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


Build = Callable[[ModelFactory, Setup], Trainee]


@dataclass(frozen=True)
class Contestant:
    """A registered builder."""

    name: str
    description: str
    build: Build


CONTESTANTS: dict[str, Contestant] = {}


def contestant(name: str, description: str) -> Callable[[Build], Build]:
    """Register the builder below under `name`."""

    def register(build: Build) -> Build:
        CONTESTANTS[name] = Contestant(name, description, build)
        return build

    return register


@contestant("ddp", "DistributedDataParallel, fused AdamW")
def _ddp(make_model: ModelFactory, setup: Setup) -> Trainee:
    model = _wrapped(make_model(), gradient_as_bucket_view=False)
    return Trainee(model, setup.optimizer(model))


@contestant("ddp-view", "the same, gradient_as_bucket_view=True")
def _ddp_view(make_model: ModelFactory, setup: Setup) -> Trainee:
    model = _wrapped(make_model())
    return Trainee(model, setup.optimizer(model))


@contestant("torch-zero", "DDP, torch's ZeroRedundancyOptimizer over fused AdamW")
def _torch_zero(make_model: ModelFactory, setup: Setup) -> Trainee:
    return _ddp_with_torch_zero(make_model, setup, views=False)


@contestant("torch-zero-view", "the same, with bucket views of gradients and parameters")
def _torch_zero_view(make_model: ModelFactory, setup: Setup) -> Trainee:
    return _ddp_with_torch_zero(make_model, setup, views=True)


def _ddp_with_torch_zero(make_model: ModelFactory, setup: Setup, *, views: bool) -> Trainee:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _wrapped(make_model(), gradient_as_bucket_view=views)
    make = partial(
        ZeroRedundancyOptimizer,
        process_group=model.process_group,
        parameters_as_bucket_view=views,
    )
    return Trainee(model, setup.optimizer(model, make))


@contestant("fsdp2", "fully_shard on blocks and root, reshard_after_forward=False, fused AdamW")
def _fsdp2(make_model: ModelFactory, setup: Setup) -> Trainee:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    mesh = DeviceMesh.from_group(dist.new_group(), setup.device)
    for module in [*_blocks(model), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return Trainee(model, setup.optimizer(model), to_compile=_blocks(model))


@contestant("zero1", "DDP, shardstep's ZeroRedundancyOptimizer over fused AdamW, bucket views")
def _zero1(make_model: ModelFactory, setup: Setup) -> Trainee:
    model = _wrapped(make_model())
    return Trainee(model, _sharded(model, setup, parameters_as_bucket_view=True))


@contestant("zero2", "shardstep's ZeroRedundancyOptimizer with module=model, no DDP")
def _zero2(make_model: ModelFactory, setup: Setup) -> Trainee:
    model = make_model()
    if setup.compiled:
        for block in _blocks(model):
            block.compile()  # before the optimizer is constructed, which keeps the overlap
    optimizer = _sharded(model, setup, dist.new_group(), module=model)
    return Trainee(model, optimizer, to_compile=())


@contestant("zero2-replayed", "the same, with the local step replayed as a CUDA graph")
def _zero2_replayed(make_model: ModelFactory, setup: Setup) -> Trainee:
    model = make_model()
    return Trainee(model, _sharded(model, setup, dist.new_group(), module=model, capturable=True))


@contestant("zero2-recoverable", "the same, waiting for all ranks' notes, so that recover() works")
def _zero2_recoverable(make_model: ModelFactory, setup: Setup) -> Trainee:
    model = make_model()
    return Trainee(model, _sharded(model, setup, dist.new_group(), module=model, recoverable=True))


@contestant("whole", "shardstep's ZeroRedundancyOptimizer over Adafactor, which is never cut")
def _whole(make_model: ModelFactory, setup: Setup) -> Trainee:
    model = make_model()
    optimizer = shardstep.ZeroRedundancyOptimizer(
        model.parameters(),
        Adafactor,
        process_group=dist.new_group(),
        lr=LEARNING_RATE,
        module=model,
    )
    return Trainee(model, optimizer)


@contestant("hook", "DDP with shardstep's hook_with_zero_step over an all-reduce")
def _hook(make_model: ModelFactory, setup: Setup) -> Trainee:
    return _with_hook(make_model, setup, shardstep.hook_with_zero_step)


@contestant("hook-interleaved", "DDP with shardstep's hook_with_zero_step_interleaved")
def _hook_interleaved(make_model: ModelFactory, setup: Setup) -> Trainee:
    return _with_hook(make_model, setup, shardstep.hook_with_zero_step_interleaved)


@contestant("register", "DDP with shardstep's register: reduce-scatter in place of the all-reduce")
def _register(make_model: ModelFactory, setup: Setup) -> Trainee:
    model = _wrapped(make_model())
    optimizer = _sharded(model, setup, overlap_with_ddp=True)
    shardstep.register(model, optimizer)
    return Trainee(model, optimizer)


def _with_hook(make_model: ModelFactory, setup: Setup, make_hook: Callable[..., Any]) -> Trainee:
    model = _wrapped(make_model())
    optimizer = _sharded(model, setup, overlap_with_ddp=True)
    hook = make_hook(allreduce_hook, model, optimizer)
    model.register_comm_hook(model.process_group, hook)
    return Trainee(model, optimizer)


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [m for layers in model.modules() if isinstance(layers, nn.ModuleList) for m in layers]


def _wrapped(model: nn.Module, *, gradient_as_bucket_view: bool = True) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        process_group=dist.new_group(),
        gradient_as_bucket_view=gradient_as_bucket_view,
    )


def _sharded(model: Any, setup: Setup, group: Any = None, **options: Any) -> Any:
    return shardstep.ZeroRedundancyOptimizer(
        setup.groups(model) if setup.muon else model.parameters(),
        AdamW,
        process_group=group or model.process_group,
        bucket_bytes=setup.bucket_bytes,
        **ADAMW,
        **options,
    )


@contestant("deepspeed", "DeepSpeed ZeRO-2, AdamW")
def _deepspeed(make_model: ModelFactory, setup: Setup) -> Trainee:
    return _deepspeed_stage(2, make_model)


@contestant("deepspeed-zero1", "DeepSpeed ZeRO-1, AdamW")
def _deepspeed_zero1(make_model: ModelFactory, setup: Setup) -> Trainee:
    return _deepspeed_stage(1, make_model)


def _deepspeed_stage(stage: int, make_model: ModelFactory) -> Trainee:
    try:
        import deepspeed
    except ImportError as error:
        raise UnavailableError("deepspeed is not installed") from error
    model = make_model()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=AdamW(model.parameters(), lr=LEARNING_RATE, fused=True),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,  # 1.0 unless told
            "zero_optimization": {"stage": stage, "overlap_comm": True},
            "zero_allow_untested_optimizer": True,
        },
    )
    return _EngineTrainee(engine, optimizer, local_optimizer=optimizer.optimizer)


class _EngineTrainee(Trainee):
    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def update(self) -> None:
        self.model.step()


@contestant("fairscale", "fairscale OSS + ShardedDataParallel, fused AdamW")
def _fairscale(make_model: ModelFactory, setup: Setup) -> Trainee:
    try:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS
    except ImportError as error:
        raise UnavailableError("fairscale is not installed") from error
    group = dist.new_group()
    model = make_model()
    optimizer = OSS(model.parameters(), AdamW, group=group, lr=LEARNING_RATE, fused=True)
    return _ShardedTrainee(ShardedDataParallel(model, optimizer, process_group=group), optimizer)


class _ShardedTrainee(Trainee):
    def update(self) -> None:
        self.optimizer.step()
        self.model.zero_grad()  # its buckets too, which the optimizer's own leaves as they are
