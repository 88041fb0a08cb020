"""Flat buffers: dense tensors in memory order, and the two homes of parameters between steps."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from problems import copies

from shardstep.params.flat import flat, is_dense
from shardstep.params.inputs import describe
from shardstep.params.sharded_params import BucketViews, OwnStorage, ParamStorage
from shardstep.plan import ShardPlan

HOMES = [OwnStorage, BucketViews]
LAYOUTS = ["sliced", "whole"]


DENSE = [
    torch.ones(()),
    torch.ones(0),
    torch.ones(4, 0, 3),
    torch.ones(0, 4).t(),
    torch.ones(6),
    torch.ones(2, 3),
    torch.ones(2, 3).t(),
    torch.ones(2, 3, 4).permute(2, 0, 1),
    torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    torch.ones(2, 1, 4, 5).contiguous(memory_format=torch.channels_last),
    torch.ones(10)[3:7],
    torch.ones(5, 3)[2:4],
    torch.ones(1).expand(1, 1, 1),
    torch.empty_strided((1, 3), (100, 1)),
]
GAPS_OR_OVERLAPS = [
    torch.ones(10)[::2],
    torch.ones(4, 6)[:, :3],
    torch.ones(4, 6)[:, 2],
    torch.ones(4, 6)[::2],
    torch.ones(1).expand(5),
    torch.ones(3, 1).expand(3, 4),
    torch.arange(6.0).as_strided((2, 3), (2, 1)),
    torch.arange(11.0).as_strided((3, 3), (3, 2)),
]


def test_tensors_are_dense_without_gaps_and_overlaps() -> None:
    for tensor in [*DENSE, *GAPS_OR_OVERLAPS]:
        dense = any(tensor is each for each in DENSE)
        assert is_dense(tensor) is dense, f"{tuple(tensor.shape)}, strides {tensor.stride()}"


# --------------------------------------------------------------------- the two homes


def make_params() -> list[torch.Tensor]:
    """Two dtypes, a channels-last and a transposed weight, a scalar, an empty and a frozen one."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    data = [
        rand(100, 33),
        rand(8, 4, 3, 3).contiguous(memory_format=torch.channels_last),
        rand(50, 20).t(),
        rand(300, 150),
        rand(200, 3).bfloat16(),
        rand(),
        rand(0, 4),
        rand(7).bfloat16(),
        rand(10, 9),
    ]
    params: list[torch.Tensor] = [torch.nn.Parameter(each) for each in data]
    params.append(torch.nn.Parameter(rand(65), requires_grad=False))
    return params


def make_plan(params: Sequence[torch.Tensor], world_size: int, layout: str) -> ShardPlan:
    return ShardPlan.make(describe([{"params": params}]), world_size, layout, bucket_bytes=1)


def assert_same(params: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for param, value in zip(params, expected, strict=True):
        assert param.dtype == value.dtype
        assert param.stride() == value.stride()
        assert torch.equal(param, value)


def gather_by_hand(plan: ShardPlan, homes: Sequence[ParamStorage]) -> None:
    """What communication does: every rank's segment into every rank's buffer."""
    for bucket, *messages in zip(plan.training_buckets, *(h.messages for h in homes), strict=True):
        buffers = [message.load() for message in messages]
        for owner in range(plan.world_size):
            own = bucket.segment(owner).slice
            sent = buffers[owner][own].clone()
            for buffer in buffers:
                buffer[own] = sent
        for message in messages:
            message.store()


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_after_load_exchange_and_store_every_rank_has_what_each_owner_wrote(
    home: Callable[..., ParamStorage], layout: str, world_size: int
) -> None:
    replicas = [make_params() for _ in range(world_size)]
    plan = make_plan(replicas[0], world_size, layout)
    assert len(plan.training_buckets) > 2
    homes = [home(plan, replicas[rank], rank) for rank in range(world_size)]
    expected = copies(replicas[0])
    for rank in range(world_size):
        homes[rank].attach()
        assert_same(replicas[rank], expected)  # moving in changes no value and no stride
    for rank in range(world_size):
        # Each rank updates what it owns, and spoils nothing else.
        for piece in plan.pieces(rank):
            if plan.specs[piece.param].trainable:
                flat(replicas[rank][piece.param])[piece.param_interval.slice].add_(rank + 1)
                flat(expected[piece.param])[piece.param_interval.slice].add_(rank + 1)
    if world_size > 1:
        gather_by_hand(plan, homes)
    for rank in range(world_size):
        assert_same(replicas[rank], expected)
        assert homes[rank].intact()


def test_own_storage_keeps_two_buffers_of_the_largest_bucket_and_leaves_parameters_there() -> None:
    params = make_params()
    addresses = [param.data_ptr() for param in params]
    plan = make_plan(params, 2, "sliced")
    home = OwnStorage(plan, params, 0)
    home.attach()
    assert home.depth == 2
    assert home.nbytes == 2 * max(bucket.nbytes for bucket in plan.training_buckets)
    # As many buckets as it says may be in flight together: their buffers are apart.
    for one, following in pairwise(home.messages):
        buffers = [one.load(), following.load()]
        starts = [buffer.data_ptr() for buffer in buffers]
        assert abs(starts[0] - starts[1]) >= buffers[starts[1] < starts[0]].nbytes
    home.detach(range(len(params)))
    assert [param.data_ptr() for param in params] == addresses
    alone = OwnStorage(make_plan(params, 1, "sliced"), params, 0)
    alone.attach()
    assert alone.nbytes == 0, "one rank needs no buffer"


@pytest.mark.parametrize("world_size", [1, 2])
def test_bucket_views_make_trainable_parameters_views_of_the_buckets(world_size: int) -> None:
    params = make_params()
    plan = make_plan(params, world_size, "sliced")
    frozen_at = params[-1].data_ptr()
    objects = [id(param) for param in params]
    home = BucketViews(plan, params, 0)
    home.attach()
    assert [id(param) for param in params] == objects
    assert params[-1].data_ptr() == frozen_at, "frozen parameters are not moved"
    for bucket, message in zip(plan.training_buckets, home.messages, strict=True):
        buffer = message.load()
        for slot in bucket.slots:
            if slot.numel:
                offset = params[slot.param].data_ptr() - buffer.data_ptr()
                assert offset == slot.bucket_offset * bucket.dtype.itemsize
        padding = torch.ones(bucket.numel, dtype=torch.bool)
        for slot in bucket.slots:
            padding[slot.bucket_offset : slot.bucket_offset + slot.numel] = False
        assert not buffer[padding].any(), "padding is sent too, and is zero"


DTYPES = [torch.float64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_in_buckets_have_storages_of_their_own_size(dtype: torch.dtype) -> None:
    model = torch.nn.ParameterDict(
        {
            "weight": torch.ones(33, 20).t(),
            "column": torch.ones(3, 1, 7).to(dtype=dtype),
            "scalar": torch.tensor(2.0).to(dtype),
            "large": torch.ones(300, 150).to(dtype),
        }
    )
    params = list(model.parameters())
    home = BucketViews(make_plan(params, 2, "sliced"), params, 0)
    home.attach()
    assert all(param.untyped_storage().nbytes() == param.nbytes for param in params)
    assert len({param.untyped_storage().data_ptr() for param in params}) == len(params)
    file = io.BytesIO()
    torch.save(model["scalar"], file)
    assert file.tell() < 4096, "a file holds one parameter, not its bucket"
    assert_same(list(copy.deepcopy(model).parameters()), params)
    # Shared memory is memory elsewhere: attach copies the values back, and says so.
    expected = copies(params)
    model.share_memory()
    assert not home.intact()
    with pytest.warns(UserWarning, match="parameter 'param 0' was moved to shared memory") as told:
        home.attach()
    assert len(told) == 1
    assert_same(params, expected)
    del home
    gc.collect()
    assert_same(params, expected)  # the memory outlives the home


def test_detached_parameters_no_longer_lie_in_the_buckets() -> None:
    params = make_params()
    plan = make_plan(params, 2, "sliced")
    home = BucketViews(plan, params, 0)
    home.attach()
    expected = copies(params)
    home.detach([1, 4])
    assert_same(params, expected)
    assert not home.intact()
    for message in home.messages:
        message.load().fill_(-1)
    assert_same([params[1], params[4]], [expected[1], expected[4]])
    assert torch.equal(params[0], torch.full_like(params[0], -1)), "the others still do"
