"""Scenarios: what a training loop may do with gradients and steps."""

from __future__ import annotations

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
from scenarios import APART, MODULE, New, result, scenario
from torch import Tensor, nn

FOREACH: Kind = (SGD[0], {**SGD[1], "foreach": True})
BRANCHING = PROBLEMS["branching"]

# ------------------------------------------------------------------------------- plain training


@scenario(many=True, kinds=[SGD, ADAMW])
def every_model(new: New) -> list[Tensor]:
    seen = []
    for name in ("gpt", "conv", "branching", "mlp"):
        problem = PROBLEMS[name]
        setup = new(problem, find_unused_parameters=problem.find_unused)
        seen += [*train(setup, problem, range(5)), *result(setup, problem)]
    return seen


@scenario(PROBLEMS["mixed dtypes"], ranks=(0, 1, 2))
def mixed_dtypes(setup: Setup) -> list[Tensor]:
    return train(setup, PROBLEMS["mixed dtypes"], range(8))


@scenario(Problem(channels_last, PROBLEMS["conv"].loss))
def channels_last_weights(setup: Setup) -> list[Tensor]:
    losses = train(setup, PROBLEMS["conv"], range(8))
    weight = setup.module.get_parameter("one.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    return losses


@scenario(static_graph=True)
def static_graph(setup: Setup) -> list[Tensor]:
    return train(setup, MLP_PROBLEM, range(5))


# -------------------------------------------------------------------------- adding gradients up


@scenario()
def accumulate_with_no_sync(setup: Setup) -> list[Tensor]:
    losses = []
    for step in range(0, 9, 3):
        with setup.no_sync():
            losses += [setup.backward(step), setup.backward(step + 1)]
        losses.append(setup.backward(step + 2))
        setup.finish()
    return losses


@scenario()
def accumulate_and_clear_through_the_module(setup: Setup) -> None:
    for step in range(0, 9, 3):
        with setup.no_sync():
            setup.backward(step)
        setup.backward(step + 1)
        setup.opt.step()
        setup.module.zero_grad()


@scenario(modes=APART, close=MODULE, kinds=[SGD])
def accumulate_without_no_sync(setup: Setup) -> None:
    """DDP adds the next gradient to the mean of the last and takes the mean of both. `module=`
    takes the mean of each and adds."""
    for step in range(0, 9, 3):
        for each in range(3):
            setup.backward(step + each)
        setup.finish()


@scenario(modes=APART, close=MODULE, kinds=[SGD])
def hold_back_after_what_was_sent(setup: Setup) -> None:
    for step in range(0, 9, 3):
        setup.backward(step)
        with setup.no_sync():
            setup.backward(step + 1)
        setup.backward(step + 2)
        setup.finish()


@scenario(modes=APART, close=MODULE, kinds=[SGD])
def accumulate_after_giving_up(setup: Setup) -> None:
    """Gradients that were held back and cleared must not come back with a later pass."""
    for step in range(0, 12, 4):
        setup.backward(step)
        with setup.no_sync():
            setup.backward(step + 1)
        setup.module.zero_grad()
        setup.backward(step + 2)
        setup.backward(step + 3)
        setup.finish()


@scenario(modes=APART)
def give_up_what_was_held_back(setup: Setup) -> None:
    for step in range(0, 12, 4):
        with setup.no_sync():
            setup.backward(step)
        setup.opt.zero_grad()
        setup.backward(step + 1)
        with setup.no_sync():
            setup.backward(step + 2)
        setup.module.zero_grad()
        setup.backward(step + 3)
        setup.finish()


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


def _same_everywhere(setup: Setup, step: int) -> None:
    """A pass with the same batch on all ranks: under DDP each rank steps on its own gradients."""
    setup.model(noise(step, 6, 16, of=0)).square().mean().backward()


@scenario(modes=APART)
def step_on_what_was_held_back(setup: Setup) -> None:
    for step in range(6):
        with setup.no_sync():
            _same_everywhere(setup, step)
        if step == 2:
            setup.clip(1e9)
            with setup.no_sync():
                _same_everywhere(setup, 9)
        setup.opt.step()
        if step < 4:
            setup.opt.zero_grad(set_to_none=False)


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


@scenario()
def clear_first(setup: Setup) -> None:
    for step in range(4):
        setup.opt.zero_grad()
        setup.backward(step)
        setup.opt.step()


@scenario(gradient_as_bucket_view=True)
def clear_between_forward_and_backward(setup: Setup) -> None:
    for step in range(4):
        loss = MLP_PROBLEM.loss(setup.model, step)
        setup.opt.zero_grad()
        loss.backward()
        setup.opt.step()


@scenario()
def clear_through_the_module(setup: Setup) -> None:
    for step in range(5):
        setup.module.zero_grad()
        setup.backward(step)
        setup.opt.step()


@scenario(kinds=[SGD, ADAMW, FOREACH])
def zero_in_place(setup: Setup) -> None:
    for step in range(5):
        setup.backward(step)
        setup.opt.step()
        setup.opt.zero_grad(set_to_none=False)


@scenario(kinds=[SGD, ADAMW, FOREACH])
def zero_in_place_through_the_module(setup: Setup) -> None:
    for step in range(5):
        setup.backward(step)
        setup.opt.step()
        setup.module.zero_grad(set_to_none=False)


@scenario(modes=APART, kinds=[SGD, ADAMW, FOREACH])
def step_on_zeros(setup: Setup) -> None:
    """Momentum and weight decay go on."""
    zero_in_place(setup)
    setup.opt.step()


@scenario(modes=APART, kinds=[SGD, ADAMW, FOREACH])
def hold_back_and_zero_in_place(setup: Setup) -> None:
    """Some gradients have been sent and some not when all are cleared."""
    for step in range(0, 9, 3):
        setup.backward(step)
        setup.module.get_submodule("layers.1").zero_grad()
        with setup.no_sync():
            setup.backward(step + 1)
        setup.opt.zero_grad(set_to_none=False)
        setup.backward(step + 2)
        setup.finish()


@scenario(modes=APART, kinds=[SGD, ADAMW, FOREACH])
def zero_what_was_held_back_and_step(setup: Setup) -> None:
    """A gradient of zeros, of which nothing was ever sent, is one: weight decay goes on."""
    for step in range(0, 6, 2):
        with setup.no_sync():
            setup.backward(step)
        (setup.module if step else setup.opt).zero_grad(set_to_none=False)
        setup.finish()
        setup.backward(step + 1)
        setup.finish()


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


@scenario(close=MODULE, kinds=[SGD])
def never_clear(setup: Setup) -> None:
    for step in range(4):
        setup.backward(step)
        setup.opt.step()


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


@scenario(modes=APART)
def skip_steps(setup: Setup) -> None:
    for step in range(6):
        setup.backward(step)
        if step % 2:
            setup.opt.step()
        setup.opt.zero_grad()


@scenario(modes=APART)
def step_again_on_the_same_gradients(setup: Setup) -> None:
    for step in range(4):
        setup.backward(step)
        setup.opt.step()
        setup.opt.step()
        setup.finish()


@scenario(modes=APART)
def step_without_gradients(setup: Setup) -> None:
    for step in range(4):
        setup.finish()
        setup.backward(step)
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
    """They run once for each step, and the second sees its result."""
    seen = []
    setup.opt.register_step_pre_hook(lambda *_: seen.append(torch.ones(())))
    setup.opt.register_step_post_hook(lambda *_: seen.append(torch.zeros(())))
    train(setup, MLP_PROBLEM, range(3))
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
