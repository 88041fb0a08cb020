"""The norm and the finiteness of all gradients, which are sharded across ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardstep.comm import Comm, Operation
from shardstep.params.dtensor import full_value


def gather_scalar(comm: Comm, own: torch.Tensor, operation: Operation) -> torch.Tensor:
    """Return every rank's number, in rank order. Called on every rank."""
    everyone = torch.zeros(comm.world_size, dtype=own.dtype, device=own.device)
    everyone[comm.group_rank] = own
    comm.all_gather(everyone, range(comm.world_size + 1), operation).wait()
    return everyone


def clip_norm(
    comm: Comm,
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """Clip the gradients of all ranks' `tensors` by their total norm, each counted once.

    Called on every rank, whether or not it has any. Returns the norm on `device` and in `dtype`. If
    asked to and the norm is not finite, every rank raises before anything is scaled.
    """
    # Torch would raise for the largest element of an empty gradient, on its owner only.
    with_grad = [t for t in tensors if t.grad is not None and t.grad.numel()]
    own = torch.zeros((), dtype=dtype, device=device)
    if with_grad:
        grads = [tensor.grad for tensor in with_grad]
        own = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)  # type: ignore[arg-type]
    everyone = gather_scalar(comm, own.to(device=device, dtype=dtype), Operation.CLIP)
    norm: torch.Tensor = torch.linalg.vector_norm(everyone, norm_type)
    refuse_nonfinite(norm, norm_type, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm, foreach)
    return norm


def wide_norm(
    params: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], norm_type: float
) -> torch.Tensor:
    """Return the norm of the gradients of `params`, each computed in the dtype given for it.

    Called on every rank of a mesh if there are DTensors among them: these count with all parts.
    """
    norms = [
        full_value(torch.linalg.vector_norm(param.grad.detach(), norm_type, dtype=dtype)).to(
            params[0].device
        )
        for param, dtype in zip(params, dtypes, strict=True)
        if param.grad is not None and param.grad.numel()
    ]
    if not norms:
        return torch.zeros((), device=params[0].device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def refuse_nonfinite(norm: torch.Tensor, norm_type: float, error_if_nonfinite: bool) -> None:
    """Raise if asked to and the norm is not finite."""
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so they "
            "cannot be clipped; to scale them all the same, pass error_if_nonfinite=False"
        )


def unscale(
    comm: Comm,
    grads: Sequence[torch.Tensor],
    found_inf: torch.Tensor,
    inv_scale: torch.Tensor,
) -> None:
    """Multiply `grads` by `inv_scale`, and set `found_inf` on every rank if any rank found one.

    Called on every rank, whether or not it has any.
    """
    if grads:
        torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found_inf, inv_scale)
    found_inf.copy_(gather_scalar(comm, found_inf.reshape(()), Operation.UNSCALE).max())
