"""Gives groups that are empty on a rank a tensor without elements, while a step lasts.

An unsharded optimizer has no empty groups. Some classes leave such a group out, and do not count
the steps in it that the other ranks count; some do not get along with one at all. The probe tells
which those are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch.optim import Optimizer


@contextlib.contextmanager
def filled(opt: Optimizer, groups: Mapping[int, tuple[torch.Tensor, bool]]) -> Iterator[None]:
    """While this lasts, these groups have a parameter without elements.

    Args:
        opt: the optimizer.
        groups: by number, what the parameter is to be like, and whether it has a gradient.
    """
    given = []
    for number, (like, has_gradient) in groups.items():
        shape = (0, *like.shape[1:])
        param = torch.nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))
        if has_gradient:
            param.grad = torch.empty_like(param)
        opt.param_groups[number]["params"].append(param)
        given.append((opt.param_groups[number]["params"], param))
    try:
        yield
    finally:
        for params, param in given:
            params.pop()
            opt.state.pop(param, None)
