"""When a rank dies the others raise, name the operation, and never read what did not arrive."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
from models import MLP_PROBLEM, SGD, rank, with_zero
from ranks import RankFailure, run_ranks
from torch import nn


def _die_in_backward() -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    if rank() == 1:
        zero.module.get_parameter("layers.1.weight").register_hook(lambda grad: os._exit(17))
    zero.backward(0)
    zero.opt.step()


def test_when_a_rank_dies_in_backward_the_others_raise_and_name_the_operation() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"shardstep: rank 0: reducing gradients failed"):
        run_ranks(_die_in_backward, 2, timeout=120)
    assert time.monotonic() - start < 50, "not by a timeout, which takes 60 seconds"


def _die_around_the_gather(when: str) -> None:
    zero = with_zero(MLP_PROBLEM.fresh(), SGD)
    zero.backward(0)
    zero.opt.clip_grad_norm_(1.0)  # everybody has what they need for the step
    if rank() == 1:
        time.sleep(0.3 if when == "in flight" else 0.0)
        os._exit(17)
    time.sleep(0.0 if when == "in flight" else 0.5)
    errors = []
    try:
        zero.opt.step()
        time.sleep(0.8)  # by now the peer is dead, or a read waits for its end
    except RuntimeError as error:
        errors.append(str(error))
    # It is no use to ask again: what did not come is not taken for what should have come.
    params = list(zero.module.parameters())
    for param in params:
        for _ in range(2):
            try:
                param.sum()
            except RuntimeError as error:
                errors.append(str(error))
    # The header of the step is waited for ahead of its gathers.
    assert all(re.search("rank 0: .*(step|parameters) failed", error) for error in errors)
    assert len(errors) >= 2 * len(params)
    # Another model may be compiled all the same.
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    raise RuntimeError("every read raised")


@pytest.mark.parametrize("when", ["in flight", "before the launch"])
def test_parameters_that_did_not_arrive_can_never_be_read(when: str) -> None:
    with pytest.raises(RankFailure, match="every read raised"):
        run_ranks(_die_around_the_gather, 2, when, timeout=60)
