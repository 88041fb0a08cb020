"""The `AppState` of torch's checkpointing tutorial saves and loads a sharded optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
from ranks import run_ranks
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from shardstep.checkpoint import Sharded


class AppState(Stateful):
    """A model and its optimizer."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def _setup(sharded: bool) -> tuple[Any, Any, Any]:
    """Return the model, the optimizer, and what stands for it in the state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    if sharded:
        opt: Any = ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, module=model, layout="sliced", lr=0.1
        )
        return model, opt, Sharded(opt).as_optimizer()
    ddp = DistributedDataParallel(model)
    opt = optim.AdamW(ddp.parameters(), lr=0.1)
    return ddp, opt, opt


def _train(model: Any, opt: Any, seed: int) -> None:
    torch.manual_seed(seed)
    opt.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize(("saved", "loaded"), [(True, True), (True, False), (False, True)])
@on_ranks(2)
def test_app_state_goes_on_where_it_was_saved(saved: bool, loaded: bool, tmp_path: Path) -> None:
    """Save from a run and load into another, each sharded or not."""
    model, opt, shown = _setup(saved)
    for step in range(2):
        _train(model, opt, step)
    dcp.save({"app": AppState(model, shown)}, checkpoint_id=tmp_path)
    other, its_opt, shown = _setup(loaded)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    dcp.load({"app": AppState(other, shown)}, checkpoint_id=tmp_path)
    for step in range(2, 4):
        _train(model, opt, step)
        _train(other, its_opt, step)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def _state(folder: str, load: bool) -> Any:
    """Save the optimizer's state after a step, or load it; return all of it."""
    model, opt, shown = _setup(sharded=True)
    if load:
        dcp.load({"app": AppState(model, shown)}, checkpoint_id=folder)
    else:
        _train(model, opt, 0)
        dcp.save({"app": AppState(model, shown)}, checkpoint_id=folder)
    opt.consolidate_state_dict(to="all")
    return opt.state_dict()["state"]


def test_app_state_loads_at_another_world_size(tmp_path: Path) -> None:
    saved = run_ranks(_state, 2, str(tmp_path), False)[0]
    for loaded in run_ranks(_state, 3, str(tmp_path), True):
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


@pytest.mark.parametrize("stepped", [False, True])
@on_ranks(2, raises=RuntimeError, match=r"Sharded\(optimizer\).as_optimizer\(\)")
def test_the_optimizer_itself_names_the_wrapper_on_every_rank(stepped: bool) -> None:
    """Its `state_dict()` sends nothing, so that one rank may call it; torch asks for no more."""
    model, opt, _ = _setup(sharded=True)
    if stepped:
        _train(model, opt, 0)
    AppState(model, opt).state_dict()
