"""What a parameter is to the planner: integers, names and a dtype, no tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

Layout = Literal["sliced", "whole"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, described so that every rank describes it in the same words.

    Attributes:
        name: the user's name for it, or `"param 3"` by its place in the optimizer.
        shape: its logical shape.
        stride: its strides. A parameter is planned in the order its elements have in memory, so
            two ranks that hold it in different memory formats would exchange garbage.
        dtype: its dtype.
        device: device type and ordinal of first appearance, such as `"cuda#1"`. Ranks of one run
            use different device indices for the same role, so the index itself cannot be compared.
        group: index of the parameter group it belongs to.
        trainable: whether it takes part in the balance and in communication.
        layout: `"sliced"` if it may be cut anywhere, `"whole"` if it may not be cut.
        cost: what a step on all of it costs, to balance by where it is not cut; in operations, say.
            0 where nothing is known: its bytes are taken then.
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
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
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
        """A contiguous, trainable parameter of group 0 on the CPU: what a plan on paper needs."""
        return ParamSpec(name, shape, contiguous(shape), dtype, "cpu#0", 0)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor of this shape in C order."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
