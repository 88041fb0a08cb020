"""Precision policies: which are refused, who is warned, and who gets masters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from problems import make_params, set_gradients
from ranks import run_ranks
from sixteen_bits import AT_RANDOM, BF16, FP16, FP32, MASTERS, WITHOUT, bf16_mlp, train_on, zero_of
from torch import optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardstep import (
    MixedPrecision,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

WIRE = "without module= this optimizer does not reduce gradients"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"master_dtype": BF16}, "master_dtype must be torch.float32"),
        ({"master_dtype": torch.int32}, "master_dtype must be torch.float32"),
        ({"reduce_dtype": torch.int32}, "reduce_dtype must be a floating-point dtype"),
        ({"stochastic_rounding": True}, "needs master_dtype=None"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MixedPrecision(**options)


def test_only_what_is_narrower_gets_a_master() -> None:
    wider = {
        policy: [
            dtype
            for dtype in (FP16, BF16, FP32, torch.float64)
            if policy.step_dtype(dtype) != dtype
        ]
        for policy in (MASTERS, WITHOUT, AT_RANDOM, MixedPrecision(torch.float64))
    }
    assert list(wider.values()) == [[FP16, BF16], [], [FP16, BF16], [FP16, BF16, FP32]]
    for policy in wider:
        assert policy.step_dtype(torch.complex64) == torch.complex64
        assert policy.step_dtype(torch.int8) == torch.int8


@pytest.mark.parametrize(
    ("policy", "error", "match"),
    [
        ("bf16", TypeError, "precision must be a MixedPrecision, not str"),
        (MixedPrecision(reduce_dtype=FP32), ValueError, WIRE),
    ],
)
def test_no_policy_and_a_wire_that_is_not_ours_are_refused(
    policy: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        ZeroRedundancyOptimizer(make_params(), optim.SGD, precision=policy, lr=0.1)


@pytest.mark.parametrize("make", [hook_with_zero_step, hook_with_zero_step_interleaved])
@on_ranks(2, raises=ValueError, match="the wrapped communication hook")
def test_a_wire_that_is_ddps_is_refused(make: Any) -> None:
    ddp = DistributedDataParallel(bf16_mlp())
    opt = ZeroRedundancyOptimizer(
        ddp.parameters(),
        optim.SGD,
        overlap_with_ddp=True,
        precision=MixedPrecision(reduce_dtype=FP32),
        lr=0.1,
    )
    make(allreduce_hook, ddp, opt)


@on_ranks(2, raises=ValueError, match="master_dtype=torch.float32")
def test_ranks_have_to_have_the_same_policy() -> None:
    policy = [MASTERS, WITHOUT][dist.get_rank()]
    ZeroRedundancyOptimizer(make_params(), optim.SGD, precision=policy, lr=0.1)


def _warned(make: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(each.message) for each in caught if "precision=" in str(each.message)]


def _who_warns() -> dict[str, list[str]]:
    def drop_in(**options: Any) -> Callable[[], Any]:
        dtype = options.pop("dtype", BF16)
        params = make_params(dtypes=(dtype,))
        return lambda: ZeroRedundancyOptimizer(params, optim.AdamW, **options)

    def later() -> Any:
        opt = ZeroRedundancyOptimizer(make_params(), optim.AdamW)
        for seed in (1, 2):
            opt.add_param_group({"params": make_params(dtypes=(FP16,), seed=seed)})

    def stepping() -> Any:
        opt = drop_in()()
        for step in range(3):
            set_gradients(opt.param_groups[0]["params"], step)
            opt.step()

    return {
        "drop-in": _warned(drop_in()),
        "stepping": _warned(stepping),
        "hooks": _warned(drop_in(overlap_with_ddp=True)),
        "later": _warned(later),
        "fp32": _warned(drop_in(dtype=FP32)),
        "masters": _warned(drop_in(precision=MASTERS)),
        "meant": _warned(drop_in(precision=WITHOUT)),
        "module": _warned(lambda: zero_of(bf16_mlp())),
    }


def test_a_drop_in_warns_once_on_rank_0_of_what_16_bits_lose() -> None:
    first, second = run_ranks(_who_warns, 2)
    assert {what: len(said) for what, said in first.items() if said} == {
        "drop-in": 1,
        "stepping": 1,
        "hooks": 1,
        "later": 1,
    }
    assert not any(second.values())
    (said,) = first["drop-in"]
    for words in ("AdamW", "bfloat16", "1/512 of a weight", "MixedPrecision()", "stochastic"):
        assert words in said
    assert "1/4096 of a weight" in first["later"][0]


def _dtypes(policy: MixedPrecision | None, dtype: torch.dtype) -> set[torch.dtype]:
    module = bf16_mlp(dtype)
    opt = zero_of(module, precision=policy)
    train_on(module, opt, range(1))
    masters = {master.dtype for master in opt.shards.masters().values()}
    moments = {state["exp_avg"].dtype for state in opt.optim.state.values()}
    grads = {lane.like.dtype for lane in opt.mode.pipeline.gradients.lanes}  # type: ignore[attr-defined]
    assert moments == grads
    assert masters <= moments
    assert {param.dtype for param in module.parameters()} == {dtype}
    assert set(opt.state) <= set(module.parameters())
    return masters


def test_with_a_module_masters_are_the_default_for_16_bits() -> None:
    assert _dtypes(None, BF16) == {FP32}
    assert _dtypes(None, FP16) == {FP32}
    assert _dtypes(None, FP32) == set()
    assert _dtypes(WITHOUT, BF16) == set()
    assert _dtypes(MixedPrecision(torch.float64), FP32) == {torch.float64}
