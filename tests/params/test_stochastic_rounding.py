"""Stochastic rounding is right in the mean, and draws the same whoever owns an element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_ways import WAYS, overlapping
from models import MLP, Problem, noise, with_zero
from models import train as train_problem
from on_ranks import on_ranks
from problems import (
    assert_same,
    differing,
    same_bits,
)
from ranks import run_ranks
from torch import Tensor, nn, optim

from shardstep import MixedPrecision, ZeroRedundancyOptimizer
from shardstep.params.stochastic_rounding import (
    CHUNK,
    StochasticRounding,
    fractions,
    mixed,
    rounded,
)

BF16, FP16 = torch.bfloat16, torch.float16
POLICY = MixedPrecision(master_dtype=None, stochastic_rounding=True)


def _neighbours(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """The numbers of `dtype` between which `value` lies, by bisection of all of them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).double()
    every = every[every.isfinite()].sort().values
    above = int(torch.searchsorted(every, torch.tensor(value, dtype=torch.float64)))
    if every[above] == value:
        return value, value
    return float(every[above - 1]), float(every[above])


VALUES = [1.0, 1.001, -1.001, 0.1, -3.14159, 1e-6, 6e-8, -1e-7, 3e-5, 1234.567, 0.0, -0.0, 65000.0]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("value", VALUES)
def test_rounding_goes_to_either_neighbour_and_is_right_in_the_mean(
    value: float, dtype: torch.dtype
) -> None:
    count = 1 << 17
    source = torch.full((count,), value)
    target = torch.empty(count, dtype=dtype)
    StochasticRounding(5).round_into(target, source, param=3, offset=0)
    low, high = _neighbours(float(source[0]), dtype)
    assert set(target.double().unique().tolist()) <= {low, high}
    gap = high - low
    if gap == 0:
        assert torch.equal(target.double(), source.double())
        return
    # Within five standard deviations of a mean of that many.
    error = abs(float(target.double().mean()) - float(source[0]))
    assert error < 5 * gap * 0.5 / count**0.5


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_what_is_exact_stays_and_so_does_what_is_finite_or_not(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    got = rounded(every.float(), dtype, torch.zeros(every.numel()))
    number = ~every.isnan()
    assert torch.equal(got[number].view(torch.int16), every[number].view(torch.int16))
    assert got[~number].isnan().all()

    # And a finite number stays finite.
    largest = torch.finfo(dtype).max
    source = torch.tensor([largest * 1.0009, -largest * 1.0009, largest])
    got = rounded(source, dtype, torch.tensor([0.0, 0.0, 0.999]))
    assert got.tolist() == [largest, -largest, largest]


def test_the_numbers_drawn_look_random() -> None:
    drawn = fractions(torch.arange(1 << 16), key=mixed(7))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # Five standard deviations, of the mean and of the correlation with the neighbour and with
    # another key; and each of 16 equal parts has its share.
    deviation = 5 / (1 << 16) ** 0.5
    assert abs(drawn.mean() - 0.5) < deviation * 12**-0.5
    centred = (drawn - 0.5) * 12**0.5
    assert abs((centred[1:] * centred[:-1]).mean()) < deviation
    other = (fractions(torch.arange(1 << 16), key=mixed(8)) - 0.5) * 12**0.5
    assert abs((centred * other).mean()) < deviation
    counts = torch.histc(drawn, 16, 0, 1)
    assert (counts - 4096).abs().max() < 5 * 4096**0.5


def test_an_element_is_rounded_alike_in_whatever_piece_it_comes() -> None:
    random = torch.Generator().manual_seed(0)
    source = torch.randn(CHUNK + 1000, generator=random)
    whole = torch.empty(source.numel(), dtype=BF16)
    rounding = StochasticRounding(1)
    rounding.round_into(whole, source, param=2, offset=0)
    for start, stop in ((0, 7), (640, 5000), (CHUNK - 3, CHUNK + 900)):
        part = torch.empty(stop - start, dtype=BF16)
        rounding.round_into(part, source[start:stop], param=2, offset=start)
        assert same_bits(whole[start:stop], part)
    for another in ({"param": 3, "step": 0}, {"param": 2, "step": 1}):
        rounding.step = another["step"]
        other = torch.empty_like(whole)
        rounding.round_into(other, source, param=another["param"], offset=0)
        assert 0.2 < (other != whole).float().mean() < 0.5


# ------------------------------------------------------------------------------------- training


def _square(model: Any, step: int) -> Tensor:
    # The same on all ranks, and a power of two of them: the mean gradient is that of one.
    return model(noise(step, 6, 16, of=0).bfloat16()).float().square().mean()


KIND = (optim.AdamW, {"lr": 0.003})
PROBLEM = Problem(lambda: MLP().bfloat16(), _square)


def _with_module(layout: str, steps: range, saved: Any = None) -> tuple[list[Tensor], Any]:
    zero = with_zero(PROBLEM.fresh(), KIND, precision=POLICY, layout=layout)
    if saved is not None:
        params, state = saved
        with torch.no_grad():
            for param, value in zip(zero.module.parameters(), params, strict=True):
                param.copy_(value)
        zero.opt.load_state_dict(state)
    train_problem(zero, PROBLEM, steps)
    zero.opt.consolidate_state_dict()
    return zero.params, zero.opt.state_dict() if zero.opt.rank == 0 else None


def test_training_goes_on_elsewhere_as_if_it_had_not_stopped() -> None:
    expected, _ = _with_module("sliced", range(6))
    saved = run_ranks(_with_module, 2, "sliced", range(3))[0]
    assert saved[1]["rounding_step"] == 3
    assert "masters" not in saved[1]
    for got, _ in run_ranks(_with_module, 2, "whole", range(3, 6), saved):
        assert differing(expected, got) == []


@on_ranks(2)
def test_the_ddp_hooks_round_at_random_too() -> None:
    expected, _ = _with_module("sliced", range(5))
    for way in WAYS:
        zero = overlapping(way, PROBLEM.fresh(), KIND, zero={"precision": POLICY})
        train_problem(zero, PROBLEM, range(5))
        assert_same(expected, zero.params, f"{way}")
        held = {
            tensor.untyped_storage().nbytes() for _, tensor in zero.opt.mode.pipeline.params.shard
        }
        assert held == {4}, f"{way}: copies of {held} bytes are left"


def test_small_updates_arrive_in_the_mean_where_rounding_to_nearest_loses_them() -> None:
    """1000 updates of 1/4096 each: to nearest, a bf16 weight of 1 never moves."""
    moved = []
    for policy in (POLICY, MixedPrecision(master_dtype=None)):
        param = nn.Parameter(torch.ones(4096, dtype=BF16))
        opt = ZeroRedundancyOptimizer([param], optim.SGD, precision=policy, lr=1 / 4096)
        for _ in range(1000):
            param.grad = torch.full_like(param, -1.0)
            opt.step()
        moved.append(float(param.detach().float().mean()) - 1)
    assert moved[1] == 0
    assert moved[0] == pytest.approx(1000 / 4096, rel=0.02)
