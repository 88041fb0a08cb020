"""A drop-in with sharded masters has the numbers of masters that no rank shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from problems import LAYOUTS, Case, assert_same, differing, make_groups, make_params, train
from reference.naive_masters import NaiveMasters
from torch import Tensor, nn, optim

from shardstep import MixedPrecision, ZeroRedundancyOptimizer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = range(12)

CASES = [
    Case(optim.AdamW),
    Case(optim.AdamW, {"fused": True, "amsgrad": True}),
    Case(optim.AdamW, {"foreach": True}),
    Case(optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    Case(optim.RMSprop, {"momentum": 0.9, "centered": True}),
]
MIXES = [(BF16,), (FP16,), (BF16, FP32, torch.float64, FP16, torch.complex64)]


class _Oracle(NaiveMasters):
    """Takes the gradients that are in `param.grad`, as the drop-in does."""

    def step(self) -> None:
        self.take_gradients()
        super().step()


def _trained(
    case: Case, make: Callable[[], list[nn.Parameter]], build: Callable[..., Any]
) -> list[Tensor]:
    """Train, add a group halfway, and train on."""
    params = make()
    kept = len(params) - (2 if len(params) > 3 else 1)
    groups = make_groups(params[:kept], case.optimizer_class)
    opt = build(groups, case.optimizer_class, **case.fresh_options())
    train(opt, params[:kept], STEPS[:6])
    opt.add_param_group({"params": params[kept:], "lr": 0.02})
    return train(opt, params, STEPS[6:])


def _channels_last() -> list[nn.Parameter]:
    params = make_params([(16, 9, 3, 3), (24, 16, 5, 5), (24,)], dtypes=(BF16,), frozen=())
    for param in params[:2]:
        param.data = param.data.to(memory_format=torch.channels_last)
    return params


def _matrices() -> list[nn.Parameter]:
    shapes = [(17, 31), (40, 8), (5, 5), (1, 7), (64, 33)]
    return make_params(shapes, dtypes=(BF16,), frozen=(2,))


def _drop_in() -> None:
    problems: list[tuple[Case, Callable[[], list[nn.Parameter]], str]] = [
        (case, partial(make_params, dtypes=dtypes), layout)
        for case, dtypes, layout in itertools.product(CASES, MIXES, LAYOUTS)
        if not (case.options.get("fused") and torch.complex64 in dtypes)
    ]
    problems += [(CASES[0], _channels_last, layout) for layout in LAYOUTS]
    # Classes that look at a whole tensor look at a whole master.
    problems += [(Case(optim.Adafactor), _matrices, "auto"), (Case(optim.Muon), _matrices, "auto")]
    turns = itertools.cycle((False, True))
    for case, make, layout in problems:
        expected = _trained(case, make, _Oracle)
        narrow = _trained(case, make, lambda groups, cls, **options: cls(groups, **options))
        assert differing(expected, narrow), f"{case}: masters make no difference"
        options: dict[str, Any] = {"layout": layout, "parameters_as_bucket_view": next(turns)}
        options |= {"precision": MixedPrecision(), "bucket_bytes": 1 << 12}
        got = _trained(case, make, partial(ZeroRedundancyOptimizer, **options))
        assert_same(expected, got, (case, make, options))


@pytest.mark.slow
@on_ranks(1, 2, 3)
def test_a_drop_in_with_masters_has_their_numbers() -> None:
    _drop_in()


def test_without_a_process_group_too() -> None:
    _drop_in()
