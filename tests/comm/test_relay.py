"""Exchanges in which one rank has most: evened out, to the same bits, with nobody left waiting."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from problems import same_bits
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardstep import (
    MixedPrecision,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from shardstep.comm import connect
from shardstep.comm.api import Done
from shardstep.comm.background import Background
from shardstep.plan import gather_numel_sent, reduce_numel_sent, relay

UNIT = 64

#: Segments of five ranks, in thousands of elements; those of the first half are relayed.
LENGTHS = {
    "one has all": [0, 0, 400, 0, 0],
    "one has most": [20, 900, 0, 60, 20],
    "the first and hardly another": [500, 0, 0, 0, 1],
    "two have much": [100, 60, 40, 40, 60],
    "all have as much": [100, 100, 100, 100, 100],
    "little": [3, 0, 0, 1, 0],
}


def bounds(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate((1000 * UNIT // 64 * length for length in lengths), initial=0))


# ------------------------------------------------------------------------------------- on paper


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, ...]:
    """Bounds of the segments of up to 70 ranks, often with one that has nearly all."""
    size = draw(st.integers(2, 70))
    lengths = draw(st.lists(st.integers(0, 300), min_size=size, max_size=size))
    if draw(st.booleans()):
        lengths[draw(st.integers(0, size - 1))] = draw(st.integers(1000, 100_000))
    return tuple(accumulate((UNIT * length for length in lengths), initial=0))


@given(cuts())
def test_nobody_sends_or_receives_more_than_the_whole_once(cuts: tuple[int, ...]) -> None:
    size, total = len(cuts) - 1, cuts[-1]
    segments = [stop - start for start, stop in pairwise(cuts)]
    route = relay(cuts)
    if route is None:
        few = size <= 6 and max(segments) * (size - 1) <= 3 * total
        assert few or total < 2**16 or len(set(segments)) == 1
        for rank in range(size):
            assert gather_numel_sent(cuts, rank) == segments[rank] * (size - 1)
            assert reduce_numel_sent(cuts, rank) == (total - segments[rank], 0)
        return
    bound = total + UNIT * size  # slices are whole alignment units
    for rank in range(size):
        others = [other for other in range(size) if other != rank]
        received = sum(
            route.from_owner(other, rank).numel + route.to_all(other, rank).numel
            for other in others
        )
        assert received <= bound
        assert gather_numel_sent(cuts, rank) <= bound
        assert sum(reduce_numel_sent(cuts, rank)) <= bound
        parts = route.slices[rank].numel * (size - 1)
        assert parts + segments[rank] <= bound


@given(cuts())
def test_a_relayed_gather_delivers_everything_to_everybody(cuts: tuple[int, ...]) -> None:
    route = relay(cuts)
    if route is None:
        return
    size = len(cuts) - 1
    ranks = range(size)
    for rank in ranks:
        assert sum(route.from_owner(owner, rank).numel for owner in ranks) == (
            route.slices[rank].numel
        ), "a slice is complete after the first round"
        has = [route.segments[rank], route.slices[rank]]
        has += [route.to_all(other, rank) for other in ranks if other != rank]
        covered = torch.zeros(cuts[-1] // UNIT, dtype=torch.bool)
        for interval in has:
            covered[interval.start // UNIT : interval.stop // UNIT] = True
        assert covered.all()


@given(cuts())
def test_relayed_sums_go_to_their_owner_once(cuts: tuple[int, ...]) -> None:
    route = relay(cuts)
    if route is None:
        return
    for segment in route.segments:
        parts = [slice_.intersect(segment) for slice_ in route.slices]
        assert sum(part.numel for part in parts) == segment.numel


def test_few_ranks_and_even_segments_go_straight() -> None:
    assert relay((0, 0, 0, 0, 2**24)) is None
    assert relay((0, 0, 0, 0, 0, 2**24)) is not None
    assert relay(bounds([100, 80, 90, 100, 100])) is None
    assert relay(bounds([100, 80, 90, 100, 100, 100, 100])) is not None
    assert relay(range(0, 5 * 2**20 + 1, 2**20)) is None
    assert relay(bounds([100, 100, 100, 100, 100])) is None


# ---------------------------------------------------------------------------------- over a group


class Sent:
    """How many bytes this rank has really sent."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._isend = dist.isend

    def __call__(self, data: Tensor, **options: Any) -> Any:
        self.nbytes += data.nbytes
        return self._isend(data, **options)


def exchange_everything(again: bool) -> list[str]:
    failures = []
    comm = connect(None).new_connection() if again else connect(None)
    rank, size = comm.group_rank, comm.world_size
    flying: list[tuple[str, Any, Tensor, Tensor]] = []
    sent = Sent()
    with mock.patch.object(dist, "isend", sent):
        for number, (name, lengths) in enumerate(LENGTHS.items()):
            edges = bounds(lengths)
            own = slice(edges[rank], edges[rank + 1])
            random = torch.Generator().manual_seed(number)
            for wire, kept in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
                parts = [torch.randn(edges[-1], generator=random).to(wire) for _ in range(size)]
                buffer = torch.full_like(parts[0], torch.nan)
                buffer[own] = parts[0][own]
                flying.append((name, comm.all_gather(buffer, edges), buffer, parts[0]))
                out = torch.full((own.stop - own.start,), torch.nan, dtype=kept)
                total = parts[0][own].to(kept)
                for part in parts[1:]:
                    total = total + part[own].to(kept)
                pending = comm.reduce_scatter(parts[rank].clone(), edges, out)
                flying.append((name, pending, out, total))
                if rank == number % size:  # some wait in between, for something else each
                    flying[len(flying) // 2][1].wait()
        for name, pending, found, expected in flying[:: -1 if rank % 2 else 1]:
            pending.wait()
            pending.wait()
            if not same_bits(found, expected):
                failures.append(f"{name}, {found.dtype}, {len(found)} elements")
    counted = sum(comm.ledger.nbytes_sent.values())
    if sent.nbytes != counted:
        failures.append(f"sent {sent.nbytes} bytes and counted {counted}")
    return failures


@pytest.mark.parametrize("again", [False, True])
def test_relayed_and_straight_exchanges_in_flight_together_give_the_right_bits(
    again: bool,
) -> None:
    assert [relay(bounds(lengths)) is not None for lengths in LENGTHS.values()] == [
        *[True] * 3,
        *[False] * 3,
    ]
    assert run_ranks(exchange_everything, 5, again) == [[]] * 5


def launch_and_leave() -> bool:
    """Rank 3 does not wait for what it has launched until the others have it."""
    comm = connect(None).new_connection()
    edges = bounds(LENGTHS["one has most"])
    expected = torch.arange(edges[-1], dtype=torch.float32)
    buffer = torch.zeros_like(expected)
    own = slice(edges[comm.group_rank], edges[comm.group_rank + 1])
    buffer[own] = expected[own]
    pending = comm.all_gather(buffer, edges)
    if comm.group_rank != 3:
        pending.wait()
    dist.barrier()
    pending.wait()
    return torch.equal(buffer, expected)


def test_a_rank_that_has_no_use_for_a_gather_keeps_nobody_waiting() -> None:
    assert run_ranks(launch_and_leave, 5) == [True] * 5


# ------------------------------------------------------------------------------------- training


class Lookup(nn.Module):
    """A table that is most of the model, and a layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(700, 128, dtype=dtype)
        self.head = nn.Linear(128, 16, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def train(straight: bool, overlap: bool, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    model = Lookup(dtype)
    with mock.patch("shardstep.plan.relay.MIN_NUMEL", 2**40 if straight else 2**16):
        opt = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.Adafactor,
            module=model,
            overlap=overlap,
            precision=MixedPrecision() if dtype is torch.bfloat16 else None,
            lr=0.01,
        )
        relayed = [relay(bucket.cuts) is not None for bucket in opt.plan.buckets]
        assert any(relayed) is not straight
        losses = []
        for step in range(4):
            for half in range(2):  # accumulated
                torch.manual_seed(100 * step + 10 * half + dist.get_rank())
                loss = model(torch.randint(700, (64,))).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
            opt.clip_grad_norm_(0.5)
            if step % 2 and dist.get_rank() == 1:
                model.head.weight.sum()  # another order of reading on one rank
            opt.step()
            opt.zero_grad()
        return [param.detach().clone() for param in model.parameters()] + losses


def train_both_ways(overlap: bool, dtype: torch.dtype) -> bool:
    one, other = train(True, overlap, dtype), train(False, overlap, dtype)
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [True, False])
def test_training_with_a_dominating_table_is_the_same_relayed_and_straight(
    overlap: bool, dtype: torch.dtype
) -> None:
    assert run_ranks(train_both_ways, 5, overlap, dtype) == [True] * 5


class Uneven(nn.Module):
    """Several buckets, none of which has segments of equal lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1700, 128)
        self.layers = nn.Sequential(nn.Linear(128, 1200), nn.ReLU(), nn.Linear(1200, 300))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.layers(self.table(tokens))
        return out


def train_under_ddp(hook: Callable[..., Any] | None) -> bool:
    torch.manual_seed(0)
    models = [DistributedDataParallel(Uneven(), bucket_cap_mb=1) for _ in range(2)]
    plain = torch.optim.Adafactor(models[0].parameters(), lr=0.01)
    opt = ZeroRedundancyOptimizer(
        models[1].parameters(), torch.optim.Adafactor, overlap_with_ddp=bool(hook), lr=0.01
    )
    if hook is not None:
        models[0].register_comm_hook(None, allreduce_hook)
        models[1].register_comm_hook(None, hook(allreduce_hook, models[1], opt))
    for param, other in zip(*(model.parameters() for model in models), strict=True):
        other.data.copy_(param.data)
    for step in range(5):
        torch.manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(1700, (32,))
        for model, optimizer in zip(models, (plain, opt), strict=True):
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert any(relay(bucket.cuts) is not None for bucket in opt.plan.buckets)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return all(same_bits(a.detach(), b.detach()) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("hook", [None, hook_with_zero_step, hook_with_zero_step_interleaved])
def test_under_ddp_relayed_gathers_give_the_unsharded_numbers(
    hook: Callable[..., Any] | None,
) -> None:
    assert run_ranks(train_under_ddp, 7, hook) == [True] * 7


def step_and_leave() -> bool:
    """Rank 3 has no use for the new parameters until the others have used them."""
    torch.manual_seed(0)
    model = Lookup(torch.float32)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adafactor, module=model)
    model(torch.arange(64)).sum().backward()
    opt.step()
    if dist.get_rank() != 3:
        model(torch.arange(64))
    dist.barrier()
    return bool(model(torch.arange(64)).isfinite().all())


def test_a_rank_that_does_not_use_its_parameters_keeps_nobody_waiting() -> None:
    assert run_ranks(step_and_leave, 5) == [True] * 5


def step_before_another() -> bool:
    """Rank 1 waits, between its backward and its step, for rank 0 to have taken its own."""
    torch.manual_seed(0)
    model = Lookup(torch.float32)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adafactor, module=model)
    message = torch.zeros(1)
    for _ in range(3):
        model(torch.arange(64)).sum().backward()
        if dist.get_rank() == 1:
            dist.recv(message, 0)
        opt.step()
        if dist.get_rank() == 0:
            dist.send(message, 1)
        opt.zero_grad()
    return bool(model(torch.arange(64)).isfinite().all())


def test_a_rank_may_wait_for_anothers_step_before_its_own() -> None:
    assert run_ranks(step_before_another, 5) == [True] * 5


def run_out_of_data(layout: str) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(512, 256)
    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, module=model, layout=layout, lr=0.1
    )
    relayed = [relay(bucket.cuts) is not None for bucket in opt.plan.buckets]
    assert any(relayed) == (layout == "whole")
    with Join([opt]):
        for step in range(4 if dist.get_rank() == 0 else 2):
            torch.manual_seed(100 * step + dist.get_rank())
            model(torch.randn(2, 512)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    return model.weight.detach().clone()


def test_ranks_without_data_take_part_in_relayed_exchanges() -> None:
    whole, sliced = (run_ranks(run_out_of_data, 5, layout) for layout in ("whole", "sliced"))
    assert all(same_bits(one, other) for one, other in zip(whole, sliced, strict=True))


class Agreed(torch.autograd.Function):
    """A collective in backward, as tensor parallelism and SyncBatchNorm have them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


class InBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.layers
        return nn.Sequential(*rest)(Agreed.apply(first(x)))  # type: ignore[no-any-return]


def late_on_all_but_one(state: Any, bucket: Any) -> Any:
    future = allreduce_hook(state, bucket)
    if dist.get_rank() == 0:
        time.sleep(0.1)  # here it is reduced by the time it is asked for
    return future


def collect_in_backward() -> bool:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(InBetween(), bucket_cap_mb=0.2)
    opt = ZeroRedundancyOptimizer(
        ddp.parameters(),
        torch.optim.SGD,
        layout="whole",
        overlap_with_ddp=True,
        bucket_bytes=256 * 256 * 4,
        lr=0.1,
    )
    assert all(relay(bucket.cuts) is not None for bucket in opt.plan.buckets)
    hook = hook_with_zero_step_interleaved(late_on_all_but_one, ddp, opt)
    ddp.register_comm_hook(None, hook)
    for _ in range(4):
        ddp(torch.randn(2, 256)).square().mean().backward()
    return all(bool(param.isfinite().all()) for param in ddp.parameters())


def test_collectives_in_backward_do_not_wait_for_relayed_gathers() -> None:
    assert run_ranks(collect_in_backward, 5) == [True] * 5


ENDS = """
import sys, time, torch, torch.distributed as dist
from shardstep import ZeroRedundancyOptimizer

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=5)
model = torch.nn.Linear(512, 256)
opt = ZeroRedundancyOptimizer(
    model.parameters(), torch.optim.SGD, module=model, layout="whole", lr=0.1
)
model(torch.ones(2, 512)).sum().backward()
opt.clip_grad_norm_(1e9)
(bucket,) = opt.plan.training_buckets
if bucket.segment(rank).numel > bucket.numel // 2:
    time.sleep(0.5)  # the others have come to their end, and wait for this in the background
opt.step()
"""


@pytest.mark.slow
def test_a_program_may_end_with_gathers_under_way(tmp_path: Path) -> None:
    # As a program of its own: a rank of `run_ranks` leaves without ending the interpreter.
    commands = [
        [sys.executable, "-c", ENDS, str(rank), str(tmp_path / "meet")] for rank in range(5)
    ]
    programs = [subprocess.Popen(command, stderr=subprocess.PIPE) for command in commands]
    ends = [program.communicate(timeout=60) for program in programs]
    assert [program.returncode for program in programs] == [0] * 5, ends


def read_meanwhile() -> list[float]:
    """What another thread reads while the owner's message to one rank is late."""
    torch.manual_seed(0)
    model = nn.Linear(512, 256)
    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, module=model, layout="whole", lr=0.1
    )
    (bucket,) = opt.plan.training_buckets
    owner = max(range(5), key=lambda rank: bucket.segment(rank).numel)
    late = (owner + 1) % 5
    model(torch.ones(2, 512)).square().mean().backward()
    opt.clip_grad_norm_(1e9)
    isend, read = dist.isend, []

    def slow(data: Tensor, **options: Any) -> Any:
        if options["group_dst"] == late:
            return Late(lambda: isend(data, **options))
        return isend(data, **options)

    def peek() -> None:
        while not hasattr(model.weight, "_shardstep_flight") and not read:
            time.sleep(0.001)
        time.sleep(0.2)
        read.append(float(model.weight.detach().double().sum()))

    with mock.patch.object(dist, "isend", slow if dist.get_rank() == owner else isend):
        thread = threading.Thread(target=peek, daemon=True)
        if dist.get_rank() == late:
            thread.start()
        opt.step()
        read.append(float(model.weight.detach().double().sum()))
        if dist.get_rank() == late:
            thread.join()
    return read


class Late:
    """A message that is sent half a second later."""

    def __init__(self, send: Callable[[], Any]) -> None:
        self._send = send
        self._work: Any = None
        self._thread = threading.Thread(target=self._go)
        self._thread.start()

    def _go(self) -> None:
        time.sleep(0.5)
        self._work = self._send()

    def wait(self) -> None:
        self._thread.join()
        self._work.wait()


def test_threads_that_read_what_is_late_read_the_same() -> None:
    seen = run_ranks(read_meanwhile, 5)
    assert len({value for read in seen for value in read}) == 1


def say_what_is_sent() -> tuple[int, int]:
    torch.manual_seed(0)
    model = Lookup(torch.float32)
    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adafactor, module=model, overlap=False
    )
    sent = Sent()
    with mock.patch.object(dist, "isend", sent):
        model(torch.arange(64)).sum().backward()
        opt.step()
    flags = len(list(model.parameters())) * (dist.get_world_size() - 1)
    report = opt.report()
    return sent.nbytes - flags, report.reduce_nbytes + report.gather_nbytes


def test_the_report_says_what_is_really_sent() -> None:
    for sent, said in run_ranks(say_what_is_sent, 5):
        assert sent == said


def keep_dying() -> str:
    comm = connect(None)
    edges = bounds([0, 0, 40_000, 0, 0])
    buffer = torch.zeros(edges[-1])
    comm.all_gather(buffer[: 5 * UNIT], range(0, 5 * UNIT + 1, UNIT)).wait()
    if comm.group_rank == 4:
        raise ValueError("gone")
    comm.all_gather(buffer, edges).wait()
    return "no error"


def test_a_rank_that_fails_shows_on_the_others() -> None:
    with pytest.raises(Exception, match="gone") as caught:
        run_ranks(keep_dying, 5)
    assert "gathering parameters" in str(caught.value)


def test_without_a_thread_to_be_had_nobody_waits_for_what_is_never_done() -> None:
    background = Background()
    with mock.patch("threading.Thread.start", side_effect=RuntimeError("no more threads")):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no more threads"):
                background.do(Done)
    background.do(Done).wait()
