"""Model and optimizer are freed once the caller drops them, in every mode and at any moment."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from ddp_ways import WAYS, overlapping
from models import ADAMW, MLP_PROBLEM, SGD, Setup, with_ddp, with_zero
from on_ranks import on_ranks
from problems import differing
from ranks import run_ranks
from torch import nn

from shardstep import ZeroRedundancyOptimizer


def _drop_in(module: nn.Module) -> Setup:
    setup = with_ddp(module)
    setup.opt = ZeroRedundancyOptimizer(module.parameters(), ADAMW[0], **ADAMW[1])
    return setup


def _make(way: str) -> Setup:
    module = MLP_PROBLEM.fresh()
    makers: dict[str, Callable[[nn.Module], Setup]] = {
        "drop-in": _drop_in,
        "module=": with_zero,
        "module=, no overlap": lambda module: with_zero(module, overlap=False),
    }
    return makers[way](module) if way in makers else overlapping(way, module)


def _alive(way: str, moment: str) -> list[str]:
    """Return which objects survive `del model, opt`, dropped at this moment of an iteration."""
    setup = _make(way)
    setup.backward(0)
    if moment != "before the step":
        setup.opt.step()
    if moment == "cleared":
        setup.opt.zero_grad()
    kept: dict[str, Any] = {
        "module": setup.module,
        "model": setup.model,
        "optimizer": setup.opt,
        "state": getattr(setup.opt, "optim", setup.opt),
        "parameter": next(iter(setup.module.parameters())),
    }
    refs = {name: weakref.ref(thing) for name, thing in kept.items()}
    del setup, kept
    gc.collect()
    return [f"{way}, {moment}: {name}" for name, ref in refs.items() if ref() is not None]


@on_ranks(2)
def test_model_and_optimizer_are_freed_in_every_mode_at_every_moment() -> list[str]:
    ways = ("drop-in", "module=", "module=, no overlap", *WAYS)
    moments = ("before the step", "in flight", "cleared")
    gc.freeze()  # so that each collection is short
    try:
        return [found for way in ways for moment in moments for found in _alive(way, moment)]
    finally:
        gc.unfreeze()


def _hooks(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules())


def _take_over(gradients: bool) -> list[Any]:
    """Drop only the optimizer, in flight, and go on with another."""
    expected, module = MLP_PROBLEM.fresh(), MLP_PROBLEM.fresh()
    seen: list[Any] = []
    for run in range(3):
        plain, zero = with_ddp(expected, SGD), with_zero(module, SGD)
        hooks = _hooks(module)
        for step in range(2):
            for setup in (plain, zero):
                setup.opt.zero_grad()
                setup.backward(2 * run + step)
                setup.opt.step()
        if not gradients:
            zero.opt.zero_grad()
        del zero, setup
        # A parameter that is read after its optimizer was dropped waits all the same.
        read = [parameter.detach().clone() for parameter in module.parameters()]
        gc.collect()
        seen += differing(list(expected.parameters()), read)
        seen += [p for p in module.parameters() if p.grad is not None]
        seen += [hooks] if _hooks(module) else []
    return seen


@on_ranks(2)
def test_after_the_optimizer_is_dropped_another_takes_over() -> list[Any]:
    return _take_over(gradients=False) + _take_over(gradients=True)


@on_ranks(1)
def test_an_optimizer_that_is_still_referred_to_is_not_displaced() -> None:
    module = MLP_PROBLEM.fresh()
    first = with_zero(module)
    with pytest.raises(ValueError, match="already has its gradient reduced by another optimizer"):
        with_zero(module)
    first.opt.detach()
    with_zero(module)


def _storage_calls() -> list[str]:
    zero = with_zero(MLP_PROBLEM.fresh())
    zero.backward(0)
    grad: Any = next(zero.module.parameters()).grad
    calls: dict[str, Callable[[], object]] = {
        "untyped_storage": zero.module.share_memory,
        "data_ptr": grad.data_ptr,
        "numpy": grad.numpy,
        "pickling": lambda: pickle.dumps(grad),
        "__dlpack__": grad.__dlpack__,
    }
    for operation, call in calls.items():
        with pytest.raises(RuntimeError, match=f"^{operation} is not possible on the gradient of"):
            call()
    return list(calls)


def test_a_placeholder_refuses_calls_on_its_memory_by_name() -> None:
    run_ranks(_storage_calls, 1)
