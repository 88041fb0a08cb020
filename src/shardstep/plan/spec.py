"""The description of a parameter that a plan is made from: integers, names and a dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

Layout = Literal["sliced", "whole"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, in words that are the same on every rank.

    Attributes:
        name: the user's name for it, or `"param 3"` by its place in the optimizer.
        shape: its logical shape.
        stride: its strides. Elements are planned in memory order, so two ranks with different
            memory formats would exchange garbage.
        dtype: its dtype.
        device: device type and ordinal of first appearance, such as `"cuda#1"`. The device index
            itself differs between ranks.
        group: index of the parameter group it belongs to.
        trainable: whether it is balanced and communicated.
        layout: `"sliced"` if it may be cut anywhere, `"whole"` if it may not be cut.
        cost: operations of a step on all of it, to balance parameters that are not cut. If 0, its
            bytes count instead.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    group: int
    trainable: bool = True
    layout: Layout = "sliced"
    cost: int = 0

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        state = "" if self.trainable else ", frozen"
        state += ", whole" if self.layout == "whole" else ""
        dtype = str(self.dtype).removeprefix("torch.")
        stride = "" if self.stride == contiguous(self.shape) else f", stride {self.stride}"
        return (
            f"{self.name!r} (shape {self.shape}, {dtype}, {self.device}{stride}, "
            f"group {self.group}{state})"
        )

    @staticmethod
    def of(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> ParamSpec:
        """Describe a contiguous, trainable parameter of group 0 on the CPU."""
        return ParamSpec(name, shape, contiguous(shape), dtype, "cpu#0", 0)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor of this shape in C order."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
