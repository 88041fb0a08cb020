"""Which layout an optimizer class needs."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.plan import Layout

ELEMENT_WISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.ASGD,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    }
)
"""Classes whose update of an element depends on that element's history alone."""


def kind_named(cls: type) -> str:
    """The name by which a class is known where there is only text."""
    return f"{cls.__module__}.{cls.__qualname__}"


def layout_for(optimizer_class: Any, world_size: int) -> Layout:
    """The layout in which sharding `optimizer_class` changes no number.

    Known element-wise classes may be sliced. Every other class, subclasses of the known ones
    included, is given whole tensors.

    Raises:
        ValueError: if the class couples all parameters, so that of several ranks none can update
            its own alone.
    """
    coupled = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.LBFGS)
    if coupled and world_size > 1:
        raise ValueError(
            f"{optimizer_class.__name__} couples all parameters in one line search, so its state "
            "cannot be divided among ranks; use it unsharded on every rank"
        )
    return "sliced" if optimizer_class in ELEMENT_WISE else "whole"


def choose_layout(layout: str, optimizer_class: Any, world_size: int) -> Layout:
    """The layout that was asked for, or the one that the class needs.

    Raises:
        ValueError: if it is none, or the class cannot be sharded.
    """
    needed = layout_for(optimizer_class, world_size)
    if layout == "auto":
        return needed
    if layout not in ("sliced", "whole"):
        raise ValueError(f"layout has to be 'auto', 'sliced' or 'whole', not {layout!r}")
    return layout  # type: ignore[return-value]
