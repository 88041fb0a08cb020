"""A user's own `Stateful`, such as the `AppState` of torch's tutorial, has a sharded optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from problems import copies, differing
from ranks import run_ranks
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from shardstep.checkpoint import Sharded


class AppState(Stateful):
    """A model and its optimizer. A `Sharded` is asked itself, without torch's functions."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.optimizer, Sharded):
            return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if isinstance(self.optimizer, Sharded):
            self.model.load_state_dict(state_dict["model"])
            self.optimizer.load_state_dict(state_dict["optim"])
            return
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def _setup(way: str) -> tuple[Any, Any, Any]:
    """Return the model, the optimizer, and what stands for it in the state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    if way != "plain":
        opt: Any = ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, module=model, layout="sliced", lr=0.1
        )
        return model, opt, Sharded(opt) if way == "stateful" else Sharded(opt).as_optimizer()
    ddp = DistributedDataParallel(model)
    opt = optim.AdamW(ddp.parameters(), lr=0.1)
    return ddp, opt, opt


def _run(way: str, folder: Path, steps: range, save_at: int | None = None) -> list[torch.Tensor]:
    """Train, and save before step `save_at`; without it, load first. All ranks have one batch."""
    model, opt, shown = _setup(way)
    if save_at is None:
        torch._foreach_zero_([param.detach() for param in model.parameters()])
        dcp.load({"app": AppState(model, shown)}, checkpoint_id=folder)
    for step in steps:
        if step == save_at:
            dcp.save({"app": AppState(model, shown)}, checkpoint_id=folder)
        torch.manual_seed(step)
        model(torch.randn(4, 8)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return copies(model.parameters())


@pytest.mark.parametrize(
    ("saved", "loaded", "world_size"),
    [
        *(("sharded", "sharded", world_size) for world_size in (1, 2)),
        *(("sharded", "plain", 2), ("plain", "sharded", 2), ("stateful", "stateful", 1)),
    ],
)
def test_app_state_goes_on_where_it_was_saved(
    saved: str, loaded: str, world_size: int, tmp_path: Path
) -> None:
    """Save from a run of two ranks and load into another, each sharded or not."""
    expected, _ = run_ranks(_run, 2, saved, tmp_path, range(4), save_at=2)
    for got in run_ranks(_run, world_size, loaded, tmp_path, range(2, 4)):
        assert differing(expected, got) == []
