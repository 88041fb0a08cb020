"""A model right after a step, whose parameters are NaN until they are waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from doubles import LateArrival, behind_the_door
from models import ADAMW, MLP_PROBLEM, Kind, Problem, Setup, train, with_zero
from torch import Tensor


class Noted:
    """A wait that is counted, and that may take a while."""

    waits = 0
    seconds = 0.0

    def __init__(self, pending: Any) -> None:
        self._pending = pending
        self._waited = False

    def wait(self) -> None:
        Noted.waits += not self._waited
        self._waited = True
        time.sleep(Noted.seconds)
        self._pending.wait()


class Late(LateArrival):
    """Results are NaN until they are waited for; waits for gathers are counted."""

    def all_gather(self, buffer: Tensor, cuts: Sequence[int], *operation: Any) -> Any:
        return Noted(super().all_gather(buffer, cuts, *operation))


def in_flight(
    double: Any = Late, steps: int = 2, problem: Problem = MLP_PROBLEM, kind: Kind = ADAMW
) -> Setup:
    """A model right after a step, nothing of which has arrived."""
    with behind_the_door(double):
        zero = with_zero(problem.fresh(), kind)
    train(zero, problem, range(steps))
    return zero
