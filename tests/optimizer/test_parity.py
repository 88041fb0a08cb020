"""Sharded training gives the unsharded optimizer's numbers, to the bit.

Gradients are made, not computed, and equal on all ranks: the order of arithmetic is then the same
with and without sharding, and there is no reason for any bit to differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from problems import (
    COMBINATIONS,
    ELEMENT_WISE,
    LAYOUTS,
    Case,
    assert_same,
    copies,
    differing,
    follow,
    in_turn,
    make_groups,
    make_params,
    train,
)
from reference.naive_zero import NaiveZero, SlicedZero
from torch import nn, optim

from shardstep import ZeroRedundancyOptimizer

STEPS = range(12)
FROZEN_AT = {0: range(3, 12), 2: range(3, 5)}
"""At these steps these parameters do not train."""

BUCKET_BYTES = 1 << 12
"""Small, so that there are several buckets."""


def check(case: Case, make: Any, combinations: Any = COMBINATIONS, layout: str = "") -> None:
    """Compare with the unsharded class, on groups and several buckets, some frozen for a while."""
    missing = case.missing

    def script(opt: Any, params: list[nn.Parameter]) -> int:
        assert not layout or not hasattr(opt, "plan") or opt.plan.layout == layout
        start, strides = copies(params), [param.stride() for param in params]
        for step in STEPS:
            for number, steps in FROZEN_AT.items():
                params[number].requires_grad_(step not in steps)
            changed = differing(start, train(opt, params, range(step, step + 1), missing=missing))
        assert strides == [param.stride() for param in params], "the memory format changed"
        return len(changed)

    def given(params: list[nn.Parameter]) -> Any:
        return make_groups(params, case.optimizer_class)

    follow(script, case, make, given, combinations, bucket_bytes=BUCKET_BYTES)


@pytest.mark.slow
@on_ranks(1, 2, 3, 4)
def test_every_element_wise_class_keeps_its_numbers() -> None:
    for number, case in enumerate(ELEMENT_WISE):
        params = make_params()
        groups = make_groups(params, case.optimizer_class)
        plain = case.optimizer_class(groups, **case.fresh_options())
        changed = differing(make_params(), train(plain, params, STEPS, missing=case.missing))
        assert len(changed) >= 6, f"{case} hardly changed anything"
        check(case, make_params, in_turn(number))


@on_ranks(2, 3)
def test_parameters_of_several_dtypes_train_in_one_optimizer() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
    shapes = [(131, 131), (53, 17), (1009,), (257,), (7,), (), (1,), (311,), (0,), (64, 65)]
    cases = [
        Case(optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        Case(optim.SGD, {"momentum": 0.9, "foreach": True}),
        Case(optim.Adam, {"amsgrad": True}),
        Case(optim.AdamW, {}),
        Case(optim.AdamW, {"foreach": True}),
        Case(optim.RMSprop, {"momentum": 0.9}),
        Case(optim.Adagrad, {"lr_decay": 0.1}),
    ]
    for number, case in enumerate(cases):
        check(case, partial(make_params, shapes, frozen=(3,), dtypes=dtypes), in_turn(number))


WHOLE_TENSOR = [
    Case(optim.Adafactor),
    Case(optim.Adafactor, {"weight_decay": 0.1, "maximize": True}),
    Case(optim.Adafactor, {"foreach": True}),
    *([Case(optim.Muon), Case(optim.Muon, {"nesterov": False, "weight_decay": 0.2})]),
]


@on_ranks(1, 2, 3, 4)
def test_classes_that_look_at_whole_tensors_get_them() -> None:
    shapes = [(17, 31), (40, 8), (5, 5), (1, 7), (64, 33)]  # Muon takes matrices only
    make = partial(make_params, shapes, frozen=(2,))
    for case in WHOLE_TENSOR:
        check(case, make, [("auto", False), ("auto", True)], layout="whole")


@on_ranks(3)
def test_sparse_gradients_reach_sparse_adam() -> None:
    def script(opt: Any, params: list[nn.Parameter]) -> None:
        for step in STEPS:
            random = torch.Generator().manual_seed(step)
            for number, param in enumerate(params):
                rows = torch.randint(0, param.shape[0], (1, 5), generator=random)
                values = torch.randn(5, param.shape[1], generator=random)
                grad = torch.sparse_coo_tensor(rows, values, param.shape).coalesce()
                param.grad = None if (step + number) % 4 == 0 else grad
            opt.step()

    make = partial(make_params, [(40, 6), (31, 4), (12, 3)], frozen=())
    each = [("auto", False), ("auto", True)]
    follow(script, Case(optim.SparseAdam, {"lr": 0.01}), make, combinations=each)


@pytest.mark.slow
@on_ranks(2, 3)
def test_the_naive_versions_agree() -> None:
    """One set of options per class: the naive versions are slow."""
    firsts = {case.optimizer_class: case for case in reversed(ELEMENT_WISE)}
    versions: list[Callable[..., Any]] = [
        NaiveZero,
        lambda groups, cls, **options: SlicedZero(groups, cls, dist.get_world_size(), **options),
        *(
            partial(ZeroRedundancyOptimizer, layout=layout, bucket_bytes=BUCKET_BYTES)
            for layout in LAYOUTS
        ),
    ]
    for case in firsts.values():
        results = []
        for version in versions:
            params = make_params(frozen=())
            groups = make_groups(params, case.optimizer_class)
            opt = version(groups, case.optimizer_class, **case.fresh_options())
            results.append(train(opt, params, STEPS))
        for number, other in enumerate(results):
            assert_same(results[0], other, f"{case}: version {number}")
