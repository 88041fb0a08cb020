"""Accelerate's own calls get the optimizer state, or an error that names the remedy."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from problems import assert_same
from ranks import run_ranks
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardstep import ZeroRedundancyOptimizer


def _make(kind: Any, **more: Any) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    more = {"module": model} if more.pop("module", False) else {}
    return model, ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.1, **more)


def _train(model: nn.Module, opt: Any) -> None:
    opt.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    opt.step()


@on_ranks(3)
def test_the_dict_before_the_first_step_is_empty_and_its_copy_loads_quietly() -> None:
    model, opt = _make(optim.AdamW)
    assert opt.state_dict()["state"] == {}
    with warnings.catch_warnings(record=True, action="always") as caught:
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert not caught, "a copy of the dict that it gave out itself"
    # What torch.distributed.checkpoint does with an optimizer that is not wrapped.
    with warnings.catch_warnings(record=True, action="always") as caught:
        opt.load_state_dict(opt.state_dict())
    assert bool(caught) is bool(opt.plan.numel(opt.rank)), "the loaded state is empty"
    _train(model, opt)
    opt.consolidate_state_dict(to="all")
    opt.param_groups[0]["lr"] = 0.05
    assert opt.state_dict()["param_groups"][0]["lr"] == 0.05


def _accelerated(folder: str, module: bool) -> bool:
    """Prepare, train, save, and load into another run; return whether that goes on equally."""
    from accelerate import Accelerator

    values = []
    for run in ("saved", "resumed"):
        accelerator = Accelerator(cpu=True)
        model, opt = _make(optim.AdamW, module=module)
        if module:
            opt = accelerator.prepare(opt)
            accelerator._models.append(model)
        else:
            model, opt = accelerator.prepare(model, opt)
        if run == "saved":
            _train(model, opt)
            opt.optimizer.consolidate_state_dict(to="all")
            accelerator.save_state(folder)
        else:
            accelerator.load_state(folder)
        _train(model, opt)
        values.append([param.detach().clone() for param in model.parameters()])
    return all(torch.equal(*pair) for pair in zip(*values, strict=True))


@pytest.mark.parametrize("module", [False, True])
def test_accelerate_prepares_saves_and_loads_the_optimizer(module: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(_accelerated, 2, str(tmp_path), module) == [True, True]


def _accumulated(sharded: bool) -> list[torch.Tensor]:
    """Train as the guide says, with `accumulate()` and clipping, sharded or not."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    opt: Any = (
        ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.1)
        if sharded
        else optim.AdamW(model.parameters(), lr=0.1)
    )
    model, opt = accelerator.prepare(model, opt)
    for step in range(6):
        torch.manual_seed(step + 100 * accelerator.process_index)
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, 8)).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
    return [param.detach() for param in model.parameters()]


def test_accelerate_accumulates_and_clips_as_with_a_plain_optimizer() -> None:
    pytest.importorskip("accelerate")
    plain = run_ranks(_accumulated, 2, False)
    for one, other in zip(run_ranks(_accumulated, 2, True), plain, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("module", [False, True])
@on_ranks(2)
def test_torchs_functions_take_the_optimizer_itself_once_all_ranks_have_its_state(
    module: bool,
) -> None:
    made = [_make(optim.AdamW, module=module) for _ in range(2)]
    (model, opt), (other, loaded) = made
    _train(model, opt)
    opt.consolidate_state_dict(to="all")
    weights, state = get_state_dict(model, opt)
    set_state_dict(other, loaded, model_state_dict=weights, optim_state_dict=state)
    loaded.consolidate_state_dict(to="all")
    held, got = (each.state_dict()["state"][0] for each in (opt, loaded))
    assert_same(list(held.values()), [got[key] for key in held])
