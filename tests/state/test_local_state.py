"""`optimizer.state` shows this rank's part, and is empty or not on every rank at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from shardstep import ZeroRedundancyOptimizer


@on_ranks(3)
def test_torch_s_state_dict_functions_raise_on_every_rank_and_do_not_hang() -> None:
    """More ranks than pieces: one rank owns nothing, and must do what the others do."""
    model = nn.Linear(8, 8, bias=False)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    assert not opt.state
    for _ in range(2):
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            get_optimizer_state_dict(model, opt)
        model(torch.ones(1, 8)).sum().backward()
        opt.step()
        assert opt.state
    owners = torch.tensor(len(opt.state))
    dist.all_reduce(owners)
    assert 0 < owners < 3
    opt.state.clear()
    assert not opt.state
