"""The planner's description of a parameter: integers, names and a dtype, no tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from shardstep.plan.box import Interval

Layout = Literal["sliced", "whole"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A description of one parameter, equal on every rank.

    Attributes:
        stride: compared between ranks, since plans number elements in memory order.
        device: device type and ordinal of first appearance, such as `"cuda#1"`. Ranks use different
            device indices for the same role, so the index itself cannot be compared.
        cost: cost of a step on all of it, which balances `whole` parameters. 0 if unknown; its
            bytes count then.
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
    def whole(self) -> Interval:
        """The interval of all its elements."""
        return Interval(0, self.numel)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
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
        """Return a contiguous, trainable parameter of group 0 on the CPU, for plans on paper."""
        return ParamSpec(name, shape, contiguous(shape), dtype, "cpu#0", 0)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor of this shape in C order."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
