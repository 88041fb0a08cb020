"""Model and optimizer are freed once the caller drops them, in every mode and at any moment."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from models import MLP_PROBLEM, SGD, with_ddp, with_zero
from on_ranks import on_ranks
from problems import assert_same, copies
from scenarios import ALL, sharded


def _alive(way: str, moment: str) -> list[str]:
    """Return which objects survive `del model, opt`, dropped at this moment of an iteration."""
    setup = sharded(way, MLP_PROBLEM.fresh())
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
    moments = ("before the step", "in flight", "cleared")
    gc.freeze()  # so that each collection is short
    try:
        return [found for way in ALL for moment in moments for found in _alive(way, moment)]
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("gradients", [False, True])
@on_ranks(2)
def test_after_the_optimizer_is_dropped_another_takes_over(gradients: bool) -> None:
    """Drop only the optimizer, in flight, and go on with another."""
    expected, module = MLP_PROBLEM.fresh(), MLP_PROBLEM.fresh()
    for run in range(3):
        plain, zero = with_ddp(expected, SGD), with_zero(module, SGD)
        for step in range(2):
            for setup in (plain, zero):
                setup.opt.zero_grad()
                setup.backward(2 * run + step)
                setup.opt.step()
        if not gradients:
            zero.opt.zero_grad()
        del zero, setup
        # A parameter that is read after its optimizer was dropped waits all the same.
        read = copies(module.parameters())
        gc.collect()
        assert_same(list(expected.parameters()), read)
        assert all(param.grad is None for param in module.parameters())
        assert not any(part._forward_pre_hooks or part._forward_hooks for part in module.modules())
