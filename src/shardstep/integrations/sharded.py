"""The sharded optimizer inside a framework's wrapper, and its `no_sync` on the module."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch.optim import Optimizer

from shardstep.checkpoint.inputs import unwrapped_optimizer
from shardstep.optimizer import ZeroRedundancyOptimizer


def sharded(optimizer: Optimizer) -> ZeroRedundancyOptimizer | None:
    """Return the sharded optimizer that `optimizer` is or wraps; None if there is none."""
    inner = unwrapped_optimizer(optimizer)
    return inner if isinstance(inner, ZeroRedundancyOptimizer) else None


def require_module(optimizer: Optimizer, who: str) -> ZeroRedundancyOptimizer:
    """Return the sharded optimizer that `optimizer` is or wraps, if it has `module=`.

    Raises:
        ValueError: if it is another one, whose gradients would not be synchronised.
    """
    inner = sharded(optimizer)
    if inner is None or inner.mode.module is None:
        raise ValueError(
            f"{who} does not wrap the model in DDP, so it needs a ZeroRedundancyOptimizer with "
            f"module=, got {type(optimizer).__name__}"
            f"{' without module=' if inner is not None else ''}; pass module=, or use DDP"
        )
    return inner


class NoSync:
    """`no_sync()` of an optimizer, to be found on its module as on a DDP wrapper.

    A copy of the module, also in a file, has one that does nothing.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer = weakref.ref(optimizer)

    def __call__(self) -> AbstractContextManager[None]:
        """Return a context in which gradients only accumulate on each rank."""
        optimizer = self.optimizer()
        return nullcontext() if optimizer is None else optimizer.no_sync()

    def __reduce__(self) -> tuple[type, tuple[type]]:
        return partial, (nullcontext,)


def give_no_sync(optimizer: ZeroRedundancyOptimizer) -> None:
    """Put `no_sync` on the optimizer's module, where frameworks look for DDP's."""
    assert optimizer.mode.module is not None
    optimizer.mode.module.no_sync = NoSync(optimizer)  # type: ignore[assignment]


def has_no_sync_of(optimizer: ZeroRedundancyOptimizer) -> bool:
    """Return True if `no_sync` of the optimizer's module is this optimizer's."""
    found = getattr(optimizer.mode.module, "no_sync", None)
    return isinstance(found, NoSync) and found.optimizer() is optimizer
