"""Placeholders for parameter groups that are empty on a rank.

An unsharded optimizer has no empty groups. Some classes skip an empty group and do not count steps
in it, while other ranks do. Others raise. The probe finds the classes that need placeholders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch.optim import Optimizer


def empty_param(like: torch.Tensor, dtype: torch.dtype, has_gradient: bool) -> torch.nn.Parameter:
    """Return a parameter without elements, on the device of `like` and with its dimensions."""
    empty = torch.empty((0, *like.shape[1:]), dtype=dtype, device=like.device)
    param = torch.nn.Parameter(empty, requires_grad=like.requires_grad)
    if has_gradient:
        param.grad = torch.empty_like(empty)
    return param


@contextlib.contextmanager
def fill_empty_groups(
    opt: Optimizer, placeholders: Mapping[int, torch.nn.Parameter]
) -> Iterator[None]:
    """Put `placeholders`, by number of the group, into groups of `opt` until the context ends."""
    filled = [(opt.param_groups[number]["params"], param) for number, param in placeholders.items()]
    for params, param in filled:
        params.append(param)
    try:
        yield
    finally:
        inner = [value for value in vars(opt).values() if isinstance(value, Optimizer)]
        for params, param in filled:
            params.pop()
            for each in (opt, *inner):
                each.state.pop(param, None)
