"""Compare the state in an imported state dict with the optimizer class that the user names."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardstep.checkpoint.files import CheckpointError
from shardstep.layouts.cost import try_state
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.local.multi_class import CLASS_KEY, full_name, split_options

SHAPES = ((4, 4), (4,))
"""Some classes keep different state for matrices and vectors."""


def check_class_name(
    given: str | None, states: Sequence[Any], groups: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return the full name of the class; None if none was given.

    Raises:
        CheckpointError: if there is no such class, or it keeps other state than `states`.
    """
    if given is None:
        return None
    optimizer_class = _find(given)
    saved = {key for state in states if isinstance(state, Mapping) for key in state}
    kept: set[Any] = set()
    tried = False
    for group in groups:
        recipe = OptimizerRecipe(optimizer_class, split_options(optimizer_class, group)[0])
        for shape in SHAPES:
            with contextlib.suppress(Exception):  # a class may take matrices only
                kept |= set(try_state(recipe, shape, torch.float32, torch.device("cpu")))
                tried = True
    if tried and saved - kept and not any(CLASS_KEY in group for group in groups):
        raise CheckpointError(
            f"the state dict is not of {given}: it has {_listed(saved - kept)}, but {given} keeps "
            f"{_listed(kept) or 'nothing'}"
        )
    return full_name(optimizer_class)


def _find(name: str) -> Any:
    module, _, short = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module or "torch.optim"), short)
    except (ImportError, AttributeError) as error:
        problem = f"torch.optim has no class {name!r}; give the full name, such as some.module.Lion"
        if module:
            problem = (
                f"optimizer class {name!r} cannot be imported ({error}); correct it, or leave it "
                "out: load then compares no class"
            )
        raise CheckpointError(problem) from None


def _listed(keys: set[Any]) -> str:
    return ", ".join(sorted(map(repr, keys)))
