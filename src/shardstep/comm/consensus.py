"""Checks that all ranks are about to do the same thing, before anybody waits for anybody.

A rank that was given other parameters than its peers would issue other collectives than they do,
and everybody would hang. So each rank first says, in a few lines of text, what it holds; the texts
are compared on every rank, and every rank raises if they differ or if any rank failed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shardstep.comm.api import Comm, all_gather_json

T = TypeVar("T")
J = TypeVar("J")


def check_same_on_all_ranks(
    comm: Comm, what: str, make: Callable[[], tuple[T, Sequence[str]]]
) -> T:
    """Make something on every rank and make sure that it is the same on all.

    Called on every rank.

    Args:
        comm: the ranks that have to agree.
        what: what is being made, for the error message.
        make: returns the thing and its description, line by line. What it raises is raised again
            on this rank, and reported as a `RuntimeError` on the others.

    Returns:
        What `make` returned.
    """
    made: list[T] = []
    lines: list[str] = []

    def describe() -> str:
        thing, text = make()
        made.append(thing)
        lines.extend(text)
        # The texts themselves are exchanged only if something is wrong: the digest is short, the
        # texts of a large model on a thousand ranks are not.
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    if len(set(run_on_all_ranks(comm, what, describe))) > 1:
        raise ValueError(_difference(what, all_gather_json(comm, lines)))
    return made[0]


def run_on_all_ranks(comm: Comm, what: str, act: Callable[[], J]) -> list[J]:
    """Do something on every rank, and go on only if no rank failed.

    Called on every rank.

    Args:
        comm: the ranks.
        what: what is being done, for the error message.
        act: does it, and returns what JSON can hold. What it raises is raised again on this rank,
            and reported as a `RuntimeError` on the others.

    Returns:
        What `act` returned on each rank, in rank order.
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
        raise RuntimeError(f"{lost} (note: {what} has to be done on every rank)") from (
            error or lost
        )
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
    """Names the first line in which some rank differs from rank 0."""
    first: tuple[int, int] | None = None
    for group_rank, text in enumerate(texts[1:], start=1):
        for line in range(max(len(text), len(texts[0]))):
            if text[line : line + 1] != texts[0][line : line + 1]:
                if first is None or line < first[0]:
                    first = (line, group_rank)
                break
    assert first is not None
    line, group_rank = first
    here, there = (
        text[line] if line < len(text) else "nothing" for text in (texts[0], texts[group_rank])
    )
    return (
        f"{what} needs the same on every rank, but rank 0 has {here} where rank {group_rank} has "
        f"{there}; build the model and the optimizer alike on all ranks"
    )
