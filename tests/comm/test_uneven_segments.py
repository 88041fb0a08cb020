"""Training in which one rank owns most of a bucket: right counts, and no rank left waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from on_ranks import on_ranks
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer, hook_with_zero_step_interleaved
from shardstep.comm import headers
from shardstep.gradients.lockstep import Lockstep


class Lookup(nn.Module):
    """A table that is most of the model, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(700, 128)
        self.head = nn.Linear(128, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def make(**options: Any) -> tuple[Lookup, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = Lookup()
    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adafactor, module=model, **options
    )
    (bucket,) = opt.plan.training_buckets
    assert max(bucket.segment(rank).numel for rank in range(dist.get_world_size())) > (
        0.9 * bucket.numel
    )
    return model, opt


@on_ranks(2, 3)
def test_the_report_says_what_is_really_sent() -> None:
    model, opt = make(overlap=False)
    isend, sent = dist.isend, []

    def watched(data: Tensor, **options: Any) -> Any:
        sent.append(data.nbytes)
        return isend(data, **options)

    with mock.patch.object(dist, "isend", watched):
        model(torch.arange(64)).sum().backward()
        opt.step()
    # Which parameters had a gradient, the rank's position, the headers of the round and the step.
    note = len(list(model.parameters())) + Lockstep.nbytes + 2 * headers.NBYTES
    flags = note * (dist.get_world_size() - 1)
    report = opt.report()
    assert sum(sent) - flags == report.reduce_nbytes + report.gather_nbytes


@on_ranks(2)
def test_a_rank_that_leaves_after_its_step_keeps_no_other_waiting() -> None:
    """Rank 1 has no use for the new parameters until the other has used them."""
    model, opt = make()
    model(torch.arange(64)).sum().backward()
    opt.step()
    if dist.get_rank() != 1:
        model(torch.arange(64))
    dist.barrier()
    assert model(torch.arange(64)).isfinite().all()


@on_ranks(2)
def test_a_rank_that_steps_after_another_keeps_it_not_waiting() -> None:
    """Rank 1 waits, between its backward and its step, for rank 0 to have taken its own."""
    model, opt = make()
    message = torch.zeros(1)
    for _ in range(3):
        model(torch.arange(64)).sum().backward()
        if dist.get_rank() == 1:
            dist.recv(message, 0)
        opt.step()
        if dist.get_rank() == 0:
            dist.send(message, 1)
        opt.zero_grad()
    assert model(torch.arange(64)).isfinite().all()


class Averaged(torch.autograd.Function):
    """A collective in backward, as tensor parallelism and SyncBatchNorm have them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


class Average(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Averaged.apply(x)


def late_on_all_but_one(state: Any, bucket: Any) -> Any:
    future = allreduce_hook(state, bucket)
    if dist.get_rank() == 0:
        time.sleep(0.1)  # here it is reduced by the time it is asked for
    return future


@on_ranks(2)
def test_a_rank_that_is_in_a_collective_of_its_backward_keeps_no_other_waiting() -> None:
    torch.manual_seed(0)
    first, *rest = (nn.Linear(256, 256, bias=False) for _ in range(3))
    ddp = DistributedDataParallel(nn.Sequential(first, Average(), *rest), bucket_cap_mb=0.2)
    opt = ZeroRedundancyOptimizer(
        ddp.parameters(),
        torch.optim.SGD,
        layout="whole",
        overlap_with_ddp=True,
        bucket_bytes=256 * 256 * 4,
        lr=0.1,
    )
    hook = hook_with_zero_step_interleaved(late_on_all_but_one, ddp, opt)
    ddp.register_comm_hook(None, hook)
    for _ in range(4):
        ddp(torch.randn(2, 256)).square().mean().backward()
    assert all(param.isfinite().all() for param in ddp.parameters())


class Late:
    """A message that is sent half a second later."""

    def __init__(self, send: Callable[[], Any]) -> None:
        self._works: list[Any] = []
        self._timer = threading.Timer(0.5, lambda: self._works.append(send()))
        self._timer.start()

    def wait(self) -> None:
        self._timer.join()
        self._works[0].wait()


def read_meanwhile() -> list[float]:
    """What two threads of one rank read while the owner's message to it is late."""
    model, opt = make()
    (bucket,) = opt.plan.training_buckets
    owner = max(range(2), key=lambda rank: bucket.segment(rank).numel)
    weight = model.table.weight
    model(torch.arange(64)).square().mean().backward()
    opt.clip_grad_norm_(1e9)
    isend, read = dist.isend, []

    def slow(data: Tensor, **options: Any) -> Any:
        return Late(lambda: isend(data, **options))

    def peek() -> None:
        while not hasattr(weight, "_shardstep_flight") and not read:
            time.sleep(0.001)
        time.sleep(0.2)
        read.append(float(weight.detach().double().sum()))

    with mock.patch.object(dist, "isend", slow if dist.get_rank() == owner else isend):
        thread = threading.Thread(target=peek, daemon=True)
        if dist.get_rank() != owner:
            thread.start()
        opt.step()
        read.append(float(weight.detach().double().sum()))
        if dist.get_rank() != owner:
            thread.join()
    return read


def test_threads_that_read_what_is_late_read_the_same() -> None:
    seen = run_ranks(read_meanwhile, 2)
    assert len({value for read in seen for value in read}) == 1
