"""Sharded training gives the unsharded optimizer's numbers, to the bit.

Gradients are made, not computed, and equal on all ranks: the order of arithmetic is then the same
with and without sharding, and there is no reason for any bit to differ.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from problems import (
    ELEMENT_WISE,
    LAYOUTS,
    Case,
    assert_same,
    copies,
    differing,
    make_groups,
    make_params,
    set_gradients,
    train,
)
from reference.naive_zero import NaiveZero, SlicedZero
from torch import nn, optim

from shardstep import ZeroRedundancyOptimizer

STEPS = range(12)
BUCKET_BYTES = 1 << 12
"""Small, so that there are several buckets."""


def unsharded(case: Case, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return case.optimizer_class(make_groups(params, case.optimizer_class), **case.fresh_options())


def sharded(case: Case, params: list[nn.Parameter], **kwargs: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        make_groups(params, case.optimizer_class),
        case.optimizer_class,
        bucket_bytes=BUCKET_BYTES,
        **kwargs,
        **case.fresh_options(),
    )


@pytest.mark.slow
@on_ranks(1, 2, 3, 4)
def test_every_element_wise_class_keeps_its_numbers() -> None:
    """Both layouts, one of them with bucket views; the next set of options has it the other way."""
    for number, case in enumerate(ELEMENT_WISE):
        params = make_params()
        expected = train(unsharded(case, params), params, STEPS, missing=case.missing)
        untouched = make_params()
        assert len(differing(untouched, expected)) >= 6, f"{case} hardly changed anything"
        for turn, layout in enumerate(LAYOUTS):
            view = (number + turn) % 2 == 0
            params = make_params()
            opt = sharded(case, params, layout=layout, parameters_as_bucket_view=view)
            try:
                got = train(opt, params, STEPS, missing=case.missing)
            except Exception as error:
                error.add_note(f"in {case}, layout {layout}, view {view}")
                raise
            assert_same(expected, got, f"{case}, layout {layout}, view {view}")


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
        params = make_params(shapes, frozen=(3,), dtypes=dtypes)
        expected = train(unsharded(case, params), params, STEPS)
        for place, layout in enumerate(LAYOUTS):
            view = (number + place) % 2 == 0
            params = make_params(shapes, frozen=(3,), dtypes=dtypes)
            opt = sharded(case, params, layout=layout, parameters_as_bucket_view=view)
            assert_same(expected, train(opt, params, STEPS), (case, layout, view))


def _channels_last_params() -> list[nn.Parameter]:
    params = make_params([(16, 9, 3, 3), (24, 16, 5, 5), (24,), (8, 24, 1, 1)], frozen=())
    for param in params:
        if param.dim() == 4:
            param.data = param.data.to(memory_format=torch.channels_last)
    return params


@pytest.mark.slow
@on_ranks(2, 3)
def test_channels_last_parameters_keep_numbers_and_format() -> None:
    cases = [
        Case(optim.SGD, {"momentum": 0.9}),
        Case(optim.AdamW, {"fused": True}),
        Case(optim.Adam),
    ]
    for case, layout, view in itertools.product(cases, LAYOUTS, (False, True)):
        params = _channels_last_params()
        expected = train(unsharded(case, params), params, STEPS)
        params = _channels_last_params()
        strides = [param.stride() for param in params]
        opt = sharded(case, params, layout=layout, parameters_as_bucket_view=view)
        assert_same(expected, train(opt, params, STEPS), (case, layout, view))
        assert strides == [param.stride() for param in params], "the memory format changed"


@on_ranks(2)
def test_a_gradient_may_lie_in_memory_otherwise_than_its_parameter() -> list[str]:
    """A contiguous gradient of a channels-last weight; the class has to be one whose result does
    not depend on whether a kernel runs over strides or not, which plain SGD's is."""
    failures = []
    for layout in LAYOUTS:
        results = []
        for make in (optim.SGD, ZeroRedundancyOptimizer):
            params = _channels_last_params()
            args = () if make is optim.SGD else (optim.SGD,)
            extra = {} if make is optim.SGD else {"layout": layout}
            opt: Any = make(params, *args, lr=0.25, **extra)
            for step in STEPS:
                set_gradients(params, step)
                for param in params:
                    if param.grad is not None:
                        # Multiples of 1/4 without rounding: exact in any order.
                        param.grad = (param.grad * 4).round().contiguous()
                opt.step()
            results.append(copies(params))
        if wrong := differing(*results):
            failures.append(f"{layout}: {wrong}")
    return failures


WHOLE_TENSOR = [
    Case(optim.Adafactor),
    Case(optim.Adafactor, {"weight_decay": 0.1, "maximize": True}),
    Case(optim.Adafactor, {"foreach": True}),
    *([Case(optim.Muon), Case(optim.Muon, {"nesterov": False, "weight_decay": 0.2})]),
]


@on_ranks(1, 2, 3, 4)
def test_classes_that_look_at_whole_tensors_get_them() -> None:
    for case, view in itertools.product(WHOLE_TENSOR, (False, True)):
        # Muon takes matrices only.
        shapes = [(17, 31), (40, 8), (5, 5), (1, 7), (64, 33)]
        params = make_params(shapes, frozen=(2,))
        expected = train(unsharded(case, params), params, STEPS)
        params = make_params(shapes, frozen=(2,))
        opt = sharded(case, params, parameters_as_bucket_view=view)
        assert opt.plan.layout == "whole", f"{case}: layout {opt.plan.layout}"
        assert_same(expected, train(opt, params, STEPS), f"{case}, view {view}")


@pytest.mark.parametrize("view", [False, True])
@on_ranks(3)
def test_sparse_gradients_reach_sparse_adam(view: bool) -> list[int]:
    def run(make: Any) -> list[torch.Tensor]:
        params = make_params([(40, 6), (31, 4), (12, 3)], frozen=())
        opt = make(params)
        for step in STEPS:
            random = torch.Generator().manual_seed(step)
            for number, param in enumerate(params):
                rows = torch.randint(0, param.shape[0], (1, 5), generator=random)
                values = torch.randn(5, param.shape[1], generator=random)
                absent = (step + number) % 4 == 0
                param.grad = (
                    None
                    if absent
                    else torch.sparse_coo_tensor(rows, values, param.shape).coalesce()
                )
            opt.step()
        return copies(params)

    expected = run(lambda params: optim.SparseAdam(params, lr=0.01))
    got = run(
        lambda params: ZeroRedundancyOptimizer(
            params, optim.SparseAdam, parameters_as_bucket_view=view, lr=0.01
        )
    )
    return differing(expected, got)


@pytest.mark.slow
@on_ranks(2, 3)
def test_the_naive_versions_agree() -> None:
    """One set of options per class: the naive versions are slow."""
    world_size = dist.get_world_size()
    firsts = {case.optimizer_class: case for case in reversed(ELEMENT_WISE)}
    for case in firsts.values():
        results = {}
        params = make_params(frozen=())
        naive = NaiveZero(
            make_groups(params, case.optimizer_class), case.optimizer_class, **case.options
        )
        results["naive"] = train(naive, params, STEPS)
        params = make_params(frozen=())
        simulated = SlicedZero(
            make_groups(params, case.optimizer_class),
            case.optimizer_class,
            world_size,
            **case.options,
        )
        results["simulated"] = train(simulated, params, STEPS)
        for layout in LAYOUTS:
            params = make_params(frozen=())
            results[layout] = train(sharded(case, params, layout=layout), params, STEPS)
        for one, other in itertools.combinations(results, 2):
            assert_same(results[one], results[other], f"{case}: {one} and {other} differ in")
