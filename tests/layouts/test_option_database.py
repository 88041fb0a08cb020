"""Every class of `torch.optim` with every set of options that torch tests: exact, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from option_database import read
from problems import copies, differing, make_params, set_gradients
from ranks import run_ranks
from torch import optim

from shardstep import ZeroRedundancyOptimizer

STEPS = range(5)
SHAPES = [(33, 41), (), (7,), (64, 3), (2, 3, 5, 7), (300,), (1,)]
MATRICES = [(17, 31), (40, 8), (1, 7), (64, 33)]

Entry = tuple[Any, str, dict[str, Any]]


def run(cls: Any, make: Any) -> list[torch.Tensor]:
    """Train on gradients that are the same on every rank."""
    matrices = cls in (optim.Muon, optim.SparseAdam)
    params = make_params(MATRICES if matrices else SHAPES, frozen=())
    opt = make([{"params": params[:2]}, {"params": params[2:], "lr": 0.0042}])
    for step in STEPS:
        # torch's fused SGD cannot start momenta one by one.
        set_gradients(params, step, missing=cls is not optim.SGD)
        for param in params if cls is optim.SparseAdam else ():
            if param.grad is not None:
                param.grad = param.grad.to_sparse(1)
        opt.step()
    return copies(params)


def _run_database(database: list[Entry]) -> list[tuple[str, str]]:
    outcomes = []
    for cls, what, options in database:

        def plain(groups: Any, cls: Any = cls, options: Any = options) -> Any:
            return cls(groups, **copy.deepcopy(options))

        def ours(groups: Any, cls: Any = cls, options: Any = options) -> Any:
            return ZeroRedundancyOptimizer(
                groups, cls, bucket_bytes=1 << 12, **copy.deepcopy(options)
            )

        try:
            got = run(cls, ours)
        except ValueError as error:
            outcomes.append((f"{cls.__name__}, {what}", f"refused: {error}"))
            continue
        wrong = differing(run(cls, plain), got)
        outcomes.append((f"{cls.__name__}, {what}", f"differs in {wrong}" if wrong else "exact"))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_entry_is_exact_or_refused_with_a_reason(world_size: int) -> None:
    database = read()
    outcomes = run_ranks(_run_database, world_size, database)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert len(outcomes[0]) == len(database)
    refused = {what: how for what, how in outcomes[0] if how != "exact"}
    assert all(how.startswith("refused: LBFGS couples all") for how in refused.values()), refused
    assert len(refused) == sum(cls is optim.LBFGS for cls, _, _ in database)


@pytest.mark.slow
def test_no_class_is_left_out() -> None:
    classes = {each for each in vars(optim).values() if isinstance(each, type)}
    classes = {each for each in classes if issubclass(each, optim.Optimizer)} - {optim.Optimizer}
    database = read()
    assert {cls for cls, _, _ in database} == classes
    assert len(database) > 150
