"""Scenarios: parameters that do not train, or not always, and that come later."""

from __future__ import annotations

from typing import Any

import torch
from graphs import ALL_OF_THEM
from models import MLP, MLP_PROBLEM, PROBLEMS, SGD, Problem, Setup, rank, train
from problems import copies
from scenarios import APART, New, renew, scenario, trained
from torch import Tensor, nn


class PartlyFrozen(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[3].bias.requires_grad_(False)


FROZEN = Problem(PartlyFrozen, MLP_PROBLEM.loss)


@scenario(many=True)
def frozen_from_the_start(new: New) -> list[Tensor]:
    return trained(new, FROZEN) + trained(new, FROZEN, static_graph=True)


def _that_train(module: nn.Module) -> list[Any]:
    return [param for param in module.parameters() if param.requires_grad]


@scenario(FROZEN, groups=_that_train)
def frozen_and_not_given_to_the_optimizer(setup: Setup) -> list[Tensor]:
    return train(setup, FROZEN, range(3))


@scenario(ALL_OF_THEM)
def freeze_and_unfreeze(setup: Setup) -> list[Tensor]:
    losses = []
    for step in range(6):
        if step in (2, 4):
            setup.module.get_submodule("branches.0").requires_grad_(step == 4)
        losses.append(setup.backward(step, ALL_OF_THEM))
        setup.finish()
    return losses


CHANGES: dict[int, tuple[list[str], bool]] = {
    2: (["layers.1", "layers.3"], False),
    4: (["layers.3"], True),
    5: (["layers.0"], False),
    7: (["layers.0", "layers.1"], True),
}


def _change(setup: Setup, step: int) -> None:
    for name in CHANGES.get(step, ([], False))[0]:
        setup.module.get_submodule(name).requires_grad_(CHANGES[step][1])


@scenario(modes=APART, many=True)
def freeze_before_forward_or_before_clearing(new: New) -> list[Tensor]:
    seen = []
    for early in (False, True):
        setup = new()
        for step in range(9):
            if not early:
                _change(setup, step)
            renew(setup)
            seen.append(setup.backward(step))
            setup.opt.step()
            if early:
                _change(setup, step + 1)
            (setup.opt if step % 2 else setup.module).zero_grad()
        seen += setup.params
    return seen


@scenario(modes=APART)
def freeze_everything_for_some_steps(setup: Setup) -> list[Tensor]:
    losses = train(setup, MLP_PROBLEM, range(2))
    setup.module.requires_grad_(False)
    for _ in range(3):
        setup.finish()
    setup.module.requires_grad_(True)
    renew(setup)
    return losses + train(setup, MLP_PROBLEM, range(2, 4))


@scenario(modes=APART, many=True)
def freeze_between_backward_and_step(new: New) -> list[Tensor]:
    """The gradients that are there are used, and none is lost."""
    seen = []
    for change in ("unfreeze", "freeze", "freeze and clear"):
        setup = new()
        first, second = (setup.module.get_submodule(f"layers.{each}") for each in (1, 2))
        first.requires_grad_(False)
        renew(setup)
        for step in range(4):
            setup.backward(step)
            if step == 1 and change == "unfreeze":
                first.requires_grad_(True)
            elif step == 1:
                second.requires_grad_(False)
                if change == "freeze and clear":
                    second.zero_grad()
            setup.finish()
            renew(setup)
        seen += setup.params
    return seen


@scenario(modes=APART, many=True)
def unfreeze_without_a_forward_pass_of_the_root(new: New) -> list[Tensor]:
    """After clearing, a parameter trains again; then the model evaluates, or a method is called."""
    seen = []
    for how in ("evaluates", "method", "method and clip", "method and accumulate"):
        setup = new()
        layers = [setup.module.get_submodule(f"layers.{each}") for each in (1, 2)]
        layers[0].requires_grad_(False)
        setup.module.train(how != "evaluates")
        renew(setup)
        for step in range(4):
            if step == 2:
                layers[0].requires_grad_(True)
                layers[1].requires_grad_(False)
                renew(setup)
            method = how != "evaluates" and setup.model is setup.module
            model = setup.module.forward if method else setup.model
            if how == "method and accumulate":
                with setup.no_sync():
                    MLP_PROBLEM.loss(model, step + 5).backward()
            MLP_PROBLEM.loss(model, step).backward()
            if how == "method and clip":
                setup.clip(1e9)
            setup.finish()
        seen += setup.params
    return seen


@scenario(PROBLEMS["conv"], modes=APART)
def a_part_trains_and_the_root_evaluates(setup: Setup) -> list[Tensor]:
    """Buffers follow rank 0's before each forward pass."""
    setup.module.eval()
    setup.module.get_submodule("norm_one").train()
    seen = []
    for step in range(4):
        with torch.no_grad():
            PROBLEMS["conv"].loss(setup.module, step + 9)
        PROBLEMS["conv"].loss(setup.model, step + 5)
        setup.backward(step, PROBLEMS["conv"])
        seen += copies(setup.module.buffers())
        setup.finish()
    return seen


@scenario(PROBLEMS["branching"], modes=APART, kinds=[SGD])
def freeze_and_hold_back(setup: Setup) -> list[Tensor]:
    """Whether before `no_sync` or within it, a change is noticed in the next forward pass."""
    problem, part = PROBLEMS["branching"], setup.module.get_submodule("stem")
    losses = train(setup, problem, range(1))
    for step in range(4, 16, 4):
        if step != 8:
            part.requires_grad_(step == 12)
        with setup.no_sync():
            if step == 8:
                part = setup.module.get_submodule("branches.0").requires_grad_(False)
            losses += [setup.backward(step, problem), setup.backward(step + 1, problem)]
        losses.append(setup.backward(step + 2, problem))
        setup.finish()
    return losses


class Growing(MLP):
    """Has another layer once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: nn.Module | None
        self.register_module("extra", None)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self.extra is None else self.extra(x)  # type: ignore[no-any-return]


GROWING = Problem(Growing, MLP_PROBLEM.loss)


@scenario(GROWING, modes=APART)
def add_a_group(setup: Setup) -> list[Tensor]:
    losses = train(setup, GROWING, range(2))
    # Rank 0's values have to become everybody's; DDP sends them when it is made again.
    torch.manual_seed(rank())
    setup.module.extra = extra = nn.Linear(4, 4)
    renew(setup)
    setup.opt.add_param_group({"params": list(extra.parameters()), "lr": 0.002})
    return losses + train(setup, GROWING, range(2, 5))
