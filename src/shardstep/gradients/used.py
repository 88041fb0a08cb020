"""Tracks which parameters had a gradient on any rank.

The optimizer skips a parameter without a gradient, as under DDP. Whether a parameter had one on any
rank travels with each round of reductions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardstep.comm import Comm, Work


class UsedParams:
    """The parameters that had a gradient since the gradients were cleared."""

    def __init__(self, comm: Comm, trained: Sequence[int], device: torch.device) -> None:
        self._comm = comm
        self._trained = trained
        self._device = device
        self._here: set[int] = set()
        # One entry per round: the flags of all ranks.
        self._told: list[tuple[Work, torch.Tensor]] = []
        # The first entry that counts, for parameters whose gradient was cleared in between.
        self._cleared_at: dict[int, int] = {}

    def add(self, params: Iterable[int]) -> None:
        """Note that these had a gradient on this rank."""
        self._here.update(params)

    def clear(self, param: int) -> None:
        """Forget every earlier gradient of `param`."""
        self._here.discard(param)
        if self._told:
            self._cleared_at[param] = len(self._told)

    def clear_all(self) -> None:
        """Forget every gradient."""
        for work, _ in self._told:
            work.wait()
        self._told.clear()
        self._cleared_at.clear()
        self._here.clear()

    def tell(self) -> None:
        """Tell every rank which parameters had a gradient here. Called on every rank."""
        size = len(self._trained)
        if not size:
            return
        everyone = torch.zeros(self._comm.world_size * size, dtype=torch.uint8, device=self._device)
        own = everyone[self._comm.group_rank * size : (self._comm.group_rank + 1) * size]
        if len(self._here) == size:
            own.fill_(1)
        else:
            flags = [index in self._here for index in self._trained]
            own.copy_(torch.tensor(flags, dtype=torch.uint8, device="cpu"))
        cuts = range(0, everyone.numel() + 1, size)
        self._told.append((self._comm.all_gather(everyone, cuts), everyone))

    def fold(self) -> None:
        """Merge the flags of all rounds so far into one entry, to bound their number."""
        if len(self._told) < 2:
            return
        size = len(self._trained)
        merged = torch.zeros_like(self._told[0][1]).view(-1, size)
        for number, (work, flags) in enumerate(self._told):
            work.wait()
            merged |= flags.view(-1, size)
            cleared = [param for param, at in self._cleared_at.items() if at == number + 1]
            if cleared:
                merged[:, [self._trained.index(param) for param in cleared]] = 0
        self._told = [(work, merged.view(-1))]
        self._cleared_at.clear()

    def among(self, params: set[int]) -> set[int]:
        """Return those of `params` that have a gradient on any rank."""
        for work, _ in self._told:
            work.wait()
        used = params & self._here
        if used != params:
            # Reading the flags synchronises an accelerator, so do it only if they matter.
            size = len(self._trained)
            for number, (_, flags) in enumerate(self._told):
                told = flags.view(-1, size).any(dim=0).tolist()
                used |= {
                    index
                    for index, flag in zip(self._trained, told, strict=True)
                    if flag and index in params and number >= self._cleared_at.get(index, 0)
                }
        return used

    def nowhere(self) -> bool:
        """Return whether no parameter has a gradient on any rank."""
        return not self._here and not self.among(set(self._trained))
