"""Uneven inputs: what a rank that has run out of data does while the others go on."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook


class _ZeROJoinHook(JoinHook):
    """Shadows the steps of the ranks that still have data.

    A joined rank goes on owning its part of the state, so it has to go on updating it: it takes
    the step itself, with the gradients that its gradients' keeper (DDP, say) has shadowed before.

    Args:
        step: one optimizer step, less the notice to the join context, which only ranks that still
            have data give.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step

    def main_hook(self) -> None:
        """Take the step that the other ranks are taking. Called on every joined rank."""
        self._step()


class _ShadowHook(JoinHook):
    """Shadows whatever the ranks that still have data announce, one thing at a time.

    Args:
        shadow: takes part in the next thing announced.
    """

    def __init__(self, shadow: Callable[[], None]) -> None:
        self._shadow = shadow

    def main_hook(self) -> None:
        """Take part. Called on every joined rank."""
        self._shadow()
