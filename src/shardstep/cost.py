"""What a step on one parameter costs, for those that are dealt whole: found by counting.

A class may say it: `shardstep_cost`, called with a shape, returns a number of operations. Of any
other class, a step on a tensor without data (on the meta device) is counted in products and sums of
its matrix products. That is nearly all of the work of classes that have any (for Muon, of m×n with
m <= n, about 4m²n + 2m³ for each Newton-Schulz iteration), and nothing for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from shardstep.unseen import unseen

STEPS = 2
"""The first step may be a different one."""

_META = torch.device("meta")


def step_cost(
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    group_options: Mapping[str, Any],
    shape: tuple[int, ...],
) -> int:
    """How many operations a step on a parameter of this shape takes; 0 if that is not known.

    The answer is the same in every process, and nothing that can be seen is left behind.
    """
    declared = getattr(optimizer_class, "shardstep_cost", None)
    if declared is not None:
        return max(0, int(declared(shape)))
    if len(shape) < 2 or 0 in shape:
        return 0
    with unseen(optimizer_class, torch.device("cpu")), FlopCounterMode(display=False) as counter:
        try:
            param = torch.nn.Parameter(torch.empty(shape, device=_META))
            opt = optimizer_class([{**group_options, "params": [param]}], **defaults)
            for _ in range(STEPS):
                param.grad = torch.empty(shape, device=_META)
                opt.step()
        except Exception:
            return 0  # it asks for values, which there are none of
    return int(counter.get_total_flops()) // STEPS
