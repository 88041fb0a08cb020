"""The cost of an optimizer class, found by running it: operations of a step, bytes of state.

Whole tensors are dealt to ranks by the cost of a step on them. A class may declare it:
`shardstep_cost(shape)` returns a number of operations. For others, those of matrix products are
counted in a step on the meta device. The cost of torch's Muon is known, since the first count in a
process takes a second or two.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.local.sandbox import sandbox
from shardstep.local.train_eval import start_training
from shardstep.params.inputs import unwrap_partial
from shardstep.plan import StateSize

STEPS = 2
"""Some classes make part of their state in the second step."""

_CPU, _META = torch.device("cpu"), torch.device("meta")


def try_state(
    recipe: OptimizerRecipe, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return the state that the class keeps of one parameter after two steps."""
    with sandbox(recipe.optimizer_class, _CPU):
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        opt = recipe.make([[param]], _CPU)
        start_training(opt)
        for _ in range(STEPS):
            param.grad = torch.ones_like(param)
            opt.step()
        return dict(opt.state[param])


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
            try_state(recipe, shape, torch.float32, _META)
        except Exception:
            return 0  # it reads values, which meta tensors do not have
    return int(counter.get_total_flops()) // STEPS


def slice_state(recipe: OptimizerRecipe, dtype: torch.dtype) -> StateSize:
    """Return the state of flat slices, for an element-wise class."""
    shapes = [(number * StateSize.PER,) for number in (1, 2)]
    one, two = (tensor_nbytes(try_state(recipe, shape, dtype, _CPU)) for shape in shapes)
    return StateSize(fixed=2 * one - two, nbytes=two - one)


def tensor_state(recipe: OptimizerRecipe, shape: tuple[int, ...], dtype: torch.dtype) -> StateSize:
    """Return the state of a whole tensor.

    The class runs on the meta device. If it reads values, it runs on a small tensor of the same
    proportions, and the state is taken to grow with the number of elements.
    """
    if 0 in shape:
        return StateSize()
    try:
        return StateSize(fixed=tensor_nbytes(try_state(recipe, shape, dtype, _META)))
    except Exception:
        small = shape
        while math.prod(small) > StateSize.PER:
            small = tuple(-(-size // 2) for size in small)
        nbytes = tensor_nbytes(try_state(recipe, small, dtype, _CPU))
        return StateSize(fixed=nbytes * math.prod(shape) // math.prod(small))


def tensor_nbytes(value: Any) -> int:
    """Return the bytes of the tensors in a state of any structure."""
    nbytes = 0
    for leaf in tree_leaves(value):
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            nbytes += tensor_nbytes([getattr(leaf, name) for name in names])
        elif isinstance(leaf, torch.Tensor):
            nbytes += leaf.nbytes
    return nbytes
