"""Scenarios: what a training loop may do with gradients and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import (
    ADAMW,
    MLP_PROBLEM,
    PROBLEMS,
    SGD,
    Kind,
    Problem,
    Setup,
    channels_last,
    noise,
    rank,
    train,
)
from scenarios import APART, MODULE, New, scenario, trained
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardstep.params.module import remove_hooks

FOREACH: Kind = (SGD[0], {**SGD[1], "foreach": True})
BRANCHING = PROBLEMS["branching"]

# ------------------------------------------------------------------------------- plain training


@scenario(many=True, kinds=[SGD, ADAMW])
def every_model(new: New) -> list[Tensor]:
    names = ("gpt", "conv", "branching", "mlp")
    return [tensor for name in names for tensor in trained(new, PROBLEMS[name])]


@scenario(PROBLEMS["mixed dtypes"], ranks=(0, 1, 2))
def mixed_dtypes(setup: Setup) -> list[Tensor]:
    return train(setup, PROBLEMS["mixed dtypes"], range(5))


@scenario(Problem(channels_last, PROBLEMS["conv"].loss))
def channels_last_weights(setup: Setup) -> list[Tensor]:
    losses = train(setup, PROBLEMS["conv"], range(5))
    weight = setup.module.get_parameter("one.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    return losses


# ------------------------------------------------------------------------------ sequences of acts


def _same_everywhere(setup: Setup, step: int) -> None:
    """A pass with the same batch on all ranks: under DDP each rank steps on its own gradients."""
    setup.model(noise(step, 6, 16, of=0)).square().mean().backward()


def _held_back(setup: Setup, act: Callable[[Setup, int], Any], step: int) -> None:
    with setup.no_sync():
        act(setup, step)


ACTS: dict[str, Callable[[Setup, int], Any]] = {
    "backward": Setup.backward,
    "hold": lambda setup, step: _held_back(setup, Setup.backward, step),
    "hold same": lambda setup, step: _held_back(setup, _same_everywhere, step),
    "step": lambda setup, _: setup.opt.step(),
    "clip": lambda setup, _: [setup.clip(1e9)],  # its last bit may differ: not compared
    "clear": lambda setup, _: setup.opt.zero_grad(),
    "clear module": lambda setup, _: setup.module.zero_grad(),
    "clear a layer": lambda setup, _: setup.module.get_submodule("layers.1").zero_grad(),
    "zero": lambda setup, _: setup.opt.zero_grad(set_to_none=False),
    "zero module": lambda setup, _: setup.module.zero_grad(set_to_none=False),
}


def sequence(name: str, acts: str, rounds: int = 3, **options: Any) -> None:
    """Add a scenario that does these acts so many times."""

    def loop(setup: Setup) -> list[Tensor]:
        done = [ACTS[act](setup, step) for step, act in enumerate(rounds * acts.split(", "))]
        return [value for value in done if isinstance(value, Tensor)]

    loop.__name__ = name
    scenario(**options)(loop)


SUMS = {"modes": APART, "close": MODULE, "kinds": [SGD]}
"""DDP adds the next gradient to the mean of the last and takes the mean of both. `module=` takes
the mean of each and adds."""
ZEROS = {"kinds": [SGD, ADAMW, FOREACH]}

sequence(
    "accumulate_with_no_sync",
    "hold, hold, backward, step, clear, hold, backward, step, clear module",
)
# Gradients that were held back and cleared must not come back with a later pass.
sequence(
    "accumulate_without_no_sync",
    "backward, backward, backward, step, clear, backward, hold, backward, step, clear,"
    " backward, hold, clear module, backward, backward, step, clear",
    2,
    **SUMS,
)
sequence(
    "give_up_what_was_held_back",
    "hold, clear, backward, hold, clear module, backward, step, clear",
    modes=APART,
)
sequence(
    "step_on_what_was_held_back",
    "hold same, step, zero, hold same, step, zero, hold same, clip, hold same, step,"
    " zero, hold same, step, zero, hold same, step, hold same, step",
    rounds=1,
    modes=APART,
)
sequence("clear_first", "clear, backward, step, clear module, backward, step", 2)
sequence("zero_in_place", "backward, step, zero", 4, **ZEROS)
sequence("zero_in_place_through_the_module", "backward, step, zero module", 4, **ZEROS)
# Momentum and weight decay go on. Some gradients have been sent and some not when all are cleared.
sequence(
    "step_on_zeros",
    "backward, step, zero, step, backward, clear a layer, hold, zero, backward, step, clear",
    modes=APART,
    **ZEROS,
)
# A gradient of zeros, of which nothing was ever sent, is one: weight decay goes on.
sequence(
    "zero_what_was_held_back_and_step",
    "hold, zero, step, clear, backward, step, clear, "
    "hold, zero module, step, clear, backward, step, clear",
    2,
    modes=APART,
    **ZEROS,
)
sequence("never_clear", "backward, step", 4, close=MODULE, kinds=[SGD])
sequence(
    "step_again_on_the_same_gradients",
    "backward, step, step, step, clear, step, clear, backward, clear, backward, step, clear",
    2,
    modes=APART,
)

# -------------------------------------------------------------------------- adding gradients up


@scenario(modes=APART)
def retain_a_graph(setup: Setup) -> None:
    for step in range(4):
        loss = MLP_PROBLEM.loss(setup.model, step)
        with setup.no_sync():
            loss.backward(retain_graph=True)
        setup.opt.zero_grad()
        setup.backward(step)
        setup.finish()


@scenario()
def ask_for_some_gradients(setup: Setup) -> None:
    last = setup.module.get_submodule("layers.4")
    for step in range(4):
        with setup.no_sync():
            loss = MLP_PROBLEM.loss(setup.model, step)
            loss.backward(inputs=list(last.parameters()))
        setup.opt.zero_grad()
        setup.backward(step)
        setup.finish()


@scenario(modes=APART)
def clip_and_step_while_holding_back(setup: Setup) -> None:
    for step in range(0, 9, 3):
        with setup.no_sync():
            _same_everywhere(setup, step)
            setup.clip(1e9)
            _same_everywhere(setup, step + 1)
            setup.opt.step()
            _same_everywhere(setup, step + 2)
        setup.finish()


# ---------------------------------------------------------------------------- clearing gradients


@scenario(gradient_as_bucket_view=True)
def clear_between_forward_and_backward(setup: Setup) -> None:
    for step in range(4):
        loss = MLP_PROBLEM.loss(setup.model, step)
        setup.opt.zero_grad()
        loss.backward()
        setup.opt.step()


@scenario(BRANCHING, modes=APART, kinds=[SGD])
def zero_what_was_held_back_for_the_first_time(setup: Setup) -> None:
    """Branch 0 has no gradient in the pass that is sent, and one of zeros then."""
    for step in range(0, 6, 2):
        setup.model(noise(step, 6, 16), [1]).square().mean().backward()
        with setup.no_sync():
            setup.model(noise(step + 1, 6, 16), [0]).square().mean().backward()
        setup.opt.zero_grad(set_to_none=False)
        setup.finish()
        setup.model(noise(step, 6, 16), [0]).square().mean().backward()
        setup.finish()


@scenario(modes=APART)
def clear_some_by_hand(setup: Setup) -> None:
    """Parameters that are cleared between backward and step stay as they are."""
    layers = setup.module.get_submodule("layers")
    for step in range(6):
        setup.backward(step)
        if step % 3 == 1:
            setup.clip(1e9)
        if step % 2:
            for param in (*layers[1].parameters(), *layers[4].parameters()):
                param.grad = None
        setup.finish()


@scenario(BRANCHING, modes=APART, close=MODULE, kinds=[SGD])
def clear_branches_that_are_not_taken_again(setup: Setup) -> None:
    """They have no gradient, whichever rank took them before: one of zeros would be seen."""
    branches = setup.module.get_submodule("branches")
    for step in range(0, 8, 2):
        setup.model(noise(step, 6, 16), [0, 1, 2]).square().mean().backward()
        setup.opt.step()
        branches[1].zero_grad()
        branches[2].zero_grad()
        taken = [0, 2] if rank() == 1 else [0]
        setup.model(noise(step + 1, 6, 16), taken).square().mean().backward()
        setup.finish()


@scenario(modes=APART)
def replace_by_hand(setup: Setup) -> None:
    """A gradient that the user assigns counts, the same on all ranks here."""
    weight = setup.module.get_parameter("layers.1.weight")
    for step in range(4):
        setup.backward(step)
        if step == 2:
            setup.clip(1e9)
        weight.grad = noise(step, *weight.shape, of=0)
        setup.finish()


# ---------------------------------------------------------------------------------------- steps


def _clamp(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.clamp_(-1e-3, 1e-3)


@scenario()
def change_gradients_in_hooks(setup: Setup) -> list[Tensor]:
    """Hooks come after the optimizer, and change the gradient of each rank before the mean."""
    for number, param in enumerate(setup.module.parameters()):
        if number % 3:
            param.register_post_accumulate_grad_hook(_clamp)
        else:
            param.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return train(setup, MLP_PROBLEM, range(4))


@scenario(modes=APART, ranks=(1, 2, 3))
def change_what_was_held_back_in_a_hook(setup: Setup) -> None:
    setup.module.get_parameter("layers.1.weight").register_post_accumulate_grad_hook(_clamp)
    with setup.no_sync():
        setup.backward(0)
    setup.backward(1)
    setup.finish()


@scenario()
def closure(setup: Setup) -> list[Tensor]:
    losses = []
    for step in range(4):

        def evaluate(step: int = step) -> Tensor:
            setup.opt.zero_grad()
            loss = MLP_PROBLEM.loss(setup.model, step)
            loss.backward()
            return loss

        how = {"closure": evaluate} if step % 2 else {}
        losses.append(setup.opt.step(*([] if how else [evaluate]), **how).detach())
    return losses


@scenario()
def edit_options_by_hand(setup: Setup) -> list[Tensor]:
    """The list rebound, a group and a list of parameters replaced, options added and deleted."""
    found = []
    for step in range(6):
        groups = setup.opt.param_groups
        if step == 1:
            groups[0]["initial_lr"] = 9.0
        elif step == 2:
            setup.opt.param_groups = [{**group, "lr": 0.02} for group in groups]
        elif step == 3:
            groups[0] = {**groups[0], "params": list(groups[0]["params"]), "weight_decay": 0.2}
        elif step == 4:
            del groups[0]["initial_lr"]
        setup.backward(step)
        setup.finish()
        found.append(torch.tensor("initial_lr" in setup.opt.param_groups[0]))
    return found


@scenario()
def hooks_around_the_step(setup: Setup) -> list[Tensor]:
    """They run once for each step, also those on the steps of all optimizers."""
    seen = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: seen.append(torch.full((), 2.0))),
        setup.opt.register_step_pre_hook(lambda *_: seen.append(torch.ones(()))),
        setup.opt.register_step_post_hook(lambda *_: seen.append(torch.zeros(()))),
        register_optimizer_step_post_hook(lambda *_: seen.append(torch.full((), 3.0))),
    ]
    train(setup, MLP_PROBLEM, range(3))
    remove_hooks(hooks)
    return seen


@scenario(modes=APART)
def hooks_that_change_gradients(setup: Setup) -> list[Tensor]:
    """Each halves them once. After the step every parameter is there."""
    seen: list[Tensor] = []

    def halve(opt: Any, *_: Any) -> None:
        assert opt is setup.opt
        for param in setup.module.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)

    hooks = [
        register_optimizer_step_pre_hook(halve),
        setup.opt.register_step_pre_hook(halve),
        setup.opt.register_step_post_hook(lambda *_: seen.extend(setup.params)),
    ]
    train(setup, MLP_PROBLEM, range(3))
    remove_hooks(hooks)
    return seen


@scenario()
def evaluate_between_steps(setup: Setup) -> list[Tensor]:
    seen = []
    for step in range(4):
        with torch.no_grad():
            seen.append(MLP_PROBLEM.loss(setup.module, 30 + step))
        setup.module.eval()
        seen.append(MLP_PROBLEM.loss(setup.module, 31 + step))
        setup.module.train()
        seen.append(setup.backward(step))
        setup.opt.step()
        with torch.no_grad():
            seen += [setup.model(noise(50, 3, 16, of=0)), setup.module(noise(51, 3, 16, of=0))]
        setup.opt.zero_grad()
    return seen


def _attention() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)


ATTENTION = Problem(_attention, lambda model, step: model(noise(step, 1, 8, 64)).square().mean())


@scenario(ATTENTION)
def evaluate_with_fused_attention(setup: Setup) -> list[Tensor]:
    """A parameter in flight must not keep torch from the kernels it takes in evaluation."""
    seen = []
    for step in range(3):
        setup.module.train()
        setup.backward(step, ATTENTION)
        setup.finish()
        setup.module.eval()
        with torch.no_grad():
            seen.append(setup.module(noise(99, 1, 8, 64)))
    return seen
