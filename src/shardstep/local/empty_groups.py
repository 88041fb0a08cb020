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


def stand_in(like: torch.Tensor, dtype: torch.dtype, has_gradient: bool) -> torch.nn.Parameter:
    """A parameter like another one, but in `dtype` and without elements."""
    empty = torch.empty((0, *like.shape[1:]), dtype=dtype, device=like.device)
    param = torch.nn.Parameter(empty, requires_grad=like.requires_grad)
    if has_gradient:
        param.grad = torch.empty_like(empty)
    return param


@contextlib.contextmanager
def filled(opt: Optimizer, stand_ins: Mapping[int, torch.nn.Parameter]) -> Iterator[None]:
    """While this lasts, these groups have a parameter without elements.

    Args:
        opt: the optimizer.
        stand_ins: the parameters, by number of the group.
    """
    given = [(opt.param_groups[number]["params"], param) for number, param in stand_ins.items()]
    for params, param in given:
        params.append(param)
    try:
        yield
    finally:
        inside = [value for value in vars(opt).values() if isinstance(value, Optimizer)]
        for params, param in given:
            params.pop()
            for each in (opt, *inside):
                each.state.pop(param, None)
