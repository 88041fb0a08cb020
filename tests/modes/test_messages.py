"""A bucket that is longer than a message travels in several, with the same numbers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import graphs  # noqa: F401  # the scenarios
import loops  # noqa: F401
import pytest
import torch
from ddp_ways import overlapping
from models import ADAMW, MLP, MLP_PROBLEM, SGD, noise, rank, train, with_zero
from on_ranks import on_ranks
from problems import differing
from ranks import run_ranks
from scenarios import MODULE, compared

from shardstep import BatchSkippedError
from shardstep.comm import collectives, group
from shardstep.gradients import lockstep
from shardstep.gradients.lanes import Lanes
from shardstep.plan import messages

SHORT: dict[str, Any] = {"MAX_MESSAGE_BYTES": 4096, "MIN_SEGMENT_UNITS": 1}


def _shorten() -> None:
    for name, value in SHORT.items():
        setattr(messages, name, value)


def _equal_ddp(name: str) -> tuple[list[str], int, int]:
    _shorten()
    found = compared([name], modes=["drop-in", *MODULE, "register"])
    zero = with_zero(MLP_PROBLEM.fresh(), ADAMW, layout="whole", bucket_bytes=2**20)
    lanes: Any = zero.opt.mode.pipeline.gradients.lanes
    numels = [each.message.numel for lane in lanes for each in lane.packings]
    return found, len(numels) // len(lanes), max(numels)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("accumulate_with_no_sync", 2),
        pytest.param("every_model", 2, marks=pytest.mark.slow),
        ("unused_parameters_with_no_sync", 3),
    ],
)
def test_many_messages_for_a_bucket_make_no_difference(name: str, world_size: int) -> None:
    for found, per_bucket, longest in run_ranks(_equal_ddp, world_size, name):
        assert found == []
        assert per_bucket > 2
        assert longest <= 2 * SHORT["MAX_MESSAGE_BYTES"] // 4


@pytest.mark.parametrize("embedding", [False, True])
@on_ranks(2)
def test_a_large_parameter_does_not_set_the_size_of_the_pool(embedding: bool) -> None:
    module = MLP(width=192, depth=8)
    if embedding:
        module.table = MLP(width=2048, depth=1)
    _shorten()
    zero = with_zero(module, ADAMW, bucket_bytes=2**16)
    lanes: Any = zero.opt.mode.pipeline.gradients.lanes
    assert lanes.pool_nbytes <= 4 * 1.1 * SHORT["MAX_MESSAGE_BYTES"]


@on_ranks(2)
def test_register_keeps_reduced_gradients_in_the_buckets_of_ddp() -> None:
    setup = overlapping("register", MLP(width=192, depth=16), ADAMW, gradient_as_bucket_view=True)
    train(setup, MLP_PROBLEM, range(3))
    setup.model(noise(rank(), 4, 16)).square().mean().backward()
    lanes: Any = setup.opt.mode.pipeline.gradients.lanes
    assert lanes.grads.keys() == lanes.held
    assert all(lane.shard is None for lane in lanes)


def _failing(act: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return `act`, but on rank 1 the call of this number lacks memory."""
    left = itertools.count(-number if rank() == 1 else 1, 1)

    def act_or_fail(*args: Any, **kwargs: Any) -> Any:
        if next(left) == -1:
            raise torch.OutOfMemoryError("no memory for a message")
        return act(*args, **kwargs)

    return act_or_fail


def _differences(place: Any, name: str, number: int, remedy: str, **options: Any) -> list[str]:
    """Fail in a call amid a round on rank 1, and return what differs from leaving the batch out."""
    _shorten()
    options["bucket_bytes"] = 2**14
    setups = [with_zero(MLP_PROBLEM.fresh(), SGD, **options) for _ in range(2)]
    failing, expected = setups
    lanes: Any = failing.opt.mode.pipeline.gradients.lanes
    assert len(next(iter(lanes)).packings) > 1
    for step in range(4):
        if step != 1:
            train(failing, MLP_PROBLEM, range(step, step + 1))
            train(expected, MLP_PROBLEM, range(step, step + 1))
            continue
        failed = pytest.raises(RuntimeError, match="no memory for a message")
        broken = mock.patch.object(place, name, _failing(getattr(place, name), number))
        skipped = pytest.raises(BatchSkippedError)
        other = skipped if remedy == "recover" else contextlib.nullcontext()
        with broken, failed if rank() == 1 else other:
            failing.backward(step, MLP_PROBLEM)  # may wait for the other rank, or the step does
            if remedy == "recover":
                failing.opt.step()
        if remedy == "recover":
            failing.opt.recover()
        elif remedy == "step":
            failing.opt.step()  # backward has left out gradients on rank 1
        failing.opt.zero_grad()
    failing.opt.verify()
    return [] if remedy == "step" else differing(expected.params, failing.params)


REMEDIES = ["recover", "zero_grad", "step"]


@pytest.mark.parametrize("number", ["note", 1, 2, 3, 6])
@pytest.mark.parametrize("remedy", REMEDIES)
@on_ranks(2)
def test_a_message_that_cannot_be_packed_leaves_no_rank_waiting(
    number: Any, remedy: str
) -> list[str]:
    """The rest of the round is sent later: with the gradients that there are, or with zeros."""
    if number == "note":
        return _differences(lockstep, "exchange_rows", 1, remedy)
    return _differences(Lanes, "_pack", number, remedy)


@pytest.mark.parametrize("number", [1, 2, 6])
@pytest.mark.parametrize("remedy", REMEDIES)
@on_ranks(2)
def test_a_message_that_cannot_be_launched_goes_to_its_group_later(
    number: int, remedy: str
) -> list[str]:
    """Over NCCL, messages take turns in two groups. In another, one would meet others' data."""
    with mock.patch.object(group, "EXCHANGING", frozenset()):
        args = collectives, "_reduce_scatter_single", number, remedy
        return _differences(*args, recoverable=True)
