"""Models for ZeRO-2 tests, and how to train them with DDP and without it, for comparison.

A `Problem` is a model and its batches: different on every rank and at every step. `Setup` is what
trains it: the callable module, the module proper and the optimizer. `with_ddp` and `with_zero` make
one; the same loop on both has to come to the same numbers. `scenarios` has the other modes.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problems import copies
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from demo.gpt import GPT, GPTConfig
from shardstep import MixedPrecision, ZeroRedundancyOptimizer
from shardstep.local.multi_class import MultiClass

ADAMW: tuple[type[Optimizer], dict[str, Any]] = (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})
SGD: tuple[type[Optimizer], dict[str, Any]] = (
    optim.SGD,
    {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Failing(optim.SGD):
    """Raises on rank 1 while it is armed, as a class does whose tensor there does not suit it."""

    armed = False

    def step(self, closure: Any = None) -> Any:
        if Failing.armed and rank() == 1:
            raise ArithmeticError("no step on this rank")
        return super().step(closure)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def from_rank(source: int, value: Any) -> Any:
    """Return the value of one rank, on every rank."""
    given = [value]
    if world_size() > 1:
        dist.broadcast_object_list(given, source)
    return given[0]


def consolidated(opt: Any, to: int = 0) -> Any:
    """Return the whole state dict, on every rank."""
    if not hasattr(opt, "consolidate_state_dict"):
        return copy.deepcopy(opt.state_dict())
    opt.consolidate_state_dict(to=to)
    return from_rank(to, copy.deepcopy(opt.state_dict()) if rank() == to else None)


def noise(step: int, *shape: int, of: int | None = None) -> Tensor:
    """Numbers of this rank, or of rank `of`, for this step."""
    seed = 1000 * step + (rank() if of is None else of)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class MLP(nn.Module):
    """About four buckets at two ranks if they are as small as can be."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        sizes = [16, *[width] * depth, 4]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class TwoLayers(nn.Module):
    """Two linear layers, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.up = nn.Linear(24, 50)
            self.down = nn.Linear(50, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def train_alike(net: nn.Module, opt: Any, steps: range) -> list[Tensor]:
    """Train `TwoLayers`. Every rank has the same data; the mean over two of them is exact."""
    for step in steps:
        net(noise(step, 8, 24, of=0)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return copies(net.parameters())


class Branching(nn.Module):
    """Takes the branches it is told to; `never` is taken by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 96)
        self.branches = nn.ModuleList(nn.Linear(96, 96) for _ in range(3))
        self.never = nn.Linear(96, 96)
        self.head = nn.Linear(96, 4)

    def forward(self, x: Tensor, taken: Sequence[int] = (0,)) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.head(h + sum(self.branches[number](h) for number in taken))


class ConvNet(nn.Module):
    """A residual block with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(24)
        self.one = nn.Conv2d(24, 24, 3, padding=1, bias=False)
        self.norm_one = nn.BatchNorm2d(24)
        self.two = nn.Conv2d(24, 24, 3, padding=1)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.two(F.relu(self.norm_one(self.one(x))))
        return self.head(x.mean(dim=(2, 3)))


class MixedDtypes(nn.Module):
    """Layers in float32 and in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96)
        self.low = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96)).bfloat16()
        self.last = nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.low(self.first(x).bfloat16()).float())


@dataclass(frozen=True)
class Problem:
    """A model and the loss of one batch of it."""

    make: Callable[[], nn.Module]
    loss: Callable[[Callable[..., Any], int], Tensor]
    find_unused: bool = False

    def fresh(self) -> nn.Module:
        """A new model. Ranks start differently: rank 0's start has to become everybody's."""
        torch.manual_seed(7 + rank())
        return self.make()


def _square(model: Callable[..., Any], step: int) -> Tensor:
    return model(noise(step, 6, 16)).square().mean()


def _tokens(model: Callable[..., Any], step: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + rank())
    tokens = torch.randint(61, (3, 13), generator=random)
    return model(tokens[:, :-1], tokens[:, 1:])[1]


def _images(model: Callable[..., Any], step: int) -> Tensor:
    labels = torch.arange(4) % 5
    return F.cross_entropy(model(noise(step, 4, 3, 6, 6)), labels)


def _branches(model: Callable[..., Any], step: int) -> Tensor:
    """Branch 2 is taken on rank 1 only; one of the others by all, another one at each step."""
    taken = [step % 2] + ([2] if rank() == 1 else [])
    return model(noise(step, 6, 16), taken).square().mean()


def make_gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=61, block_size=16, n_layer=3, n_head=2, n_embd=64))


MLP_PROBLEM = Problem(MLP, _square)
PROBLEMS = {
    "gpt": Problem(make_gpt, _tokens),
    "conv": Problem(ConvNet, _images),
    "branching": Problem(Branching, _branches, find_unused=True),
    "mlp": MLP_PROBLEM,
    "mixed dtypes": Problem(MixedDtypes, _square),
}


def channels_last() -> nn.Module:
    return ConvNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@dataclass
class Setup:
    """What trains a model.

    Attributes:
        model: what is called.
        module: the module itself.
        opt: the optimizer.
        no_sync: backward passes within it only add up.
        clip: clips by norm.
    """

    model: Callable[..., Any]
    module: nn.Module
    opt: Any
    no_sync: Callable[[], AbstractContextManager[None]]
    clip: Callable[..., Tensor]

    @property
    def params(self) -> list[Tensor]:
        return copies(self.module.parameters())

    def backward(self, step: int, problem: Problem = MLP_PROBLEM) -> Tensor:
        loss = problem.loss(self.model, step)
        loss.backward()
        return loss.detach()

    def finish(self) -> None:
        self.opt.step()
        self.opt.zero_grad()


Kind = tuple[type[Optimizer], dict[str, Any]]


SEVERAL_BUCKETS = {"bucket_cap_mb": 0.05}
"""So that DDP has several, and divides the parameters again after the first iteration."""


def in_ddp(
    module: nn.Module,
    comm_hook: Any = None,
    state: Callable[[], Any] = lambda: None,
    **options: Any,
) -> DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unused parameters that are not there
        model = DistributedDataParallel(module, **{**SEVERAL_BUCKETS, **options})
    if comm_hook is not None:
        model.register_comm_hook(state(), comm_hook)
    return model


def groups_of(module: nn.Module) -> list[Any]:
    return list(module.parameters())


Groups = Callable[[nn.Module], list[Any]]


def with_plain(module: nn.Module, kind: Kind = ADAMW, groups: Groups = groups_of) -> Setup:
    """Nothing but the optimizer, or several in one if groups name their classes."""
    clip = lambda *a, **k: nn.utils.clip_grad_norm_(module.parameters(), *a, **k)  # noqa: E731
    made = groups(module)
    several = any(isinstance(group, dict) and "optimizer_class" in group for group in made)
    opt = MultiClass(made, kind[0], **kind[1]) if several else kind[0](made, **kind[1])
    return Setup(module, module, opt, nullcontext, clip)


def with_ddp(
    module: nn.Module, kind: Kind = ADAMW, groups: Groups = groups_of, **ddp: Any
) -> Setup:
    """DDP and the optimizer."""
    model = in_ddp(module, **ddp)  # which gives all ranks the values of rank 0
    setup = with_plain(module, kind, groups)
    setup.model, setup.no_sync = model, model.no_sync
    return setup


def with_zero(module: nn.Module, kind: Kind = ADAMW, **options: Any) -> Setup:
    """ZeRO-2, with the smallest buckets and DDP's own precision unless it is told otherwise."""
    options.setdefault("bucket_bytes", 1)
    options.setdefault("precision", MixedPrecision(master_dtype=None))
    opt: Any = ZeroRedundancyOptimizer(
        module.parameters(), kind[0], module=module, **options, **kind[1]
    )
    return Setup(module, module, opt, opt.no_sync, opt.clip_grad_norm_)


def train(setup: Setup, problem: Problem, steps: range) -> list[Tensor]:
    """The plain loop; returns the losses."""
    losses = []
    for step in steps:
        losses.append(setup.backward(step, problem))
        setup.finish()
    return losses
