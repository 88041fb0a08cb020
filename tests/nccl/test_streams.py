"""The order between streams: random delays and overwritten free memory change no bit.

Each collective starts late on the device, after a sleep on a side stream. Forward, backward and
the step sleep at random on the compute stream. Memory that was freed is filled with NaN after every
pass. A missing wait, or a buffer that is freed or written in flight, then shows in the numbers.
Three planted faults show that it does.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from doubles import Wrapped, behind_the_door
from models import ADAMW, MLP, Setup, noise, rank
from on_nccl import run_on_nccl
from problems import differing
from recorded import capturable
from scenarios import ALL, WAYS, sharded
from torch import Tensor

from shardstep import MixedPrecision
from shardstep.comm import Comm, Operation, Work
from shardstep.comm.api import NOTHING_TO_DO

pytestmark = [
    pytest.mark.nccl,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with NCCL"),
]

MILLISECOND = 2_000_000
"""About, in cycles of the device's clock."""


class Late(Wrapped):
    """Starts each collective on the device after a sleep of up to 20 ms."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.random = random.Random(rank())
        self.stream = torch.cuda.Stream()

    @contextlib.contextmanager
    def late(self) -> Iterator[None]:
        """Launch from a stream that is behind the current one, which does not wait for it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(self.random.choice([0, 5, 20]) * MILLISECOND)
            yield

    def all_gather(
        self, buffer: Tensor, cuts: Sequence[int], operation: Operation = Operation.GATHER
    ) -> Work:
        with self.late():
            return self._inner.all_gather(buffer, cuts, operation)

    def reduce_scatter(self, buffer: Tensor, cuts: Sequence[int], out: Tensor) -> Work:
        with self.late():
            return self._inner.reduce_scatter(buffer, cuts, out)


class GathersNotWaitedFor(Late):
    """A fault: the next forward pass reads parameters that are in flight."""

    def all_gather(
        self, buffer: Tensor, cuts: Sequence[int], operation: Operation = Operation.GATHER
    ) -> Work:
        work = super().all_gather(buffer, cuts, operation)
        return NOTHING_TO_DO if operation is Operation.GATHER else work


class ReductionsNotWaitedFor(Late):
    """A fault: the step reads gradients that are in flight.

    Notes follow on the same connection, so to wait for those is to wait for the gradients. These
    arrive beside it, on a stream that nothing waits for.
    """

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.beside = torch.cuda.Stream()

    def reduce_scatter(self, buffer: Tensor, cuts: Sequence[int], out: Tensor) -> Work:
        arrived = torch.empty_like(out)
        work = super().reduce_scatter(buffer, cuts, arrived)
        with torch.cuda.stream(self.beside):
            work.wait()
            torch.cuda._sleep(20 * MILLISECOND)
            out.copy_(arrived)
        arrived.record_stream(self.beside)
        return NOTHING_TO_DO


class OverwrittenInFlight(Late):
    """A fault: a buffer is packed again while it is in flight."""

    def reduce_scatter(self, buffer: Tensor, cuts: Sequence[int], out: Tensor) -> Work:
        work = super().reduce_scatter(buffer, cuts, out)
        buffer.fill_(torch.nan)
        return work


def _overwrite_free_memory() -> None:
    """Fill freed blocks of the current stream with NaN, from small ones to two megabytes."""
    blocks = [
        torch.full((1 << power,), torch.nan, device="cuda")
        for power in range(7, 20)
        for _ in range(4)
    ]
    del blocks


class Disturbance:
    """Sleeps on the compute stream, and overwrites free memory."""

    def __init__(self) -> None:
        self._random = random.Random(100 + rank())

    def __call__(self, *ignored: Any) -> None:
        torch.cuda._sleep(self._random.choice([0, 0, 3]) * MILLISECOND)
        _overwrite_free_memory()


def _trained(mode: str, double: Callable[[Comm], Comm] | None, options: dict[str, Any]) -> Setup:
    dtype = torch.bfloat16 if "precision" in options else torch.float32
    torch.manual_seed(0)
    module = MLP().to(dtype)
    options = dict(options)
    for layer in module.layers if options.pop("compiled", False) else ():
        layer.compile(backend="aot_eager")
    with behind_the_door(double) if double else contextlib.nullcontext():
        kind = capturable() if options.pop("replayed", False) else ADAMW
        setup = sharded(mode, module, kind, zero=options)
    disturb: Callable[..., None] = Disturbance() if double else lambda *_: None
    for part in module.modules():
        if part._compiled_call_impl is None:
            part.register_forward_pre_hook(disturb)
    for param in module.parameters():
        param.register_hook(disturb)
    # Made beforehand, since the host waits for the device when it copies them.
    batches = [noise(number, 6, 16).to(dtype) for number in range(16)]
    for step in range(8):
        # In the second half gradients add up in the shard, where the loop says when to step.
        for number in range(1 + (step >= 4 and mode not in WAYS)):
            setup.model(batches[2 * step + number]).float().square().mean().backward()
            disturb()
        if mode not in WAYS:
            setup.clip(0.1)
            disturb()
        setup.opt.step()
        disturb()
        setup.opt.zero_grad()
    return setup


def _changed(mode: str, double: Callable[[Comm], Comm], options: dict[str, Any]) -> list[int]:
    """Return which parameters differ between a run with the double and one without."""
    warnings.simplefilter("ignore")
    return differing(_trained(mode, None, options).params, _trained(mode, double, options).params)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *((mode, {}) for mode in ALL),
        ("module", {"layout": "whole"}),
        ("module", {"compiled": True}),
        ("module", {"precision": MixedPrecision()}),
        ("module", {"replayed": True}),
        ("register", {"replayed": True}),
        ("drop-in", {"layout": "whole"}),
    ],
)
def test_delays_on_any_stream_change_no_bit(mode: str, options: dict[str, Any]) -> None:
    assert run_on_nccl(_changed, 2, mode, Late, options) == [[], []]


@pytest.mark.parametrize(
    "fault", [GathersNotWaitedFor, ReductionsNotWaitedFor, OverwrittenInFlight]
)
def test_a_planted_fault_is_seen(fault: type[Late]) -> None:
    for changed in run_on_nccl(_changed, 2, "module", fault, {}):
        assert changed


def _train_without_waits(mode: str, replayed: bool) -> int:
    """Train 8 steps, the last 4 with every wait of the host for the device forbidden."""
    warnings.simplefilter("ignore")
    kind = (torch.optim.AdamW, {"lr": 0.01, "fused": True})
    setup = sharded(mode, MLP(), capturable() if replayed else kind)
    batches = [noise(number, 6, 16) for number in range(8)]
    done = 0
    try:
        for batch in batches:
            if done == 4:
                torch.cuda.set_sync_debug_mode("error")
            setup.model(batch).square().mean().backward()
            setup.opt.step()
            setup.opt.zero_grad()
            done += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    dist.barrier()
    return done


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("mode", ALL)
def test_the_host_does_not_wait_for_the_device(mode: str, replayed: bool) -> None:
    assert run_on_nccl(_train_without_waits, 2, mode, replayed) == [8, 8]
