"""Finds gradients that nobody synchronised, in the first steps of drop-in mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardstep.comm import Comm, all_gather_json
from shardstep.params.dtensor import is_dtensor
from shardstep.plan import ParamSpec

PARAMS = 4
ELEMENTS = 16
STEPS = 2
TOLERANCE = 1e-3
"""Sums over ranks may round differently on each. The gradients of different batches differ more."""


class SynchronisedCheck:
    """A comparison of a few gradients between ranks, in the first steps."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._steps_left = STEPS if comm.world_size > 1 else 0

    def check(self, specs: Sequence[ParamSpec], params: Sequence[torch.Tensor]) -> None:
        """Raise on every rank if gradients differ. Called on every rank, before each step.

        Raises:
            RuntimeError: naming the parameter and the ranks.
        """
        if not self._steps_left:
            return
        self._steps_left -= 1
        trained = [(s.name, p) for s, p in zip(specs, params, strict=True) if s.trainable]
        few = trained[:: max(1, len(trained) // PARAMS)]
        answers = all_gather_json(self._comm, [_sample(param) for _, param in few])
        for (name, _), *samples in zip(few, *answers, strict=True):
            given = {rank: torch.tensor(each) for rank, each in enumerate(samples) if each}
            first = min(given, default=0)
            for rank, sample in given.items():
                size = max(sample.norm(), given[first].norm())
                if (sample - given[first]).norm() > TOLERANCE * size:
                    raise RuntimeError(
                        f"the gradient of parameter {name!r} differs between ranks {first} and "
                        f"{rank}: without module=, gradients have to be synchronised before "
                        "step(); call the DistributedDataParallel wrapper, not the module in it, "
                        "or pass module= and no DDP"
                    )


def _sample(param: torch.Tensor) -> list[float]:
    """Return some elements of a gradient; none where there is no gradient to compare."""
    grad = param.grad
    if grad is None or is_dtensor(grad) or grad.layout is not torch.strided or not grad.numel():
        return []
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    flat = real.detach().flatten()
    values = flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].float().cpu()
    return list(values.nan_to_num(0.0, 0.0, 0.0).tolist())
