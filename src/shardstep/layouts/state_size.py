"""The bytes of state that an optimizer class keeps, found by running it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.local.sandbox import sandbox
from shardstep.local.train_eval import start_training
from shardstep.plan import StateSize

STEPS = 2
"""Some classes make part of their state in the second step."""

_CPU, _META = torch.device("cpu"), torch.device("meta")


def slice_state(recipe: OptimizerRecipe, dtype: torch.dtype) -> StateSize:
    """Return the state of flat slices, for an element-wise class."""
    one, two = (_state_nbytes(recipe, (n * StateSize.PER,), dtype, _CPU) for n in (1, 2))
    return StateSize(fixed=2 * one - two, nbytes=two - one)


def tensor_state(recipe: OptimizerRecipe, shape: tuple[int, ...], dtype: torch.dtype) -> StateSize:
    """Return the state of a whole tensor.

    The class runs on the meta device. If it reads values, it runs on a small tensor of the same
    proportions, and the state is taken to grow with the number of elements.
    """
    if 0 in shape:
        return StateSize()
    try:
        return StateSize(fixed=_state_nbytes(recipe, shape, dtype, _META))
    except Exception:
        small = shape
        while math.prod(small) > StateSize.PER:
            small = tuple(-(-size // 2) for size in small)
        nbytes = _state_nbytes(recipe, small, dtype, _CPU)
        return StateSize(fixed=nbytes * math.prod(shape) // math.prod(small))


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


def _state_nbytes(
    recipe: OptimizerRecipe, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> int:
    return tensor_nbytes(try_state(recipe, shape, dtype, device))


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
