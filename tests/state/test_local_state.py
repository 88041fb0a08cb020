"""`optimizer.state` shows this rank's part, and is empty or not on every rank at once."""

from __future__ import annotations

import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from shardstep import ZeroRedundancyOptimizer


def _asked_by_torch() -> list[str]:
    """More ranks than pieces: one rank owns nothing, and must do what the others do."""
    model = nn.Linear(8, 8, bias=False)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    said = [str(bool(opt.state))]
    for _ in range(2):
        try:
            get_optimizer_state_dict(model, opt)
        except RuntimeError as error:
            said.append("consolidate" if "consolidate_state_dict" in str(error) else str(error))
        model(torch.ones(1, 8)).sum().backward()
        opt.step()
        said.append(str(bool(opt.state)))
    held = len(opt.state)
    opt.state.clear()
    return [*said, str(bool(opt.state)), str(held)]


def test_torch_s_state_dict_functions_raise_on_every_rank_and_do_not_hang() -> None:
    outcomes = run_ranks(_asked_by_torch, 3)
    assert {tuple(said[:-1]) for said in outcomes} == {
        ("False", "consolidate", "True", "consolidate", "True", "False")
    }
    assert {said[-1] for said in outcomes} == {"0", "1"}
