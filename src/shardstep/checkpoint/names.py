"""What parameters are called in a checkpoint, whatever wrapper the model is in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from shardstep.params.names import names_in, strip_wrapper_prefixes, unwrapped

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer


def check_model(model: object) -> None:
    """Make sure that a model is one.

    Raises:
        TypeError: if it is something else, such as its state dict.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model has to be a torch.nn.Module, not a {type(model).__name__}; pass the module, "
            "and state dicts of anything else as extra"
        )


def tensors_of(
    optimizer: ZeroRedundancyOptimizer | None, model: torch.nn.Module | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of an optimizer and a model, with names to call them by in a message."""
    if model is not None:
        yield from unwrapped(model).named_parameters()
    if optimizer is not None:
        yield from zip(
            (spec.name for spec in optimizer.plan.specs), optimizer.shards.params, strict=True
        )


def names_of(
    optimizer: ZeroRedundancyOptimizer, model: torch.nn.Module | None
) -> tuple[list[str], bool]:
    """The names of an optimizer's parameters, and whether they are numbers only.

    A name that the model knows counts before one that the optimizer was given; a parameter that
    neither has a name for is called by its number.
    """
    in_model = names_in(unwrapped(model)) if model is not None else {}
    pairs = zip(optimizer.shards.params, optimizer.plan.specs, strict=True)
    known = [in_model.get(id(param)) or spec.name for param, spec in pairs]
    # DDP's prefix is none of the names that the model itself has.
    own = any(id(param) in in_model for param in optimizer.shards.params)
    names = strip_wrapper_prefixes(known, ddp=not own)
    numbers = [f"param {index}" for index in range(len(names))]
    if len(set(names)) != len(names):
        # Names from two models that are trained together: only their places tell them apart.
        return numbers, True
    return names, names == numbers
