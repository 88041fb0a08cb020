"""Sharded optimizers are found inside wrappers, and modules get a `no_sync` that copies lack."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.integrations.sharded import give_no_sync, require_module, sharded


class Holds(torch.optim.Optimizer):
    """Holds an optimizer, as Accelerate's wrapper does."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class Imitates:
    """Also takes its class, as the wrappers of Lightning and Fabric do."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = optimizer
        self.__class__ = type("Imitates", (Imitates, type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        return self.inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def made(**options: Any) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = nn.Linear(4, 4)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, **options)
    return model, opt


@pytest.mark.parametrize("wrap", [Holds, Imitates, lambda opt: Holds(Imitates(opt))])
def test_a_checkpoint_takes_the_optimizer_inside_a_wrapper(wrap: Any, tmp_path: Path) -> None:
    model, opt = made()
    model(torch.ones(1, 4)).sum().backward()
    opt.step()
    assert sharded(wrap(opt)) is opt
    checkpoint.save(tmp_path / "one", wrap(opt), model)
    checkpoint.async_save(tmp_path / "two", wrap(opt), model).wait()
    for load, path in ((checkpoint.load, "one"), (checkpoint.load, "two"), (checkpoint.resume, "")):
        other, fresh = made()
        load(tmp_path / path, wrap(fresh), other)
        assert torch.equal(
            fresh.full_state("weight")["exp_avg"], opt.full_state("weight")["exp_avg"]
        )


def test_an_optimizer_that_would_not_reduce_is_refused() -> None:
    model, drop_in = made()
    for optimizer in (drop_in, torch.optim.SGD(model.parameters())):
        with pytest.raises(ValueError, match=r"it needs a ZeroRedundancyOptimizer with module="):
            require_module(Holds(optimizer), "the strategy")


def test_a_copied_module_has_a_no_sync_that_does_nothing() -> None:
    model = nn.Linear(4, 4)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, module=model, lr=0.1)
    assert require_module(Holds(opt), "the strategy") is opt
    give_no_sync(opt)
    with copy.deepcopy(model).no_sync(), model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    del opt
    with model.no_sync():
        pass
