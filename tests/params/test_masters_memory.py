"""Masters take the memory that they are planned to take."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from memory import held_memory
from models import MLP
from on_ranks import on_ranks
from problems import LAYOUTS
from ranks import run_ranks
from sixteen_bits import AT_RANDOM, MASTERS, give_gradients, loss_of, train_on, zero_of

from shardstep import MixedPrecision
from shardstep.plan import POOL


def _held() -> int:
    return sum(held_memory().values())


def _bytes_per_element(policy: MixedPrecision | None, layout: str) -> dict[str, float]:
    """What is there between two steps, in bytes per element of the model."""
    gc.freeze()  # leaves what torch has made at its import out of the search
    empty = _held()
    torch.manual_seed(0)
    module = MLP(width=192, depth=16).bfloat16()
    numel = sum(param.numel() for param in module.parameters())
    found = {"parameters": (_held() - empty) / numel}
    opt = zero_of(module, precision=policy, layout=layout)
    train_on(module, opt, range(2))
    found["resting"] = (_held() - empty) / numel
    loss_of(module, 3).backward()
    gradients: Any = opt.mode.pipeline.gradients
    gradients.collect()
    found["with gradients"] = (_held() - empty) / numel
    found["gradient shards"] = gradients.lanes.nbytes() / numel
    found["pool"] = gradients.lanes.pool_nbytes / numel
    masters = opt.shards.masters().values()
    found["masters"] = sum(master.nbytes for master in masters) / numel
    kept = [value for state in opt.optim.state.values() for value in state.values()]
    found["moments"] = sum(value.nbytes for value in kept if value.numel() > 1) / numel
    largest = max(bucket.nbytes for bucket in opt.plan.training_buckets)
    found["largest buckets"] = POOL * largest / numel
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_is_2_bytes_and_12_and_4_divided_by_the_ranks(world_size: int) -> None:
    for layout in LAYOUTS:
        outcomes = run_ranks(_bytes_per_element, world_size, None, layout, fresh=True)
        share = 1.02 if layout == "sliced" else 1.10  # whole parameters are dealt as well as can be
        for found in outcomes:
            assert found["parameters"] == 2
            assert found["masters"] <= 4 / world_size * share
            assert found["moments"] <= 8 / world_size * share
            assert found["gradient shards"] <= 4 / world_size * share
            assert found["pool"] <= found["largest buckets"]
            # And that is all there is: padding and step counters make the rest.
            total = 2 + 16 / world_size * share + found["pool"]
            assert found["with gradients"] <= total + 0.1
            assert found["resting"] <= total - 4 / world_size + 0.1
        for what, bytes_each in (("masters", 4), ("moments", 8)):
            assert sum(found[what] for found in outcomes) == pytest.approx(bytes_each, rel=1e-6)


@on_ranks(2, fresh=True)
def test_a_drop_in_holds_masters_and_moments_and_gradients_during_the_step_only() -> None:
    gc.freeze()
    torch.manual_seed(0)
    module = MLP(width=192, depth=16).bfloat16()
    numel = sum(param.numel() for param in module.parameters())
    empty = _held()
    opt = zero_of(module, False, precision=MASTERS, parameters_as_bucket_view=True)
    found: dict[str, float] = {}
    for step in range(2):
        give_gradients(module, step)
        with_user_gradients = _held()
        opt.mode.pipeline.gradients.collect()
        found["copies of gradients"] = (_held() - with_user_gradients) / numel
        opt.step()
        opt.zero_grad()
    found["resting"] = (_held() - empty) / numel
    assert found["copies of gradients"] <= 4 / 2 * 1.02
    assert found["resting"] <= 12 / 2 * 1.02 + 0.1


def test_stochastic_rounding_keeps_nothing_but_moments() -> None:
    for found in run_ranks(_bytes_per_element, 2, AT_RANDOM, "sliced", fresh=True):
        assert found["masters"] == 0
        assert found["moments"] <= 8 / 2 * 1.02
        assert found["resting"] <= 2 + 12 / 2 * 1.02 + found["pool"] + 0.1
