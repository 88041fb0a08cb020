"""A drop-in with sharded masters has the numbers of masters that no rank shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from problems import LAYOUTS, Case, differing, make_groups, make_params, train
from ranks import run_ranks
from reference.naive_masters import NaiveMasters
from torch import Tensor, nn, optim

from shardstep import MixedPrecision, ZeroRedundancyOptimizer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = range(12)
BUCKET_BYTES = 1 << 12

CASES = [
    Case(optim.AdamW),
    Case(optim.AdamW, {"fused": True, "amsgrad": True}),
    Case(optim.AdamW, {"foreach": True}),
    Case(optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    Case(optim.RMSprop, {"momentum": 0.9, "centered": True}),
]
MIXES = [(BF16,), (FP16,), (BF16, FP32, torch.float64, FP16, torch.complex64)]


def _masters(case: Case, params: list[nn.Parameter]) -> NaiveMasters:
    groups = make_groups(params, case.optimizer_class)
    return NaiveMasters(groups, case.optimizer_class, **case.fresh_options())


def _sharded(case: Case, params: list[nn.Parameter], **options: Any) -> ZeroRedundancyOptimizer:
    groups = make_groups(params, case.optimizer_class)
    options = {"precision": MixedPrecision(), "bucket_bytes": BUCKET_BYTES, **options}
    return ZeroRedundancyOptimizer(groups, case.optimizer_class, **options, **case.fresh_options())


class _WithGradients:
    """The oracle, taking the gradients that are in `param.grad`, as the drop-in does."""

    def __init__(self, naive: NaiveMasters) -> None:
        self._naive = naive
        self.add_param_group = naive.add_param_group

    def step(self) -> None:
        self._naive.take_gradients()
        self._naive.step()


def _trained(opt: Any, params: list[nn.Parameter], added: list[nn.Parameter]) -> list[Tensor]:
    """Train, add a group halfway, and train on."""
    train(opt, params, STEPS[:6])
    opt.add_param_group({"params": added, "lr": 0.02})
    return train(opt, [*params, *added], STEPS[6:])


def _channels_last() -> list[nn.Parameter]:
    params = make_params([(16, 9, 3, 3), (24, 16, 5, 5), (24,)], dtypes=(BF16,), frozen=())
    for param in params[:2]:
        param.data = param.data.to(memory_format=torch.channels_last)
    return params


def _matrices() -> list[nn.Parameter]:
    shapes = [(17, 31), (40, 8), (5, 5), (1, 7), (64, 33)]
    return make_params(shapes, dtypes=(BF16,), frozen=(2,))


def _drop_in() -> list[str]:
    problems: list[tuple[Case, Callable[[], list[nn.Parameter]], str]] = [
        (case, partial(make_params, dtypes=dtypes), layout)
        for case, dtypes, layout in itertools.product(CASES, MIXES, LAYOUTS)
        if not (case.options.get("fused") and torch.complex64 in dtypes)
    ]
    problems += [(CASES[0], _channels_last, layout) for layout in LAYOUTS]
    # Classes that look at a whole tensor look at a whole master.
    problems += [(Case(optim.Adafactor), _matrices, "auto"), (Case(optim.Muon), _matrices, "auto")]
    failures = []
    turns = itertools.cycle((False, True))
    for case, make, layout in problems:

        def run(build: Callable[[list[nn.Parameter]], Any], make: Any = make) -> list[Tensor]:
            params = make()
            added = params[-2:] if len(params) > 3 else params[-1:]
            return _trained(build(params[: -len(added)]), params[: -len(added)], added)

        expected = run(lambda params, case=case: _WithGradients(_masters(case, params)))
        narrow = run(lambda params, case=case: case.optimizer_class(params, **case.fresh_options()))
        if not differing(expected, narrow):
            failures.append(f"{case}: masters make no difference")
        options = {"layout": layout, "parameters_as_bucket_view": next(turns)}
        got = run(lambda params, case=case, o=options: _sharded(case, params, **o))
        if wrong := differing(expected, got):
            failures.append(f"{case}, {make}, {options}: parameters {wrong}")
    return failures


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_drop_in_with_masters_has_their_numbers(world_size: int) -> None:
    assert run_ranks(_drop_in, world_size) == [[]] * world_size


def test_without_a_process_group_too() -> None:
    assert _drop_in() == []
