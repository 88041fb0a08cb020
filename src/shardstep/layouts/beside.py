"""Whether a class updates a tensor otherwise beside one of another dtype, found by trying it.

Torch's own Adafactor does: what it takes for small, unless it is told, it reads off the first
tensor of a group. Ranks that divide the group have other first tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.layouts.trial import Trial, options_of_its_own, trials
from shardstep.local.sandbox import sandbox
from shardstep.local.train_eval import start_training
from shardstep.params.same_bits import same_bits

SHAPE = (12, 10)

SCALES = (1e-5, 1.0, 1e-2)
"""Of the gradients of one step and of the next: what is small to one dtype is not to another. The
smallest come first, before there is a mean that larger ones have a part in."""


def differs_beside(
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    group_options: Mapping[str, Any],
    dtypes: Sequence[torch.dtype],
    devices: Sequence[torch.device],
) -> tuple[torch.dtype, torch.dtype] | None:
    """Two dtypes that tensors of one group must not have; None if there are none among these.

    Args:
        optimizer_class: the class, or whatever makes an optimizer out of groups and options.
        defaults: options that it is called with.
        group_options: options that its groups have of their own.
        dtypes: those of the group.
        devices: where to try it; further ones only if it does not run on those before.
    """
    for pair in permutations(dtypes, 2):
        for trial in trials(optimizer_class, defaults, group_options, pair[0], devices, ()):
            if trial.sparse:
                continue
            with sandbox(optimizer_class, trial.device):
                try:
                    together = _train(trial, pair, (0, 1))
                    apart = [*_train(trial, pair, (0,)), *_train(trial, pair, (1,))]
                except Exception:
                    continue  # what does not run at all, the user will be told of by the class
            if not all(same_bits(a, b) for a, b in zip(together, apart, strict=True)):
                return pair
            break
    return None


def _train(
    trial: Trial, pair: tuple[torch.dtype, torch.dtype], which: Sequence[int]
) -> list[torch.Tensor]:
    """What becomes of these of two tensors in one group."""
    params = [
        torch.nn.Parameter(_draw(number, -1).to(trial.device, pair[number])) for number in which
    ]
    own = options_of_its_own(trial.group_options, trial.device)
    opt = trial.make([{**own, "params": params}])
    start_training(opt)
    for step, scale in enumerate(SCALES):
        for number, param in zip(which, params, strict=True):
            param.grad = (scale * _draw(number, step)).to(param)
        if trial.closures == "always":
            opt.step(lambda: 1.0)
        else:
            opt.step()
    return [param.detach() for param in params]


def _draw(number: int, step: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * (step + 1) + number)
    return torch.randn(SHAPE, generator=source, device="cpu")
