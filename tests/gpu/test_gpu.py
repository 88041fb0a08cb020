"""On a CUDA device: the same numbers, state where it belongs, several devices in one model."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problems import differing
from ranks import run_ranks
from reference.naive_masters import NaiveMasters
from scenarios import ALL, sharded
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardstep import (
    MixedPrecision,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    register,
)
from shardstep.params.stochastic_rounding import StochasticRounding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

AdamW = torch.optim.AdamW


def gpu_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(96, 300), nn.GELU(), nn.Linear(300, 200), nn.LayerNorm(200), nn.Linear(200, 7)
    )


class _TwoDevices(nn.Module):
    """Half on the CPU, half on the accelerator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.near = nn.Linear(96, 300)
        self.far = nn.Linear(300, 7).cuda()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.far(torch.relu(self.near(x.cpu())).cuda())


def _train(run: nn.Module, opt: Any, steps: int, device: str = "cuda") -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * step + (dist.get_rank() if dist.is_initialized() else 0))
        x = torch.randn(16, 96).to(device)
        loss = run(x).float().square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def _assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, one), two in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(one, two), name


def _alone(fused: bool, view: bool, with_module: bool) -> None:
    """One rank under NCCL against the plain optimizer, through a save and a load."""
    options = {"lr": 1e-2, "fused": fused}

    def wrap(model: nn.Module) -> ZeroRedundancyOptimizer:
        module = {"module": model} if with_module else {}
        return ZeroRedundancyOptimizer(
            model.parameters(), AdamW, parameters_as_bucket_view=view, **module, **options
        )

    plain, ours, again = (gpu_model().cuda() for _ in range(3))
    a, b = AdamW(plain.parameters(), **options), wrap(ours)
    assert _train(plain, a, 10) == _train(ours, b, 10)
    _assert_same(plain, ours)
    b.consolidate_state_dict()
    saved = b.state_dict()
    for index, entry in a.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(saved["state"][index][key], value.cpu()), (index, key)
    again.load_state_dict(ours.state_dict())
    c = wrap(again)
    c.load_state_dict(saved)
    for entry in c.optim.state.values():
        assert (entry["step"].is_cuda, entry["exp_avg"].is_cuda) == (fused, True)
    assert _train(plain, a, 5) == _train(again, c, 5)
    _assert_same(plain, again)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("view", "with_module"), [(False, False), (True, False), (False, True)])
def test_one_rank_under_nccl_gives_the_plain_optimizers_numbers(
    fused: bool, view: bool, with_module: bool
) -> None:
    run_ranks(_alone, 1, fused, view, with_module, backend="nccl")


def _against_ddp(overlap: bool, layout: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    ddp = DistributedDataParallel(gpu_model().cuda())
    expected = _train(ddp, AdamW(ddp.parameters(), lr=1e-2), 30)
    one = DistributedDataParallel(gpu_model().cuda())
    opt1 = ZeroRedundancyOptimizer(one.parameters(), AdamW, layout=layout, lr=1e-2)
    assert _train(one, opt1, 30) == expected
    _assert_same(one, ddp)
    two = gpu_model(seed=dist.get_rank()).cuda()
    options: dict[str, Any] = {"layout": layout, "overlap": overlap, "bucket_bytes": 100_000}
    opt2 = ZeroRedundancyOptimizer(two.parameters(), AdamW, module=two, lr=1e-2, **options)
    assert _train(two, opt2, 30) == expected
    _assert_same(two, ddp.module)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", ["sliced", "whole"])
def test_two_ranks_on_one_device_equal_ddp_bit_for_bit(overlap: bool, layout: str) -> None:
    run_ranks(_against_ddp, 2, overlap, layout)


def _hooked(way: str, view: bool, static: bool) -> None:
    """A DDP hook against DDP and the plain optimizer, from the first iteration on."""
    ddp = DistributedDataParallel(gpu_model().cuda(), bucket_cap_mb=0.1)
    expected = _train(ddp, AdamW(ddp.parameters(), lr=1e-2), 20)
    ours = DistributedDataParallel(
        gpu_model().cuda(), bucket_cap_mb=0.1, gradient_as_bucket_view=view, static_graph=static
    )
    opt = ZeroRedundancyOptimizer(
        ours.parameters(), AdamW, overlap_with_ddp=True, bucket_bytes=100_000, lr=1e-2
    )
    if way == "register":
        register(ours, opt)
    else:
        make = {"step": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}[way]
        ours.register_comm_hook(None, make(allreduce_hook, ours, opt))
    assert _train(ours, opt, 20) == expected
    _assert_same(ours, ddp)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("way", ["step", "interleaved", "register"])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_ddp_hooks_equal_ddp_bit_for_bit(backend: str, way: str, view: bool, static: bool) -> None:
    run_ranks(_hooked, 1 if backend == "nccl" else 2, way, view, static, backend=backend)


def _two_devices(view: bool) -> None:
    plain, ours = _TwoDevices(), _TwoDevices()
    a = AdamW(plain.parameters(), lr=1e-2)
    b = ZeroRedundancyOptimizer(ours.parameters(), AdamW, parameters_as_bucket_view=view, lr=1e-2)
    for step in range(10):
        torch.manual_seed(step)  # the same batch on all ranks
        x = torch.randn(16, 96)
        for model, opt in ((plain, a), (ours, b)):
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    b.consolidate_state_dict()
    _assert_same(plain, ours)


@pytest.mark.parametrize(
    ("backend", "world_size", "view"),
    [("gloo", 2, False), ("gloo", 2, True), ("nccl", 1, True), ("cpu:gloo,cuda:nccl", 1, True)],
)
def test_a_model_over_two_devices_is_sharded_on_both(
    backend: str, world_size: int, view: bool
) -> None:
    run_ranks(_two_devices, world_size, view, backend=backend)


# ------------------------------------------------------------------------------ 16-bit parameters


def _gradients(models: list[nn.Module], step: int) -> None:
    """The same made gradient on all of them, and on all ranks."""
    for number, params in enumerate(zip(*(model.parameters() for model in models), strict=True)):
        random = torch.Generator().manual_seed(1000 * step + number)
        grad = torch.randn(params[0].shape, generator=random)
        for param in params:
            param.grad = grad.to(param)


def _with_masters(dtype: torch.dtype, fused: bool, layout: str, with_module: bool) -> None:
    options: dict[str, Any] = {"lr": 1e-3, "fused": fused}
    plain, ours = gpu_model().cuda().to(dtype), gpu_model().cuda().to(dtype)
    naive = NaiveMasters([{"params": list(plain.parameters())}], AdamW, **options)
    opt = ZeroRedundancyOptimizer(
        ours.parameters(),
        AdamW,
        module=ours if with_module else None,
        precision=MixedPrecision(),
        layout=layout,
        bucket_bytes=100_000,
        **options,
    )
    for step in range(10):
        if step == 5:  # what is written to a parameter counts
            for a, b, m in zip(plain.parameters(), ours.parameters(), naive.masters, strict=True):
                a.data.clamp_(-0.02, 0.02)
                b.data.clamp_(-0.02, 0.02)
                m.data.copy_(torch.where(m.to(dtype) == a, m, a.float()))
        _gradients([plain, ours], step)
        naive.take_gradients()
        naive.step()
        opt.step()
        opt.zero_grad()
        _assert_same(plain, ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("backend", "world_size", "layout", "with_module"),
    [
        ("nccl", 1, "sliced", True),
        ("nccl", 1, "whole", False),
        ("gloo", 2, "sliced", True),
        ("gloo", 2, "whole", True),
        ("gloo", 2, "sliced", False),
    ],
)
def test_masters_have_the_numbers_of_unsharded_masters(
    dtype: torch.dtype, fused: bool, backend: str, world_size: int, layout: str, with_module: bool
) -> None:
    run_ranks(_with_masters, world_size, dtype, fused, layout, with_module, backend=backend)


def _steps_without_waiting(policy: MixedPrecision) -> None:
    model = gpu_model().cuda().bfloat16()
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, precision=policy, lr=1e-3, fused=True)
    for step in range(3):
        _gradients([model], step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        opt.step()
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_step_does_not_wait_for_the_device(stochastic: bool) -> None:
    policy = MixedPrecision(None if stochastic else torch.float32, stochastic_rounding=stochastic)
    run_ranks(_steps_without_waiting, 1, policy, backend="nccl")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_draws_the_same_on_every_device(dtype: torch.dtype) -> None:
    source = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    rounded = []
    for device in ("cpu", "cuda"):
        target = torch.empty(source.numel(), dtype=dtype, device=device)
        StochasticRounding(4).round_into(target, source.to(device), param=1, offset=64)
        rounded.append(target.cpu())
    assert torch.equal(*rounded)


def _device_bytes() -> float:
    """Bytes per element of the model, without the pool that gradients travel through."""
    width = 2048
    # cuBLAS keeps work space for each thread that uses it: forward's and backward's.
    first = nn.Linear(width, width, bias=False, device="cuda", dtype=torch.bfloat16)
    first(torch.randn(8, width, device="cuda", dtype=torch.bfloat16)).sum().backward()
    del first
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(24)))
    model = model.cuda().bfloat16()
    numel = sum(param.numel() for param in model.parameters())
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, module=model, lr=1e-3)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(8, width, device="cuda", dtype=torch.bfloat16)).sum().backward()
        opt.step()
        opt.zero_grad()
    torch.cuda.synchronize()
    gradients: Any = opt.mode.pipeline.gradients
    return (torch.cuda.memory_allocated() - before - gradients.lanes.pool_nbytes) / numel


def test_memory_between_steps_is_2_bytes_and_12_divided_by_the_ranks() -> None:
    assert run_ranks(_device_bytes, 1, backend="nccl") == [pytest.approx(2 + 12, rel=0.02)]
    assert run_ranks(_device_bytes, 2) == [pytest.approx(2 + 12 / 2, rel=0.02)] * 2


def _bytes_left(mode: str) -> list[int]:
    """Return the bytes in use after each of several models and optimizers is gone."""
    left = []
    for step in (True, False) * 3:
        setup = sharded(mode, gpu_model().cuda())
        setup.model(torch.ones(4, 96, device="cuda")).sum().backward()
        if step:
            setup.opt.step()
        del setup
        gc.collect()
        # NCCL's watchdog lets go of tensors that have travelled, in its own time.
        deadline = time.monotonic() + (3 if left else 1)
        while time.monotonic() < deadline and torch.cuda.memory_allocated() > max(left[:1] or [0]):
            time.sleep(0.05)
        left.append(torch.cuda.memory_allocated())
    return left


@pytest.mark.parametrize("mode", ALL)
def test_memory_is_freed_with_model_and_optimizer(mode: str) -> None:
    # The first one leaves cuBLAS with work space for forward's thread and backward's. After any of
    # them, the last bucket that DDP reduced may stay until more has travelled: a leak would add up.
    ((first, *others),) = run_ranks(_bytes_left, 1, mode, backend="nccl")
    assert min(others[-3:]) <= first


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_goes_to_the_gpu_after_its_optimizer_has_loaded(fused: bool) -> None:
    """Accelerate and Trainer do so when they resume."""
    assert run_ranks(_moved_after_loading, 1, fused, backend="nccl") == [[]]


def _moved_after_loading(fused: bool) -> list[int]:
    def trained(moved: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = gpu_model().cuda()
        plain = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        model(torch.ones(4, 96, device="cuda")).sum().backward()
        plain.step()
        plain.zero_grad()
        opt: Any = plain
        if moved:
            model.cpu()
            opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=fused)
            opt.load_state_dict(plain.state_dict())
            model.cuda()
        model(torch.ones(4, 96, device="cuda")).sum().backward()
        opt.step()
        return list(model.parameters())

    return differing(trained(False), trained(True))
