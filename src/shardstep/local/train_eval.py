"""`train()` and `eval()` of optimizers whose model trains on other weights than it is judged by.

Schedule-free classes have both, and some of them take no step before they are told to train.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

from shardstep.local.multi_class import parts_of

MODES = ("train", "eval")


def has_train_eval(opt: Optimizer) -> bool:
    """Whether the optimizer, or one that it is made of, has the two."""
    return any(map(_has_both, parts_of(opt)))


def turn(opt: Optimizer, mode: str, /, *args: Any, **kwargs: Any) -> None:
    """Have the optimizer, or whichever it is made of, go over to a mode; nothing if it has none."""
    for part in parts_of(opt):
        if _has_both(part):
            getattr(part, mode)(*args, **kwargs)


def start_training(opt: Optimizer) -> bool:
    """Have the optimizer train, if it has modes; returns whether it has.

    One that fails has none: it may pass the call on to an optimizer inside that cannot follow.
    """
    try:
        turn(opt, "train")
    except Exception:
        return False
    return has_train_eval(opt)


def _has_both(opt: Optimizer) -> bool:
    return all(_takes_nothing(getattr(opt, mode, None)) for mode in MODES)


def _takes_nothing(method: Any) -> bool:
    """Whether it can be called as it is: what wants to be told more is something else."""
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):
        return False
    return True
