"""DTensor parameters: their local parts, and refusals of operations that need the whole.

A DTensor parameter is planned, stepped on and gathered as its local tensor. That is right for
element-wise classes, among ranks that hold the same part. The ranks of a data-parallel group do;
tensor-parallel ranks hold different parts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is a DTensor."""
    # The import takes long, and a program that has a DTensor has done it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, not a copy; any other tensor itself."""
    # The usual case, taken for every parameter at every step.
    if type(tensor) is torch.nn.Parameter or not is_dtensor(tensor):
        return tensor
    # The tensor itself: `to_local` makes another one of a Parameter, from torch 2.13 on.
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    # The result of a collective in flight is wrapped.
    unfinished = sys.modules["torch.distributed._functional_collectives"].AsyncCollectiveTensor
    part: torch.Tensor = local.wait() if isinstance(local, unfinished) else local
    return part


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a DTensor; any other tensor itself. Called on every rank of its mesh."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of this rank's part of a DTensor parameter, if there is one.

    Called on every rank of the parameter's mesh. Autograd may place a gradient differently from its
    parameter: the gradient of a replicated weight behind a sharded activation is partial.
    """
    whole: Any = param
    grad: Any = param.grad
    if grad is not None and is_dtensor(grad) and grad.placements != whole.placements:
        grad = grad.detach().redistribute(whole.device_mesh, whole.placements)
    return None if grad is None else local_part(grad)


def num_parts(param: torch.Tensor) -> int:
    """Return the number of parts of a DTensor parameter on different ranks; otherwise 1."""
    return math.prod(size for _, _, size in _divisions(param))


def describe_part(param: torch.Tensor, name: str) -> list[str]:
    """Describe this rank's part of a DTensor in one line: parts of one shape may differ."""
    if not is_dtensor(param):
        return []
    parts = [f"part {place} of {size} by {how}" for how, place, size in _divisions(param)]
    return [
        f"{' and '.join(parts) or 'all'} of the DTensor {name!r} of shape {tuple(param.shape)} "
        "(process_group must be one of ranks that hold the same part, the data-parallel group)"
    ]


def check_placements(param: torch.Tensor, name: str) -> None:
    """Raise `ValueError` if `param` is a DTensor with partial placements."""
    if any(placement.is_partial() for placement in _placements(param)):
        raise ValueError(
            f"parameter {name!r} is a DTensor with placements {_placements(param)}: each rank "
            "holds one term of a sum, which no optimizer can step on; redistribute it to "
            "Replicate() or Shard()"
        )


def refuse_dtensors(named: Iterable[tuple[str, torch.Tensor]], why: str) -> None:
    """Raise `TypeError` for the first DTensor in `named`, with the reason and the remedy."""
    for name, tensor in named:
        if is_dtensor(tensor):
            raise TypeError(f"parameter {name!r} is a DTensor: {why}")


NO_OFFSETS = (
    "a checkpoint of one process group does not know the offset of its part in the whole; save "
    "state_dict() after consolidate_state_dict() in a file for each tensor-parallel rank"
)
"""The reason why checkpoints refuse DTensors."""


def refuse_part(name: str, param: torch.Tensor, optimizer: str) -> NoReturn:
    """Raise `ValueError`: a class that needs whole tensors cannot step on a part of one."""
    raise ValueError(
        f"parameter {name!r} is a DTensor with placements {_placements(param)}: a rank has one of "
        f"{num_parts(param)} parts, but in layout 'whole' {optimizer} needs all of a tensor; give "
        "this parameter to an element-wise class in a separate group, or to an unsharded "
        "optimizer; if this class is element-wise, pass layout='sliced'"
    )


def _placements(param: torch.Tensor) -> Sequence[Any]:
    return param.placements if is_dtensor(param) else ()  # type: ignore[attr-defined]


def _divisions(param: torch.Tensor) -> list[tuple[str, int | None, int]]:
    """Return placement, coordinate and size of each mesh dimension that divides `param`."""
    divisions: list[tuple[str, int | None, int]] = []
    for dim, placement in enumerate(_placements(param)):
        mesh = param.device_mesh  # type: ignore[attr-defined]
        if not placement.is_replicate() and mesh.size(dim) > 1:
            place = mesh.get_coordinate()
            divisions.append((str(placement), place and place[dim], mesh.size(dim)))
    return divisions
