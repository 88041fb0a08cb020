"""The optimizer and the model that a checkpoint is saved from or loaded into: checked and named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardstep.comm import Comm, connect
from shardstep.params.dtensor import NO_OFFSETS, refuse_dtensors
from shardstep.params.names import names_in, strip_wrapper_prefixes, unwrapped, unwrapped_name

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer

EXTRA_STATE = "_extra_state"
"""Torch's name for the state that a module gets and sets by functions, tensor or not."""


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of Accelerate, Lightning and Fabric.

    They hold it as `optimizer`. Some also imitate its class, so `isinstance` cannot tell.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def optimizer_and_comm(given: Any) -> tuple[ZeroRedundancyOptimizer | None, Comm]:
    """Return the optimizer without wrappers, and the ranks that save or load together."""
    from shardstep.optimizer import ZeroRedundancyOptimizer

    optimizer = unwrapped_optimizer(given)
    if optimizer is not None and not isinstance(optimizer, ZeroRedundancyOptimizer):
        raise TypeError(
            "optimizer must be a ZeroRedundancyOptimizer of this library, not "
            f"{type(optimizer).__name__}; the state dict of another one becomes a checkpoint with "
            "checkpoint.import_state_dict"
        )
    return optimizer, connect(None) if optimizer is None else optimizer.shards.comm


def check_model(model: object) -> None:
    """Raise `TypeError` if `model` is given and not a module."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, not {type(model).__name__}; pass the module, "
            "and state dicts of anything else as extra"
        )


def refuse_dtensor_params(
    optimizer: ZeroRedundancyOptimizer | None, model: torch.nn.Module | None = None
) -> None:
    """Raise `TypeError` if a parameter of the optimizer or of the model is a DTensor."""
    if model is not None:
        refuse_dtensors(unwrapped(model).named_parameters(), NO_OFFSETS)
    if optimizer is not None:
        names = (spec.name for spec in optimizer.plan.specs)
        refuse_dtensors(zip(names, optimizer.shards.params, strict=True), NO_OFFSETS)


def names_of(
    optimizer: ZeroRedundancyOptimizer, model: torch.nn.Module | None
) -> tuple[list[str], bool]:
    """Return the names of an optimizer's parameters, and whether they are numbers only.

    The model's name for a parameter precedes the optimizer's. A parameter that neither names is
    called by its number.
    """
    params = optimizer.shards.params
    in_model = names_in(unwrapped(model)) if model is not None else {}
    pairs = zip(params, optimizer.plan.specs, strict=True)
    known = [in_model.get(id(param)) or spec.name for param, spec in pairs]
    # Names from the unwrapped model carry no DDP prefix.
    names = strip_wrapper_prefixes(known, ddp=not any(id(param) in in_model for param in params))
    numbers = [f"param {index}" for index in range(len(names))]
    if len(set(names)) != len(names):
        # Names from two models that are trained together: only numbers tell them apart.
        return numbers, True
    return names, names == numbers


class ModelState(NamedTuple):
    """A model's state dict, sorted."""

    tensors: dict[str, Any]
    aliases: dict[str, str]
    extra: dict[str, Any]


def split_state_dict(state_dict: Mapping[str, Any]) -> ModelState:
    """Sort the entries of a model's state dict."""
    state = ModelState({}, {}, {})
    places: dict[Any, str] = {}
    for name, value in state_dict.items():
        name = unwrapped_name(name)
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == EXTRA_STATE:
            state.extra[name] = value
            continue
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta:
            raise TypeError(
                f"model tensor {name!r} is a {type(value).__name__} ({value.layout}, on "
                f"{value.device}); a checkpoint holds plain dense tensors"
            )
        form = (value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())
        place = (value.data_ptr(), value.device, *form)
        if value.numel() and place in places:
            state.aliases[name] = places[place]
        else:
            places[place] = name
            state.tensors[name] = value
    return state
