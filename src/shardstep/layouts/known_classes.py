"""Classes whose layout needs no probe, and options that no layout can honour."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.local.multi_class import CLASS_KEY
from shardstep.local.sandbox import sandbox
from shardstep.params.inputs import unwrap_partial
from shardstep.plan import Layout

_NAMES = "SGD Adam AdamW Adamax NAdam RAdam Adadelta Adagrad ASGD RMSprop Rprop"
ELEMENT_WISE: frozenset[Any] = frozenset(getattr(torch.optim, name) for name in _NAMES.split())
"""Classes known to be element-wise. A test compares this with the probe."""


def is_element_wise(optimizer_class: Any) -> bool:
    """Return True for classes known to be element-wise. Functions that make them may add hooks."""
    plain = unwrap_partial(optimizer_class)
    return isinstance(plain, type) and plain in ELEMENT_WISE


def declared_layout(recipe: OptimizerRecipe, construct: bool) -> Layout | None:
    """Return the `shardstep_layout` that a class declares; with `construct`, one that is made."""
    plain = unwrap_partial(recipe.optimizer_class)
    declared: Layout | None = getattr(plain, "shardstep_layout", None)
    if declared is None and construct and not isinstance(plain, type):
        # The probe reports exceptions.
        with sandbox(plain, torch.device("cpu")), contextlib.suppress(Exception):
            made = recipe.make([[torch.nn.Parameter(torch.zeros(2, 2))]], torch.device("cpu"))
            declared = getattr(made, "shardstep_layout", None)
    if declared not in (None, "sliced", "whole"):
        raise ValueError(
            f"{recipe.name}.shardstep_layout must be 'sliced' or 'whole', not {declared!r}"
        )
    return declared


def refuse_per_parameter_options(optimizer_class: Any) -> None:
    """Raise `ValueError` if bitsandbytes has options for single parameters of this class.

    It finds them by `id` or position in the group, which differ for the views of a rank.
    """
    plain = unwrap_partial(optimizer_class)
    library: Any = sys.modules.get("bitsandbytes.optim.optimizer")
    base = getattr(library, "Optimizer8bit", None)
    if base is None or not isinstance(plain, type):
        return
    manager = library.GlobalOptimManager.get_instance()
    options = manager.pid2config or manager.index2config or manager.module_weight_config_triple
    if options and issubclass(plain, base):
        raise ValueError(
            "bitsandbytes' GlobalOptimManager has options for single parameters (StableEmbedding "
            f"sets some), which {plain.__name__} cannot find on a rank; clear its pid2config, "
            "index2config and module_weight_config_triple, and give those parameters a group with "
            f"its own {CLASS_KEY!r}"
        )
