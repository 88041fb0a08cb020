"""Mistakes that would train wrongly without a word are raised by name on every rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_ways import HOOKS, WAYS
from on_ranks import on_ranks
from ranks import raises_on_every_rank, run_ranks
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import shardstep
from shardstep import ZeroRedundancyOptimizer


def _model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def _make(
    mode: str, listed: bool = False, find_unused: bool = False
) -> tuple[Any, Any, ZeroRedundancyOptimizer]:
    """Return the model, what to call, and the optimizer."""
    model = _model()
    params: Any = list(model.parameters()) if listed else model.parameters()
    if mode == "module":
        opt = ZeroRedundancyOptimizer(params, optim.SGD, module=model, lr=0.1)
        return model, model, opt
    ddp = DistributedDataParallel(model, find_unused_parameters=find_unused)
    params = params if listed else ddp.parameters()
    if mode == "named":
        params = ddp.named_parameters()
    inside = mode in WAYS
    opt = ZeroRedundancyOptimizer(params, optim.SGD, overlap_with_ddp=inside, lr=0.1)
    if mode == "register":
        shardstep.register(ddp, opt)
    elif inside:
        ddp.register_comm_hook(None, HOOKS[mode](allreduce_hook, ddp, opt))
    return model, ddp, opt


def _train(call: Any, opt: Any, seed: int = 0) -> None:
    opt.zero_grad()
    call(torch.full((2, 8), 1.0 + seed)).square().mean().backward()
    opt.step()


REPLACED: dict[str, Any] = {
    "2.weight": lambda model: model.__setitem__(2, nn.Linear(8, 8)),
    "0.weight": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(8, 8))),
    "1.weight": lambda model: model.__setitem__(1, nn.PReLU()),
}


@pytest.mark.parametrize("mode", ["module", "drop-in", "named", *WAYS])
@on_ranks(2)
def test_a_parameter_that_was_replaced_is_noticed(mode: str) -> None:
    for find_unused, (name, replace) in itertools.product((False, True), REPLACED.items()):
        model, call, opt = _make(mode, find_unused=find_unused)
        for step in range(3):  # DDP makes its buckets again after the first
            _train(call, opt, step)
        replace(model)
        with pytest.raises(ValueError, match=f"'{name}' was put into the module after the optim"):
            # Before the next forward, unless only `step()` belongs to the optimizer.
            _train(call, opt) if mode in ("drop-in", "named") else call(torch.ones(2, 8))


@on_ranks(2)
def test_a_module_may_change_where_nothing_is_forgotten() -> None:
    model, call, opt = _make("module")
    _train(call, opt)
    model[1] = nn.GELU()
    model.extra = nn.Linear(8, 8).requires_grad_(False)
    _train(call, opt)
    head = model.head = nn.Linear(8, 8)
    opt.zero_grad()
    opt.add_param_group({"params": head.parameters()})
    _train(call, opt)
    torch.func.functional_call(
        model, {"0.weight": torch.ones(8, 8, requires_grad=True)}, torch.ones(2, 8)
    )


def _forget_ddp(synchronise: bool) -> None:
    model = _model()
    opt = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.1)
    for step in range(4):
        opt.zero_grad()
        model(torch.full((2, 8), 1.0 + step + dist.get_rank())).square().mean().backward()
        if synchronise:
            for param in model.parameters():
                dist.all_reduce(param.grad)
        opt.step()


def test_gradients_that_nobody_synchronised_are_noticed_at_the_first_step() -> None:
    match = "'0.weight' differs between ranks 0 and 1.*DistributedDataParallel"
    raises_on_every_rank(_forget_ddp, 2, RuntimeError, False, match=match)
    run_ranks(_forget_ddp, 2, True)


@on_ranks(2)
def test_names_are_the_module_s_without_named_parameters() -> None:
    """But parameters in a list have none without a module."""
    for mode, listed in itertools.product(("module", "drop-in", "register"), (False, True)):
        model, call, opt = _make(mode, listed)
        for trains in (True, False):
            # Another plan has the same names.
            model[0].bias.requires_grad_(trains or mode != "module")
            _train(call, opt)
        opt.full_state(opt.plan.specs[0].name)
        names = ["0.weight", "0.bias", "2.weight", "2.bias"]
        if mode == "drop-in" and listed:
            names = [f"param {number}" for number in range(4)]
        assert [spec.name for spec in opt.plan.specs] == names
