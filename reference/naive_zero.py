"""ZeRO as plainly as it can be written: the oracle of the tests.

Two versions, each with one way of dividing the state and nothing clever in it:

- `NaiveZero` deals whole parameters round-robin to the ranks of a process group; every rank steps
  on what it was dealt, and then every parameter is broadcast by its owner.
- `SlicedZero` plays all ranks itself, without a process group: every parameter is cut in aligned
  slices, rank after rank steps on its slices of its own copy of the model, and then every slice is
  copied from its owner's model to everybody's.

Neither is fast or sparing with memory. Both step an unmodified optimizer class on tensors that are
obviously the right ones, so what they compute is obviously right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

Group = Mapping[str, Any]

SLICE_UNIT = 64
"""Slices start at multiples of this many elements, so that vector kernels treat the elements of a
slice as they treat the same elements of the whole."""


class NaiveZero:
    """One rank of a ZeRO that owns whole parameters, dealt round-robin.

    Args:
        groups: the parameter groups, the same on every rank.
        optimizer_class: what steps on this rank's parameters.
        process_group: the ranks; the default group if None.
        **defaults: options for `optimizer_class`.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        self._process_group = process_group
        self._params: list[torch.Tensor] = [p for group in groups for p in group["params"]]
        num_ranks = dist.get_world_size(process_group)
        self._owners = [number % num_ranks for number in range(len(self._params))]
        rank = dist.get_rank(process_group)
        mine = {id(p) for p, owner in zip(self._params, self._owners, strict=True) if owner == rank}
        self.optim = optimizer_class(
            [
                {**group, "params": [p for p in group["params"] if id(p) in mine]}
                for group in groups
            ],
            **defaults,
        )

    def step(self) -> None:
        """Step on this rank's parameters and fetch all others. Called on every rank."""
        self.optim.step()
        for param, owner in zip(self._params, self._owners, strict=True):
            if param.numel():
                dist.broadcast(param.detach(), group=self._process_group, group_src=owner)


class SlicedZero:
    """All ranks of a ZeRO that owns slices, played one after the other in this process.

    Args:
        groups: the parameter groups; the parameters are those of rank 0, the other ranks get
            copies of them.
        optimizer_class: what steps on each rank's slices; has to be element-wise.
        num_ranks: how many ranks to play.
        **defaults: options for `optimizer_class`.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        optimizer_class: Callable[..., Optimizer],
        num_ranks: int,
        **defaults: Any,
    ) -> None:
        params: list[torch.Tensor] = [p for group in groups for p in group["params"]]
        self._replicas = [params] + [copy.deepcopy(params) for _ in range(num_ranks - 1)]
        # Slice r of each parameter, in rank r's own copy of it: what rank r steps on.
        self._slices = [
            [torch.nn.Parameter(_slice(param, rank, num_ranks)) for param in replica]
            for rank, replica in enumerate(self._replicas)
        ]
        self.optims = []
        for slices in self._slices:
            queue = iter(slices)
            local = [
                {**group, "params": [next(queue) for _ in group["params"]]} for group in groups
            ]
            self.optims.append(optimizer_class(local, **copy.deepcopy(defaults)))

    def step(self) -> None:
        """Step every rank on its slices, with the gradients of rank 0, and spread the result."""
        num_ranks = len(self._replicas)
        for rank, (slices, optim) in enumerate(zip(self._slices, self.optims, strict=True)):
            for param, piece in zip(self._replicas[0], slices, strict=True):
                piece.grad = None if param.grad is None else _slice(param.grad, rank, num_ranks)
            optim.step()
        for owner, slices in enumerate(self._slices):
            for replica in self._replicas:
                for param, piece in zip(replica, slices, strict=True):
                    _slice(param, owner, num_ranks).copy_(piece.detach())


def _slice(tensor: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """The part of a contiguous tensor that `rank` owns, as a flat view."""
    num_units = -(-tensor.numel() // SLICE_UNIT)
    numel = -(-num_units // num_ranks) * SLICE_UNIT
    return tensor.detach().view(-1)[rank * numel : (rank + 1) * numel]
