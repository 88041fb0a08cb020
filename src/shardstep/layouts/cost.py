"""The cost of a step on one parameter, by which whole tensors are dealt to ranks.

A class may declare it: `shardstep_cost(shape)` returns a number of operations. For others, those of
matrix products are counted in a step on the meta device. The cost of torch's Muon is known, since
the first count in a process takes a second or two.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.layouts.state_size import STEPS, try_state
from shardstep.params.inputs import unwrap_partial


def step_cost(recipe: OptimizerRecipe, shape: tuple[int, ...]) -> int:
    """Return the operations of a step on a parameter of this shape; 0 if unknown.

    The result is the same in every process, and counting has no side effects.
    """
    declared = getattr(unwrap_partial(recipe.optimizer_class), "shardstep_cost", None)
    if declared is not None:
        return max(0, int(declared(shape)))
    if len(shape) < 2 or 0 in shape:
        return 0
    if recipe.optimizer_class is torch.optim.Muon:
        options = {**recipe.defaults, **recipe.group_options}
        return newton_schulz(shape, options.get("ns_steps", 5))
    return count(recipe, shape)


def newton_schulz(shape: tuple[int, ...], steps: int) -> int:
    """Return the operations of `steps` Newton-Schulz iterations on a matrix."""
    m, n = sorted(shape)  # A = X Xᵀ, A², and the product of both with X
    return int(steps) * (4 * m * m * n + 2 * m**3)


def count(recipe: OptimizerRecipe, shape: tuple[int, ...]) -> int:
    """Count the operations of the matrix products in a step on a parameter of this shape."""
    with FlopCounterMode(display=False) as counter:
        try:
            try_state(recipe, shape, torch.float32, torch.device("meta"))
        except Exception:
            return 0  # it reads values, which meta tensors do not have
    return int(counter.get_total_flops()) // STEPS
