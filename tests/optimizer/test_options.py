"""What surrounds a step works as on any optimizer: groups, hooks, signatures, state, memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from problems import SHAPES, Case, OneByOne, follow, make_params, set_gradients, train
from ranks import raises_on_every_rank, run_ranks
from reference.naive_masters import NaiveMasters
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardstep import MixedPrecision, ZeroRedundancyOptimizer

# --------------------------------------------------------------------- what params may be

FORMS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "list": lambda params: params,
    "generator": lambda params: (param for param in params),
    "tuple of plain tensors": lambda params: tuple(params),
    "pairs": lambda params: [(f"p{i}", param) for i, param in enumerate(params)],
    "generator of pairs": lambda params: ((f"p{i}", param) for i, param in enumerate(params)),
    "groups": lambda params: [{"params": params[:4]}, {"params": params[4:], "lr": 0.3}],
    "groups of generators": lambda params: [
        {"params": (param for param in params[:4])},
        {"params": iter(params[4:]), "momentum": 0.5},
    ],
    "generator of groups": lambda params: ({"params": [param]} for param in params),
    "groups of pairs": lambda params: [
        {"params": [(f"p{i}", param) for i, param in enumerate(params)], "lr": 0.2}
    ],
    "a group of a single tensor": lambda params: [
        {"params": params[0], "lr": 0.5},
        {"params": params[1:]},
    ],
    "an empty group": lambda params: [{"params": []}, {"params": params}, {"params": []}],
}


@on_ranks(2)
def test_parameters_may_be_given_in_every_form() -> None:
    for given in FORMS.values():
        case = Case(optim.SGD, {"lr": 0.1, "momentum": 0.9})
        follow(partial(train, steps=range(4)), case, given=given)


class Counting(Optimizer):
    """Keeps a number in its groups, as schedule-free and learning-rate-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] = group.get("weight_sum", 0.0) + 0.5
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])


@on_ranks(2)
def test_what_the_local_optimizer_keeps_in_its_groups_is_seen() -> None:
    def script(opt: Any, params: list[nn.Parameter]) -> None:
        train(opt, params, range(3))
        for group in opt.param_groups:
            assert (group["k"], group["weight_sum"]) == (3, 1.5)
            assert list(group) == ["params", "lr", "k", "weight_sum"]
        opt.param_groups[0]["k"] = 1  # and what the user writes reaches the optimizer
        train(opt, params, range(3, 5))
        assert [group["k"] for group in opt.param_groups] == [3, 5]

    halves = lambda params: [{"params": params[:5]}, {"params": params[5:]}]  # noqa: E731
    follow(script, Case(Counting), given=halves)


# --------------------------------------------------------------------- hooks and closures


@on_ranks(1, 2)
def test_hooks_on_the_steps_of_all_optimizers_see_steps_within_a_closure() -> None:
    net, other = nn.Linear(2, 2), optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.Adam)
    calls: list[str] = []

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = net(torch.ones(1, 2)).sum()
        loss.backward()
        other.step()
        return loss

    hook = register_optimizer_step_pre_hook(lambda each, *_: calls.append(type(each).__name__))
    opt.step(closure)
    hook.remove()
    assert calls == ["ZeroRedundancyOptimizer", "SGD"]


class Plainest(OneByOne):
    """Its `step` takes no closure."""

    def step(self) -> None:  # type: ignore[override]
        super().step()

    def update(self, p: Any, state: Any, lr: float) -> None:
        p.sub_(p.grad, alpha=lr)


class Keyworded(Optimizer):
    """Its `step` takes keywords of its own and returns something of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * scale)
        return f"scaled by {scale}"


@on_ranks(2)
def test_a_step_of_any_signature_can_be_called() -> None:
    def keyworded(opt: Any, params: list[nn.Parameter]) -> None:
        set_gradients(params, 0)
        assert opt.step(scale=0.25) == "scaled by 0.25"
        assert opt.step() == "scaled by 1.0"

    follow(partial(train, steps=range(3)), Case(Plainest))
    follow(keyworded, Case(Keyworded))


# ------------------------------------------------------------------ parameters that move


class Assigning(OneByOne):
    """Gives `p.data` a new tensor instead of writing into the old one."""

    def update(self, p: Any, state: Any, lr: float) -> None:
        state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
        p.data = p.data - lr * state["sum"]


@on_ranks(1, 2, 3)
def test_an_optimizer_may_assign_data_instead_of_writing_to_it() -> None:
    follow(partial(train, steps=range(8)), Case(Assigning))


def _naive(params: list[nn.Parameter], **options: Any) -> Any:
    naive = NaiveMasters([{"params": params}], optim.Adam, **options)
    return SimpleNamespace(step=lambda: (naive.take_gradients(), naive.step()))


@pytest.mark.parametrize("with_masters", [False, True])
@on_ranks(1, 2, 3)
def test_a_model_may_change_its_memory_format_between_steps(with_masters: bool) -> None:
    """To and fro: elements are numbered as they lie in memory, and so is what is kept of them."""
    formats = {2: torch.channels_last, 5: torch.contiguous_format}

    def script(opt: Any, params: list[nn.Parameter]) -> None:
        for step in range(8):
            for param in params[::2]:
                param.data = param.data.to(memory_format=formats.get(step, torch.preserve_format))
            set_gradients(params, step, missing=False)
            opt.step()

    dtype = torch.bfloat16 if with_masters else torch.float32
    shapes = [(5, 7, 3, 3), (130,), (24, 10, 3, 5), (9,)]
    make = partial(make_params, shapes, dtypes=(dtype,), frozen=())
    masters = {"unsharded": _naive, "precision": MixedPrecision()} if with_masters else {}
    follow(script, Case(optim.Adam, {"lr": 0.01}), make, **masters)


@pytest.mark.parametrize("with_all_gradients", [True, False])
@on_ranks(2, 3)
def test_backward_through_a_graph_from_before_the_step_fails_if_that_changed_something(
    with_all_gradients: bool,
) -> None:
    def stale(opt: Any, params: list[nn.Parameter]) -> list[int]:
        losses = [param.square().sum() for param in params]  # needs the value in backward
        set_gradients(params, 1, missing=not with_all_gradients)
        opt.step()
        found = []
        for number, loss in enumerate(losses):
            try:
                loss.backward()
            except RuntimeError as error:
                if "inplace operation" not in str(error):
                    raise
                found.append(number)
        few, most = (len(SHAPES), len(SHAPES)) if with_all_gradients else (1, len(SHAPES) - 1)
        assert few <= len(found) <= most
        return found

    follow(stale, Case(optim.SGD, {"lr": 0.1}), partial(make_params, frozen=()))


class _Twice(optim.SGD):
    """Evaluates its closure twice, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return super().step(closure)


class _TwiceUnnoticed(_Twice):
    """The same, but not tried, since it says what it is."""

    shardstep_layout = "sliced"


def _evaluates_twice(cls: type[Optimizer]) -> None:
    params = make_params(frozen=())
    opt = ZeroRedundancyOptimizer(params, cls, lr=0.1)

    def closure() -> float:
        set_gradients(params, 0, missing=False)
        return 0.0

    opt.step(closure)


def test_a_closure_that_is_evaluated_twice_is_refused_on_every_rank() -> None:
    run_ranks(_evaluates_twice, 1, _Twice)
    raises_on_every_rank(_evaluates_twice, 2, ValueError, _Twice, match="more than once")
    raises_on_every_rank(_evaluates_twice, 2, RuntimeError, _TwiceUnnoticed, match="more than once")


@on_ranks(2)
def test_the_state_of_a_rank_is_seen_under_the_users_parameters() -> None:
    params = make_params(frozen=())
    opt = ZeroRedundancyOptimizer(params, optim.Adam, layout="whole", lr=0.1)
    assert not len(opt.state)
    assert params[0] not in opt.state
    set_gradients(params, 0, missing=False)
    opt.step()
    owned = [param for param in params if param in opt.state]
    assert set(owned) == set(opt.state)
    assert len(opt.state) == len(owned)
    for param in params:
        entry = opt.state[param]
        assert bool(entry) == (param in opt.state), "what a rank does not own is empty"
        assert opt.state.get(param, "none") != {}
        assert param not in opt.state or entry["exp_avg"].shape == param.shape
    with pytest.raises(TypeError):
        opt.state = {params[0]: {}}
    for change in ("__setitem__", "setdefault", "update", "pop"):
        with pytest.raises(TypeError, match=r"load_state_dict"):
            getattr(opt.state, change)(params[0], {})
    opt.state = {}
    assert not len(opt.state)
    assert not len(opt.optim.state)
