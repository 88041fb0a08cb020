"""What `module=` sets up fits the module, and can be undone."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from graphs import PROMPT
from models import (
    ADAMW,
    MLP,
    MLP_PROBLEM,
    SGD,
    from_rank,
    rank,
    train,
    with_ddp,
    with_plain,
    with_zero,
)
from on_ranks import on_ranks
from problems import OneByOne, assert_same, copies, same_bits
from ranks import run_ranks
from torch import Tensor, nn, optim

from shardstep import ZeroRedundancyOptimizer


@on_ranks(2)
def test_an_unknown_parameter_raises_on_every_rank() -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    zero.backward(0)
    for ask, asked, match in (
        (zero.opt.full_grad, "layers.9.weight", r"layers\.9\.weight.*not a parameter"),
        (zero.opt.full_grad, torch.ones(3), "the given tensor is not a parameter"),
        (zero.opt.full_state, "layers.9.weight", r"layers\.9\.weight"),
    ):
        with pytest.raises(ValueError, match=match):
            ask(asked)


# ----------------------------------------------------------------------------------------- undoing


WHEN = ("after a step", "after backward", "holding back", "at once")


@on_ranks(2)
def test_detaching_leaves_a_plain_model_that_trains_on() -> None:
    """Afterwards the model is as it was before it met the optimizer, but trained."""
    for case in itertools.product((True, False), WHEN):
        overlap, when = case
        ddp = with_ddp(MLP_PROBLEM.fresh(), SGD)
        zero = with_zero(MLP_PROBLEM.fresh(), SGD, overlap=overlap)
        for setup in (ddp, zero):
            train(setup, MLP_PROBLEM, range(0 if when == "at once" else 3))
        with zero.no_sync() if when == "holding back" else nullcontext():
            if when in ("after backward", "holding back"):
                zero.backward(3)
            zero.opt.detach()
        assert_same(ddp.params, zero.params, case)
        for module in zero.module.modules():
            hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
            assert not any(hooks), (case, hooks)
        for param in zero.module.parameters():
            assert type(param) is nn.Parameter, case
            assert not param._post_accumulate_grad_hooks, case
            assert not vars(param), case
            assert param.grad is None, case
            assert param.untyped_storage().resizable(), f"{case}: still in the memory of a bucket"
        # It trains on with anything else; here each rank for itself.
        alone, other = MLP(), with_plain(zero.module, SGD)
        alone.load_state_dict(zero.module.state_dict())
        reference = with_plain(alone, SGD)
        for setup in (reference, other):
            train(setup, MLP_PROBLEM, range(5, 8))
        assert_same(reference.params, other.params, case)


@on_ranks(2)
def test_a_parameter_that_is_the_output_collects_no_hooks() -> None:
    zero = with_zero(PROMPT.fresh(), SGD)
    train(zero, PROMPT, range(4))
    assert not any(param._backward_hooks for param in zero.module.parameters())


@on_ranks(2)
def test_parameters_of_an_optimizer_that_was_not_detached_are_refused_by_another() -> None:
    """Both would take the gradients away, and each would find a part of them."""
    first, second = (with_zero(MLP_PROBLEM.fresh(), SGD) for _ in range(2))
    train(first, MLP_PROBLEM, range(2))
    with pytest.raises(ValueError, match=r"'0\.weight' .*another optimizer.*detach\(\)"):
        with_zero(first.module.get_submodule("layers"), ADAMW)
    with pytest.raises(ValueError, match=r"another optimizer.*detach\(\)"):
        second.opt.add_param_group({"params": list(first.module.parameters())})


class _SharedFrozen(nn.Module):
    """A head of its own on a body that others have too."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@on_ranks(2)
def test_what_was_refused_leaves_no_trace_and_frozen_parameters_may_be_shared() -> None:
    zero, ddp = with_zero(MLP_PROBLEM.fresh(), SGD), with_ddp(MLP_PROBLEM.fresh(), SGD)
    with pytest.raises(ValueError, match="another optimizer"):
        with_zero(zero.module, ADAMW)
    for setup in (zero, ddp):
        train(setup, MLP_PROBLEM, range(3))
    shared = _SharedFrozen(zero.module), _SharedFrozen(zero.module)
    zero.module.requires_grad_(False)
    zero.opt.zero_grad()
    for module in shared:
        train(with_zero(module, SGD), MLP_PROBLEM, range(2))
    assert_same(ddp.params, zero.params)
    assert len(zero.module._forward_hooks) == 1


# --------------------------------------------------------------------------------------- mistakes


@on_ranks(2)
def test_a_module_that_does_not_fit_is_an_error_on_every_rank() -> None:
    model, other = MLP(), nn.Sequential(nn.Linear(3, 3))
    params = list(model.parameters())
    other.register_buffer("seen", torch.zeros(1 + rank()))
    expanded, table = nn.Linear(4, 4), nn.Embedding(50, 8, sparse=True)
    expanded.register_buffer("scale", torch.ones(1).expand(3))
    either = (ValueError, RuntimeError)
    for given, module, error, match in (
        (expanded.parameters(), expanded, ValueError, "buffer 'scale' is expanded"),
        (MLP().parameters(), model, ValueError, "not a parameter of the given"),
        (params[1:], model, ValueError, r"'layers\.0\.weight'.*not given"),
        (params[rank() :], model, either, r"layers\.0\.weight"),  # too few on one rank
        (other.parameters(), other, ValueError, "buffer 'seen'"),
    ):
        with pytest.raises(error, match=match):
            ZeroRedundancyOptimizer(given, optim.SGD, module=module, lr=0.1)
    with pytest.raises(ValueError, match="SparseAdam takes sparse gradients"):
        ZeroRedundancyOptimizer(table.parameters(), optim.SparseAdam, module=table)


# --------------------------------------------------------------------------------------- the start


@on_ranks(2)
def test_all_ranks_start_with_rank_0s_parameters_and_buffers() -> None:
    torch.manual_seed(5 + rank())
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].running_mean.normal_()
    model[2].weight.requires_grad_(False)  # frozen, but of the model all the same
    before = copies(model.state_dict().values())
    ZeroRedundancyOptimizer(
        [p for p in model.parameters() if p.requires_grad], optim.SGD, module=model, lr=0.1
    )
    expected = from_rank(0, before)
    assert_same(expected, list(model.state_dict().values()))
    assert same_bits(expected[0], before[0]) == (rank() == 0)


class Anchored(OneByOne):
    """Pulls parameters back to where they were when it was made."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["anchor"] = param.detach().clone()

    def update(self, p: Any, state: Any, lr: float) -> None:
        p.sub_(p.grad, alpha=lr).lerp_(state["anchor"], 0.5)


def _anchors(dtype: torch.dtype) -> list[torch.Tensor]:
    """What the class has noted down of rank 0's parameters, and where a step leads from there."""
    torch.manual_seed(5 + rank())
    model = nn.Linear(30, 40).to(dtype)
    opt = ZeroRedundancyOptimizer(model.parameters(), Anchored, module=model)
    noted = [opt.full_state(name)["anchor"] for name in ("weight", "bias")]
    assert_same([param.detach().float() for param in model.parameters()], noted)
    model(torch.ones(2, 30, dtype=dtype)).sum().backward()
    opt.step()
    return copies(model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_that_looks_at_parameters_when_it_is_made_sees_rank_0s(dtype: torch.dtype) -> None:
    (expected,) = run_ranks(_anchors, 1, dtype)
    for got in run_ranks(_anchors, 2, dtype):
        assert_same(expected, got)
