"""On a CUDA device: steps that are replayed as CUDA graphs have the numbers of steps taken."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from on_nccl import same_bits
from problems import assert_alike, assert_same
from ranks import run_ranks
from recorded import capturable, graphs_counted
from step_changes import CHANGES, compare, new_params, run
from test_gpu import gpu_model
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from shardstep import MixedPrecision, ZeroRedundancyOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 12


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_never_missed(name: str) -> None:
    act, replays = CHANGES[name]
    assert sum(compare({5: act}, device="cuda")) >= sum(replays)


def _train(model: nn.Module, opt: Any, scheduled: bool) -> list[torch.Tensor]:
    scheduler = CosineAnnealingLR(opt, STEPS) if scheduled else None
    for step in range(STEPS):
        torch.manual_seed(step)
        model(torch.randn(16, 96).to(next(model.parameters()))).float().square().mean().backward()
        opt.step()
        if scheduler is not None:
            scheduler.step()
        opt.zero_grad()
    return list(model.parameters())


def _replayed(mode: str, dtype: torch.dtype) -> int:
    with same_bits():
        seen, replays = [], []
        for masters in (False, True) if dtype is torch.float32 else (True, True):
            # In 16 bits both are sharded, and hooks keep the first from being replayed.
            model = gpu_model().cuda().to(dtype)
            kind, options = capturable("cuda")
            zero: dict[str, Any] = {"module": model} if mode == "module" else {}
            zero["parameters_as_bucket_view"] = mode == "drop-in views"
            if masters:
                zero["precision"] = MixedPrecision()
                opt: Any = ZeroRedundancyOptimizer(model.parameters(), kind, **zero, **options)
            else:
                opt = kind(model.parameters(), **options)
            if masters and not seen:
                opt.optim.register_step_post_hook(lambda *_: None)
            with graphs_counted() as made:
                seen.append(_train(model, opt, scheduled=True))
            replays.append(sum(each.replays for each in made))
        assert_same(*seen)
    return replays[1] if not replays[0] else -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["drop-in", "drop-in views", "module"])
def test_steps_are_replayed_in_a_loop_that_frees_its_gradients(
    mode: str, dtype: torch.dtype
) -> None:
    assert run_ranks(_replayed, 1, mode, dtype, backend="nccl")[0] >= STEPS // 2


def test_steps_that_are_not_fused_are_not_recorded() -> None:
    assert compare({}, device="cuda", fused=False) == []


def test_a_step_that_fails_while_it_is_recorded_is_taken_as_usual() -> None:
    params = new_params("cuda")
    kind, options = capturable("cuda")
    opt = ZeroRedundancyOptimizer(params, kind, **options)
    fused = torch._fused_adamw_

    def waiting(*args: Any, **kwargs: Any) -> None:
        args[0][0].sum().item()  # not allowed while a graph is recorded
        fused(*args, **kwargs)

    with mock.patch.object(torch, "_fused_adamw_", waiting):
        got = run(opt, params, {}, 5)
    params = new_params("cuda")
    assert_alike(run(kind(params, **options), params, {}, 5), got)
    # The device and the allocator work as before.
    assert sum(compare({}, device="cuda")) == 8


def test_a_learning_rate_on_the_cpu_is_not_recorded() -> None:
    assert compare({}, device="cuda", lr=torch.tensor(0.01)) == []


def test_an_iteration_can_be_captured_by_the_user() -> None:
    """Whether a graph of the user's own has the step in it."""
    seen = []
    for sharded in (False, True):
        params = new_params("cuda")
        for param in params:
            param.grad = torch.ones_like(param)
        kind, options = capturable("cuda")
        opt: Any = kind(params, **options)
        if sharded:
            opt = ZeroRedundancyOptimizer(params, kind, **options)
        for _ in range(3):
            opt.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            opt.step()
        for _ in range(3):
            graph.replay()
        seen.append([param.detach().clone() for param in params])
    assert_alike(*seen)
