"""What a step on one parameter costs, for those that are dealt whole: found by counting.

A class may say it: `shardstep_cost`, called with a shape, returns a number of operations. Of any
other class, a step on a tensor without data (on the meta device) is counted in products and sums of
its matrix products. That is nearly all of the work of classes that have any, and nothing for the
others. For torch's Muon the count is known: the first one of a process takes a second or two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from shardstep.local.sandbox import sandbox
from shardstep.local.train_eval import start_training
from shardstep.params.inputs import unwrap_partial

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
    declared = getattr(unwrap_partial(optimizer_class), "shardstep_cost", None)
    if declared is not None:
        return max(0, int(declared(shape)))
    if len(shape) < 2 or 0 in shape:
        return 0
    if optimizer_class is torch.optim.Muon:
        return newton_schulz(shape, {**defaults, **group_options}.get("ns_steps", 5))
    return count(optimizer_class, defaults, group_options, shape)


def newton_schulz(shape: tuple[int, ...], steps: int) -> int:
    """Operations of `steps` Newton-Schulz iterations on a matrix.

    With m rows and n columns, m <= n: the product with its transpose, that one's square, and the
    product of both with the matrix.
    """
    m, n = sorted(shape)
    return int(steps) * (4 * m * m * n + 2 * m**3)


def count(
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    group_options: Mapping[str, Any],
    shape: tuple[int, ...],
) -> int:
    """Operations of the matrix products in a step on a parameter of this shape, counted."""
    with sandbox(optimizer_class, torch.device("cpu")), FlopCounterMode(display=False) as counter:
        try:
            param = torch.nn.Parameter(torch.empty(shape, device=_META))
            opt = optimizer_class([{**group_options, "params": [param]}], **defaults)
            start_training(opt)
            for _ in range(STEPS):
                param.grad = torch.empty(shape, device=_META)
                opt.step()
        except Exception:
            return 0  # it asks for values, which there are none of
    return int(counter.get_total_flops()) // STEPS
