"""Checks that every rank is about to do the same thing, before any rank waits for another.

A rank with other parameters than its peers would issue other collectives, and all would hang. So
every rank raises if the ranks' descriptions of their inputs differ, or if any rank failed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from shardstep.comm.api import Comm, all_gather_json

T = TypeVar("T")
J = TypeVar("J")


class LostRankError(RuntimeError):
    """The ranks could not compare: one is gone, stopped, or somewhere else in the program."""


def check_same_on_all_ranks(
    comm: Comm, what: str, make: Callable[[], tuple[T, Sequence[str]]]
) -> T:
    """Return the thing that `make` returns with its description, line by line.

    Called on every rank. Every rank raises if the descriptions differ, or if any `make` fails.
    """
    made: list[T] = []
    lines: list[str] = []

    def describe() -> str:
        thing, text = make()
        made.append(thing)
        lines.extend(text)
        # The descriptions themselves travel only if they differ. The digest is short; the
        # descriptions of a large model on a thousand ranks are not.
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    if len(set(run_on_all_ranks(comm, what, describe))) > 1:
        raise ValueError(_difference(what, all_gather_json(comm, lines)))
    return made[0]


def run_on_all_ranks(comm: Comm, what: str, act: Callable[[], J]) -> list[J]:
    """Return the results of `act`, which JSON can hold, of all ranks. Called on every rank.

    The error of an `act` is raised on its rank, and reported as a `RuntimeError` on the others.
    """
    error: Exception | None = None
    try:
        mine: list[Any] = [True, act()]
    except Exception as raised:
        error = raised
        mine = [False, f"{type(error).__name__}: {error}"]
    try:
        answers = all_gather_json(comm, mine)
    except RuntimeError as lost:
        cause = error or lost
        raise LostRankError(f"{lost} (note: {what} must be done on every rank)") from cause
    if error is not None:
        raise error
    for group_rank, (succeeded, message) in enumerate(answers):
        if not succeeded:
            raise RuntimeError(
                f"rank {comm.group_rank}: {what} failed on rank {group_rank}, so it fails on every "
                f"rank: {message}"
            )
    return [answer for _, answer in answers]


def _difference(what: str, texts: Sequence[Sequence[str]]) -> str:
    """Name the first line in which a rank differs from rank 0."""
    group_rank, here, there = next(
        (group_rank, lines[0], line)
        for lines in zip_longest(*texts, fillvalue="nothing")
        for group_rank, line in enumerate(lines)
        if line != lines[0]
    )
    return (
        f"{what} needs the same on every rank, but rank 0 has {here} where rank {group_rank} has "
        f"{there}; build the model and the optimizer in the same way on all ranks"
    )
