"""Parameters that are DTensors: what this rank has of them, and what cannot be done with that.

A DTensor parameter is planned, stepped on and gathered as its local tensor. That is right for a
class that treats each element alone, among ranks that hold the same part: those of a data-parallel
group, where tensor-parallel ranks hold different ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    # Who has one has imported this; nobody else is to wait for the import, which takes long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor, in place; any other tensor itself."""
    # By far the most are this, and are asked for at every step.
    if type(tensor) is torch.nn.Parameter or not is_dtensor(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    # The result of a collective that may not be over wraps the tensor that it is going to be in.
    unfinished = sys.modules["torch.distributed._functional_collectives"].AsyncCollectiveTensor
    part: torch.Tensor = local.wait() if isinstance(local, unfinished) else local
    return part


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """All of a DTensor, as a plain tensor; any other tensor itself.

    Called on every rank of its mesh.
    """
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient of this rank's part of a DTensor parameter; None if there is none.

    Autograd may leave a gradient placed otherwise than its parameter: that of a replicated weight
    behind a sharded activation is a sum still to be taken. Called on every rank of the parameter's
    mesh.
    """
    grad: Any = param.grad
    if grad is None:
        return None
    kind: Any = param
    if is_dtensor(grad) and grad.placements != kind.placements:
        grad = grad.detach().redistribute(kind.device_mesh, kind.placements)
    return local_part(grad)


def num_parts(param: torch.Tensor) -> int:
    """Into how many parts a parameter is divided before this library divides it; 1 if it is not."""
    count = 1
    for _, _, size in _divisions(param):
        count *= size
    return count


def describe_part(param: torch.Tensor, name: str) -> list[str]:
    """One line for ranks to compare if `param` is a DTensor: equal shapes may be other elements."""
    if not is_dtensor(param):
        return []
    parts = [f"part {place} of {size} by {how}" for how, place, size in _divisions(param)]
    return [
        f"{' and '.join(parts) or 'all'} of the DTensor {name!r} of shape {tuple(param.shape)} "
        "(process_group has to be one of ranks that hold the same part, the data-parallel group)"
    ]


def check_placements(param: torch.Tensor, name: str) -> None:
    """Make sure that this rank's part of `param`, if it is a DTensor, holds elements of it.

    Raises:
        ValueError: if it holds terms of a sum.
    """
    if any(placement.is_partial() for placement in _placements(param)):
        raise ValueError(
            f"parameter {name!r} is a DTensor with placements {_placements(param)}: what a rank "
            "holds of it is a term of a sum, which no optimizer can step on; redistribute it to "
            "Replicate() or Shard()"
        )


def refuse_dtensors(named: Iterable[tuple[str, torch.Tensor]], why: str) -> None:
    """Raise for the first DTensor among these.

    Args:
        named: tensors with their names.
        why: what cannot be done with it, and what can; follows on "is a DTensor: ".

    Raises:
        TypeError: naming it.
    """
    for name, tensor in named:
        if is_dtensor(tensor):
            raise TypeError(f"parameter {name!r} is a DTensor: {why}")


NO_OFFSETS = (
    "a checkpoint of one process group does not know where its part lies in the whole; save "
    "state_dict() after consolidate_state_dict() in a file for each tensor-parallel rank"
)
"""Why checkpoints refuse DTensors."""


def refuse_part(name: str, param: torch.Tensor, optimizer: str) -> NoReturn:
    """Say that a class that looks at whole tensors cannot be given a part of one.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"parameter {name!r} is a DTensor with placements {_placements(param)}, of which a rank "
        f"has one of {num_parts(param)} parts, but in layout 'whole' {optimizer} is to have all of "
        "a tensor; give this parameter to an element-wise class in a group of its own (or in "
        "layout 'sliced' if this one is), or to an unsharded optimizer"
    )


def _placements(param: torch.Tensor) -> Sequence[Any]:
    return param.placements if is_dtensor(param) else ()  # type: ignore[attr-defined]


def _divisions(param: torch.Tensor) -> list[tuple[str, int | None, int]]:
    """How, at which place and into how many a DTensor is divided, by dimension of its mesh."""
    divisions: list[tuple[str, int | None, int]] = []
    for dim, placement in enumerate(_placements(param)):
        mesh = param.device_mesh  # type: ignore[attr-defined]
        if not placement.is_replicate() and mesh.size(dim) > 1:
            place = mesh.get_coordinate()
            divisions.append((str(placement), place and place[dim], mesh.size(dim)))
    return divisions
