"""A batch that fails on a rank and is given up on all, against DDP that leaves it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import PROBLEMS, SGD, Setup, rank, world_size
from problems import differing
from scenarios import sharded, unsharded
from torch import Tensor

from shardstep import BatchSkippedError


class Broken(Exception):
    """What a user's code raises."""


FAILS: dict[str, Callable[[int], bool]] = {
    "on rank 0": lambda step: rank() == 0 and step in (2, 5),
    "on the last rank": lambda step: rank() == world_size() - 1 and step in (0, 2),
    "on one after the other": lambda step: rank() == step % 2 and step in (2, 3, 4),
    "on all": lambda step: step == 3,
}


def _fail_in(setup: Setup, where: str, step: int) -> None:
    """Run a batch, and raise at the given place of it."""
    problem = PROBLEMS["conv"]
    if where == "loader":
        raise Broken(where)
    if where == "forward":
        with setup.no_sync():  # the statistics of the batch are taken over all the same
            problem.loss(setup.model, step)
        raise Broken(where)
    loss = problem.loss(setup.model, step)
    handle = list(setup.module.parameters())[2].register_post_accumulate_grad_hook(_raise)
    try:
        loss.backward()
    finally:
        handle.remove()


def _raise(param: Tensor) -> None:
    raise Broken("hook")


def _recovering(
    where: str, which: str, closure: bool, arrange: Callable[[Setup], None], **zero: Any
) -> list[Tensor]:
    """Skip batches on which a rank fails, and return parameters and buffers."""
    setup = sharded("module", PROBLEMS["conv"].fresh(), SGD, zero=zero)
    arrange(setup)
    for step in range(7):

        def batch(step: int = step) -> Tensor:
            setup.opt.zero_grad()
            if FAILS[which](step):
                _fail_in(setup, where, step)
            return setup.backward(step, PROBLEMS["conv"])

        try:
            if closure:
                setup.opt.step(batch)
            else:
                batch()
                setup.opt.step()
        except (Broken, BatchSkippedError):
            setup.opt.recover()
    setup.opt.zero_grad()
    PROBLEMS["conv"].loss(setup.model, 1)
    return [*setup.params, *setup.module.buffers()]


def _skipping(where: str, which: str) -> list[Tensor]:
    """Do the same with DDP, where all ranks know beforehand which batches to skip."""
    setup = unsharded(PROBLEMS["conv"].fresh(), SGD)
    for step in range(7):
        fails = torch.tensor(int(FAILS[which](step)))
        mine = bool(fails)
        torch.distributed.all_reduce(fails)
        if fails:
            if not (mine and where == "loader"):
                PROBLEMS["conv"].loss(setup.module if mine else setup.model.module, step)  # type: ignore[attr-defined]
            continue
        setup.opt.zero_grad()
        setup.backward(step, PROBLEMS["conv"])
        setup.opt.step()
    PROBLEMS["conv"].loss(setup.model, 1)
    return [*setup.params, *setup.module.buffers()]


def differences(
    where: str, arrange: Callable[[Setup], None] = lambda setup: None, **zero: Any
) -> list[str]:
    """Return what differs from DDP if batches fail at a place, on one rank or another."""
    found: list[str] = []
    for number, which in enumerate(FAILS):
        closure = world_size() == 2 and number % 2 == 1
        expected = _skipping(where, which)
        got = _recovering(where, which, closure, arrange, **zero)
        if world_size() == 2:
            found += [f"{which}: {each}" for each in differing(expected, got)]
        else:
            pairs = enumerate(zip(expected, got, strict=True))
            found += [f"{which}: {n}" for n, (a, b) in pairs if not a.allclose(b)]
    return found
