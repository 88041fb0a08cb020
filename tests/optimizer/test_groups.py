"""Process groups of all kinds, and several optimizers at once."""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import from_rank
from on_ranks import on_ranks
from problems import Case, assert_same, copies, follow, make_params, set_gradients, train
from ranks import run_ranks
from torch import optim
from traffic import counted

from shardstep import ZeroRedundancyOptimizer

# -------------------------------------------------------------------------------- subgroups


@on_ranks(4)
def test_two_subgroups_train_two_models_at_once() -> None:
    """Ranks 0 and 2 train one model, ranks 1 and 3 another, at the same time."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    global_rank = dist.get_rank()
    mine = global_rank % 2

    def script(opt: Any, params: Any) -> None:
        if isinstance(opt, ZeroRedundancyOptimizer):
            assert (opt.rank, opt.global_rank, opt.world_size) == (global_rank // 2, global_rank, 2)
            assert opt.process_group is groups[mine]
        # The two groups do not take the same number of steps, either.
        train(opt, params, range(5 + mine))

    case = Case(optim.Adam, {"lr": 0.01 * (1 + mine)})
    make = partial(make_params, seed=mine)
    follow(script, case, make, to=1, process_group=groups[mine])  # global rank 2 or 3


@on_ranks(3)
def test_a_rank_outside_of_the_group_is_told_so() -> None:
    group = dist.new_group([0, 2])
    params = make_params()
    if dist.get_rank() != 1:
        train(ZeroRedundancyOptimizer(params, optim.SGD, group, lr=0.1), params, range(2))
    else:
        with pytest.raises(ValueError, match=r"global rank 1.*not a member"):
            ZeroRedundancyOptimizer(params, optim.SGD, group, lr=0.1)


# -------------------------------------------------------------------- several at a time


@on_ranks(2)
def test_several_optimizers_over_one_model() -> None:
    """Two of ours with different classes, layouts and views, and a plain one, over one model."""

    def run(sharded: bool) -> list[torch.Tensor]:
        params = make_params()

        def make(cls: Any, part: list[Any], layout: str, view: bool, **options: Any) -> Any:
            if not sharded:
                return cls(part, **options)
            return ZeroRedundancyOptimizer(part, cls, None, view, layout=layout, **options)

        opts = [
            make(optim.Adam, params[:4], "sliced", True),
            make(optim.SGD, params[4:8], "whole", False, lr=0.1, momentum=0.9),
            optim.RMSprop(params[8:]),
        ]
        for step in range(6):
            set_gradients(params, step)
            for opt in opts:
                opt.step()
        return copies(params)

    assert_same(run(False), run(True))


# ------------------------------------------------------------------------- few and many


def _few_parameters(*shapes: tuple[int, ...]) -> None:
    """The last of several comes later, in a group of its own."""

    def script(opt: Any, params: Any) -> None:
        train(opt, params[: len(first(params))], range(3))
        if len(params) > 1:
            opt.add_param_group({"params": params[-1:], "lr": 0.3})
        train(opt, params, range(3, 6))

    def first(params: Any) -> Any:
        return params[: max(1, len(params) - 1)]

    last = dist.get_world_size() - 1 if dist.is_initialized() else 0
    follow(script, Case(optim.Adam), partial(make_params, shapes, frozen=()), first, to=last)


@on_ranks(4)
def test_more_ranks_than_parameters() -> None:
    for shapes in ([(7,)], [()], [(0,)], [(3, 3), (200,)]):
        _few_parameters(*shapes)


@on_ranks(1)
def test_a_group_of_one() -> None:
    _few_parameters((53, 17), (7,))
    params = make_params()
    with counted() as traffic:
        opt = ZeroRedundancyOptimizer(params, optim.Adam)
    train(opt, params, range(2))
    assert not traffic.nbytes.total()


def test_no_process_group_at_all() -> None:
    assert not dist.is_initialized()
    _few_parameters((53, 17), (7,), ())
    opt = ZeroRedundancyOptimizer(make_params(), optim.SGD)
    assert (opt.rank, opt.global_rank, opt.world_size) == (0, 0, 1)
    assert opt.process_group is None


# --------------------------------------------------------------------------------- logging


def _logged(level: str) -> list[str]:
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("shardstep")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    params = make_params()
    opt = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1)
    train(opt, params, range(2))
    dist.set_debug_level(dist.DebugLevel.OFF)
    return [record.getMessage() for record in records]


def test_debug_levels_log_who_owns_what() -> None:
    """Set as TORCH_DISTRIBUTED_DEBUG sets it; that variable itself is read when torch loads."""
    assert run_ranks(_logged, 2, "OFF") == [[], []]
    for level in ("INFO", "DETAIL"):
        for rank, messages in enumerate(run_ranks(_logged, 2, level)):
            assert any(f"rank {rank} owns" in message for message in messages)


# ----------------------------------------------------------------- groups of some of the ranks


def _train_linear(group: Any, seed: int | None = None) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    model = torch.nn.Linear(96, 40)
    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, process_group=group, module=model, lr=0.1
    )
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 96)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@on_ranks(3)
def test_groups_that_only_some_ranks_are_in_do_not_hold_up_construction() -> None:
    dist.new_group([0, 1])
    params = _train_linear(None)
    assert_same(from_rank(0, params), params)


@on_ranks(3, raises=RuntimeError, match="different numbers of process groups")
def test_a_subgroup_of_ranks_in_different_numbers_of_groups_is_refused_on_every_rank() -> None:
    dist.new_group([0, 2])
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        _train_linear(group)
    else:
        raise RuntimeError("belong to different numbers of process groups: not asked")


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="before torch 2.12 a group's ranks are in ascending order",
)
@on_ranks(2)
def test_a_group_in_another_order_than_the_global_ranks_gives_the_same_numbers() -> None:
    group = dist.new_group([1, 0], sort_ranks=False)
    assert dist.get_rank(group) == 1 - dist.get_rank()
    expected, got = _train_linear(None, seed=5), _train_linear(group, seed=5)
    assert_same(expected, got)  # the mean of two gradients does not depend on their order
