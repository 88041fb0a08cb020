"""Scenarios: options, classes, written parameters, uneven inputs, state and several models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mixtures
import torch
from models import (
    ADAMW,
    MLP,
    MLP_PROBLEM,
    PROBLEMS,
    SGD,
    Kind,
    Problem,
    Setup,
    consolidated,
    noise,
    rank,
    train,
    world_size,
)
from problems import OneByOne
from scenarios import ALL, APART, New, renew, scenario, trained
from torch import Tensor, nn, optim
from torch.amp import GradScaler
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

BRANCHING = PROBLEMS["branching"]
FEW = Problem(lambda: MLP(32, 2), MLP_PROBLEM.loss)

# --------------------------------------------------------------------------- groups and options


def several_groups(module: nn.Module) -> list[Any]:
    params = list(module.parameters())
    return [
        {"params": params[::3], "lr": 0.02},
        {"params": params[1::3], "weight_decay": 0.3},
        {"params": params[2::3], "lr": 0.003},
    ]


Scheduler = Callable[[Any], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(
        opt, [lambda n: 1 + n, lambda n: 0.5**n, lambda n: 1.0]
    ),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.95),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 3, 0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 5], 0.5),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, 0.5, 3),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.2, 1.0, 5),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.8),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(opt, 6)], [3]
    ),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 4, 0.001),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, 3), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.001, 0.1, 3, cycle_momentum=True),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2, 2),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=12),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 6, 2.0),
    "SWALR": lambda opt: SWALR(opt, swa_lr=0.01, anneal_epochs=4),
}
TENSOR_LR: Kind = (optim.Adam, {"lr": torch.tensor(0.01)})


@scenario(FEW, many=True, kinds=[SGD, ADAMW, TENSOR_LR], groups=several_groups, slow=True)
def every_scheduler(new: New) -> list[Tensor]:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= SCHEDULERS.keys()
    seen = []
    for name, make in SCHEDULERS.items():
        setup = new()
        scheduler = make(setup.opt)
        for step in range(8):
            setup.backward(step)
            setup.opt.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            setup.opt.zero_grad()
            seen += [torch.tensor(float(group["lr"])) for group in setup.opt.param_groups]
            seen += [torch.tensor(group.get("momentum", 0)) for group in setup.opt.param_groups]
        seen += setup.params
    return seen


@scenario(kinds=[(optim.SGD, {"lr": torch.tensor(0.1)})], groups=several_groups)
def write_options_by_hand(setup: Setup) -> None:
    for step in range(6):
        setup.opt.param_groups[0]["weight_decay"] = 0.1 * step
        if step == 2:
            setup.opt.param_groups[1]["lr"] = torch.tensor(0.3)
        if step == 4:
            setup.opt.param_groups[1]["lr"].mul_(0.5)
        setup.backward(step)
        setup.finish()


class TrustRatio(OneByOne):
    """A class from elsewhere: needs whole tensors, and assigns to `data`."""

    def update(self, p: Any, state: Any, lr: float) -> None:
        mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
        p.data = p.data - lr * p.norm().clamp(0.1, 10) / mean.norm().clamp_min(1e-3) * mean


class Matrices(nn.Module):
    """Muon takes nothing but matrices."""

    def __init__(self) -> None:
        super().__init__()
        sizes = itertools.pairwise([16, 96, 96, 48, 4])
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


MATRICES = Problem(Matrices, MLP_PROBLEM.loss)
CLASSES: list[Kind] = [
    (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    (optim.AdamW, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    (optim.AdamW, {"lr": 0.01, "fused": True}),
    (optim.Adam, {"lr": torch.tensor(0.01), "fused": True}),
]
WHOLE: list[Kind] = [
    (optim.Adafactor, {"lr": 0.01}),
    (TrustRatio, {"lr": 0.01}),
    (optim.Muon, {"lr": 0.01}),
]


@scenario(many=True, kinds=[SGD], slow=True)
def every_kind_of_optimizer(new: New) -> list[Tensor]:
    return [tensor for kind in CLASSES for tensor in trained(new, MLP_PROBLEM, 3, kind=kind)]


class ClearsToNone(optim.SGD):
    """Clears its gradients at the end of a step, so that the loop need not."""

    to_none = True

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.zero_grad(self.to_none)
        return result


class ClearsToZero(ClearsToNone):
    to_none = False


@scenario(many=True, slow=True)
def a_class_that_clears_its_gradients(new: New) -> list[Tensor]:
    seen = []
    for kind in (ClearsToNone, ClearsToZero):
        setup = new(kind=(kind, {"lr": 0.05, "momentum": 0.9}))
        for step in range(4):
            seen.append(setup.backward(step))
            setup.opt.step()
        seen += setup.params
    return seen


@scenario(MATRICES, many=True, kinds=[SGD], layout="auto", slow=True)
def every_kind_of_optimizer_that_needs_whole_tensors(new: New) -> list[Tensor]:
    return [tensor for kind in WHOLE for tensor in trained(new, MATRICES, kind=kind)]


MIXED: Kind = (optim.AdamW, mixtures.ADAMW)


@scenario(
    PROBLEMS["gpt"],
    kinds=[MIXED],
    groups=lambda module: mixtures.mixed(module, **mixtures.MUON),
    layout="auto",
    ranks=(0, 1, 2),  # Muon makes much of what rounding there is
)
def muon_and_adamw_in_one(setup: Setup) -> list[Tensor]:
    return train(setup, PROBLEMS["gpt"], range(4))


# ------------------------------------------------------------------- parameters that are written


@scenario()
def write_parameters(setup: Setup) -> None:
    """In place, without a look at what was there, and by loading a state dict."""
    saved: dict[str, Tensor] = {}
    for step in range(6):
        setup.backward(step)
        setup.finish()
        with torch.no_grad():
            for number, param in enumerate(setup.module.parameters()):
                if number % 3 == 0:
                    param.clamp_(-0.05, 0.05)
                elif number % 3 == 1:
                    param.data.mul_(0.9)
                else:
                    param.copy_(param * 1.1)
            setup.module.get_parameter("layers.0.bias").data.zero_()
            nn.init.ones_(setup.module.get_parameter("layers.1.bias"))
            setup.module.get_parameter("layers.2.bias").copy_(torch.full((128,), 0.5))
            setup.module.get_parameter("layers.3.bias")[3] = 7.0
        if step == 1:
            saved = {name: value.clone() for name, value in setup.module.state_dict().items()}
        if step == 3:
            setup.module.load_state_dict(saved)


@scenario()
def give_parameters_other_memory(setup: Setup) -> None:
    """With the same values and with others; at one step on one rank alone; for a forward pass."""
    for step in range(6):
        first, *_, last = params = list(setup.module.parameters())
        if step in (2 + rank() % 2, 5):
            first.data = first.data.clone()
        if step == 4:
            last.data = last.data * 0.5
            params[2].data, params[4].data = params[4].data, params[2].data
        if step == 3:
            kept = [param.data for param in params]
            for param in params:
                param.data = param.data * 0.5
            setup.model(noise(step, 6, 16))
            for param, data in zip(params, kept, strict=True):
                param.data = data
        setup.backward(step)
        setup.finish()


@scenario()
def average_the_weights(setup: Setup) -> list[Tensor]:
    """By a list of the parameters that is kept, and by torch's class."""
    kept = list(setup.module.parameters())
    shadow = [param.detach().clone() for param in kept]
    average = AveragedModel(setup.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(4):
        setup.backward(step)
        setup.finish()
        with torch.no_grad():
            for mean, param in zip(shadow, kept, strict=True):
                mean.lerp_(param, 0.1)
        average.update_parameters(setup.module)
    return shadow + list(average.module.parameters())


@scenario()
def read_parameters_in_the_loss(setup: Setup) -> None:
    for step in range(4):
        before = sum(param.abs().sum() for param in setup.module.parameters())
        loss = MLP_PROBLEM.loss(setup.model, step)
        after = sum(param.square().sum() for param in setup.module.parameters())
        (loss + 1e-3 * before + 1e-3 * after).backward()
        setup.finish()


SGD_ALONE: Kind = (optim.SGD, {"lr": 0.05})
ANY_DTYPE = Problem(
    MLP,
    lambda model, step: (
        model(noise(step, 6, 16).to(next(iter(model.parameters())).dtype)).square().mean()  # type: ignore[attr-defined]
    ),
)


@scenario(ANY_DTYPE, modes=APART, kinds=[SGD_ALONE])
def convert_the_model(setup: Setup) -> list[Tensor]:
    """Without momentum, which would stop the plain optimizer too."""
    losses = train(setup, ANY_DTYPE, range(2))
    setup.module.double()
    renew(setup)
    losses += train(setup, ANY_DTYPE, range(2, 4))
    setup.module.float()
    renew(setup)
    return losses + train(setup, ANY_DTYPE, range(4, 6))


# --------------------------------------------------------------------------- saving and loading


@scenario(many=True, groups=several_groups)
def load_a_state_dict_into_another_optimizer(new: New) -> list[Tensor]:
    """Saved right after backward and step, while gradients are there."""
    first, second = new(), new()
    for step in range(3):
        first.opt.zero_grad()
        first.backward(step)
        first.opt.step()
    second.opt.load_state_dict(consolidated(first.opt, world_size() - 1))
    second.module.load_state_dict(first.module.state_dict())
    first.opt.zero_grad()
    losses = train(second, MLP_PROBLEM, range(3, 6)) + train(first, MLP_PROBLEM, range(3, 6))
    return [*losses, *second.params, *first.params]


# --------------------------------------------------------------------------- clipping and scaling


@scenario(close=ALL, kinds=[SGD])
def clip(setup: Setup) -> list[Tensor]:
    """At some steps it has an effect, at others none."""
    norms = []
    for step in range(4):
        setup.backward(step)
        norms.append(setup.clip((0.01, 1e6)[step % 2]).clone())
        setup.finish()
    return norms


def _scaled(new: New, order: str, problem: Problem) -> list[Tensor]:
    """Scale, perhaps unscale and clip, step, update; at some steps one rank has an infinity."""
    setup, seen = new(problem, find_unused_parameters=problem.find_unused), []
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(8):
        loss = problem.loss(setup.model, step)
        if step in (2, 5) and rank() == step % min(2, world_size()):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if order != "step":
            scaler.unscale_(setup.opt)
        if order == "unscale, clip, step":
            seen.append(setup.clip(0.05).detach().clone())
        scaler.step(setup.opt)
        scaler.update()
        if order == "step" and step == 3:
            setup.module.zero_grad()
        setup.opt.zero_grad()
        seen += [torch.tensor(scaler.get_scale()), *setup.params]
    return seen


FUSED: Kind = (optim.AdamW, {"lr": 0.01, "fused": True})


@scenario(many=True, kinds=[SGD, ADAMW, FUSED])
def grad_scaler(new: New) -> list[Tensor]:
    """DDP's decisions and numbers, whichever rank overflows."""
    runs = itertools.product(("step", "unscale, step"), (MLP_PROBLEM, BRANCHING))
    return [tensor for order, problem in runs for tensor in _scaled(new, order, problem)]


@scenario(many=True, close=APART, modes=APART, kinds=[SGD])
def grad_scaler_and_clip(new: New) -> list[Tensor]:
    problems = (MLP_PROBLEM, BRANCHING)
    return [tensor for each in problems for tensor in _scaled(new, "unscale, clip, step", each)]


@scenario(modes=APART)
def grad_scaler_with_no_sync(setup: Setup) -> list[Tensor]:
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=1)
    for step in range(0, 9, 3):
        with setup.no_sync():
            for each in range(2):
                scaler.scale(MLP_PROBLEM.loss(setup.model, step + each)).backward()
        scaler.scale(MLP_PROBLEM.loss(setup.model, step + 2)).backward()
        scaler.unscale_(setup.opt)
        scaler.step(setup.opt)
        scaler.update()
        setup.opt.zero_grad()
    return [torch.tensor(scaler.get_scale())]
