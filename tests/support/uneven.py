"""Scenarios: ranks that have fewer inputs than others, within `Join`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_ways import HOOKS, WAYS
from graphs import BRANCHES, branching
from models import MLP_PROBLEM, PROBLEMS, SGD, Problem, Setup, rank, train, world_size
from scenarios import APART, DROP_IN, MODULE, New, scenario
from torch import Tensor, optim
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import lr_scheduler


def joined(
    setup: Setup,
    inputs: int,
    problem: Problem = MLP_PROBLEM,
    *,
    accumulate: bool = False,
    clear_first: bool = False,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
    clear: Callable[[], object] | None = None,
    **join: Any,
) -> None:
    """Train on so many batches within `Join`."""
    joinables = [each for each in (setup.model, setup.opt) if isinstance(each, Joinable)]
    with Join(joinables, **join):
        for step in range(inputs):
            if clear_first:
                setup.opt.zero_grad()
            if accumulate:
                with setup.no_sync():
                    setup.backward(step + 100, problem)
            setup.backward(step, problem)
            before_step()
            setup.opt.step()
            after_step()
            if not clear_first:
                (clear or setup.opt.zero_grad)()


RANKS = (2, 3)


def uneven(
    name: str,
    how: Callable[[Setup], dict[str, Any]] = lambda setup: {},
    problem: Problem = MLP_PROBLEM,
    **options: Any,
) -> None:
    """Add a scenario in which the first rank has fewest batches, with these options of `joined`."""

    def loop(setup: Setup) -> None:
        joined(setup, 2 + 2 * rank(), problem, **how(setup))

    loop.__name__ = name
    scenario(problem, ranks=RANKS, **options)(loop)


ADAFACTOR = (optim.Adafactor, {"lr": 0.01})
CONV = PROBLEMS["conv"]
LEFT = {"divide_by_initial_world_size": False}
uneven("uneven_inputs")
uneven("uneven_inputs_of_adafactor", kinds=[ADAFACTOR], layout="whole")
uneven(
    # A rank without data runs no scheduler; its shard follows the learning rate of the others.
    "uneven_inputs_and_a_scheduler",
    lambda setup: {"after_step": lr_scheduler.ExponentialLR(setup.opt, gamma=0.5).step},
)
uneven("uneven_inputs_with_no_sync", lambda _: {"accumulate": True}, modes=(*MODULE, *WAYS))
uneven(
    "uneven_inputs_zeroed_in_place",
    lambda setup: {"clear": lambda: setup.opt.zero_grad(set_to_none=False)},
    modes=APART,
)
uneven(
    "uneven_inputs_and_clip",
    lambda setup: {"before_step": lambda: setup.clip(0.05)},
    modes=APART,
    close=APART,
    kinds=[SGD],
)
uneven("uneven_inputs_of_a_model_with_buffers", problem=CONV, modes=(*DROP_IN, *WAYS))
uneven("uneven_inputs_and_a_static_graph", static_graph=True)
uneven(
    "uneven_inputs_divided_by_those_that_are_left",
    lambda _: LEFT,
    modes=(*DROP_IN, "register"),
)
uneven(
    "uneven_inputs_divided_by_a_hook",
    lambda _: LEFT,
    modes=tuple(HOOKS),
    comm_hook=allreduce_hook,
)


@scenario(ranks=RANKS)
def a_rank_without_any_input(setup: Setup) -> None:
    joined(setup, 2 * (world_size() - 1 - rank()), clear_first=True)


PLAIN_SGD = (optim.SGD, {"lr": 0.05})


@scenario(ranks=RANKS, kinds=[PLAIN_SGD], slow=True)
def uneven_inputs_in_every_epoch(setup: Setup) -> None:
    """Momentum would not do: that of DDP's joined ranks is not updated."""
    joined(setup, 2 + 2 * rank())
    joined(setup, 2 + 2 * (world_size() - 1 - rank()), clear=setup.module.zero_grad)
    joined(setup, 2)
    joined(setup, 2, enable=False)
    train(setup, MLP_PROBLEM, range(3, 5))


@scenario(PROBLEMS["conv"], ranks=RANKS, modes=MODULE, many=True)
def uneven_inputs_of_a_model_with_other_buffers(new: New) -> list[Tensor]:
    """DDP sends the buffers of the last rank that has data, `module=` those of the first."""
    setup = new()
    joined(setup, 2 + 2 * rank(), PROBLEMS["conv"])
    return setup.params


@scenario(ranks=RANKS, modes=MODULE)
def uneven_inputs_and_a_scaler(setup: Setup) -> list[Tensor]:
    """At one step a rank that still has data has an infinity."""
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
    with Join([each for each in (setup.model, setup.opt) if isinstance(each, Joinable)]):
        for step in range(3 + 2 * rank()):
            loss = MLP_PROBLEM.loss(setup.model, step)
            bad = step == 4 and rank() in (1, world_size() - 1)
            scaler.scale(loss * float("inf") if bad else loss).backward()
            scaler.unscale_(setup.opt)
            scaler.step(setup.opt)
            scaler.update()
            setup.opt.zero_grad()
    return []


def _joined(new: New) -> list[Tensor]:
    seen = []
    for name in ("one", "fewer and fewer"):
        for clear_first in (False, True):
            problem = branching(BRANCHES[name])
            setup = new(problem, find_unused_parameters=True)
            joined(setup, 2 + 2 * rank(), problem, clear_first=clear_first)
            seen += setup.params
    return seen


@scenario(many=True, ranks=RANKS, modes=tuple(HOOKS))
def uneven_inputs_and_unused_parameters(new: New) -> list[Tensor]:
    return _joined(new)


@scenario(many=True, slow=True, ranks=RANKS, kinds=[PLAIN_SGD])
def uneven_inputs_and_unused_parameters_of_plain_sgd(new: New) -> list[Tensor]:
    """DDP goes on counting as used what a joined rank used last, and gives it a gradient of zeros,
    which changes nothing here."""
    return _joined(new)
