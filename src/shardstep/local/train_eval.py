"""The `train()` and `eval()` modes of optimizers, such as schedule-free ones.

Such a class keeps other weights for evaluation than for training. Some take no step before
`train()` was called.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

from shardstep.local.multi_class import parts_of

MODES = ("train", "eval")


def has_train_eval(opt: Optimizer) -> bool:
    """Return True if `opt`, or one of its parts, has both modes."""
    return any(map(_has_both, parts_of(opt)))


def set_mode(opt: Optimizer, mode: str, /, *args: Any, **kwargs: Any) -> None:
    """Switch every part of `opt` that has modes to `mode`."""
    for part in parts_of(opt):
        if _has_both(part):
            getattr(part, mode)(*args, **kwargs)


def start_training(opt: Optimizer) -> bool:
    """Switch `opt` to training. Return True if it has modes that work.

    A wrapper may forward the call to an inner optimizer without modes, which raises.
    """
    try:
        set_mode(opt, "train")
    except Exception:
        return False
    return has_train_eval(opt)


def _has_both(opt: Optimizer) -> bool:
    try:
        for mode in MODES:
            # A method of the same name with required arguments is something else.
            inspect.signature(getattr(opt, mode)).bind()
    except (AttributeError, TypeError, ValueError):
        return False
    return True
