"""A profiler shows reductions, the step, gathers and waits, with the numbers of their buckets."""

from __future__ import annotations

import pytest
import torch
from models import MLP, MLP_PROBLEM, SGD, train, with_zero
from on_ranks import on_ranks
from scenarios import ALL, MODULE, sharded
from torch.profiler import ProfilerActivity, profile


@pytest.mark.parametrize("mode", ALL)
@on_ranks(2)
def test_a_profiler_shows_named_spans(mode: str) -> None:
    setup = sharded(mode, MLP(width=192, depth=4))

    def iterate() -> None:
        setup.model(torch.ones(2, 16)).square().mean().backward()
        setup.finish()

    iterate()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        iterate()
        setup.opt.shards.wait_for_params()
    names = {event.key.removeprefix("shardstep::") for event in seen.key_averages()}
    reduces = mode in (*MODULE, "register")
    kinds = ["gather", "wait for gather", *(["reduce", "wait for reduce"] if reduces else [])]
    buckets = [bucket.index for bucket in setup.opt.plan.training_buckets]
    assert len(buckets) > 1
    assert {"step", *(f"{kind} bucket {b}" for kind in kinds for b in buckets)} <= names


@on_ranks(2)
def test_a_profiler_may_stop_while_messages_are_in_flight() -> None:
    for _ in range(18):
        setup = with_zero(MLP_PROBLEM.fresh(), SGD)
        with profile():
            train(setup, MLP_PROBLEM, range(3))
