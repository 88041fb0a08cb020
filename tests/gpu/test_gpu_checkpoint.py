"""Checkpoints of state on a CUDA device: written from there, loaded to there, and elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from test_gpu import gpu_model
from torch import nn

from shardstep import ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _train(model: nn.Module, opt: Any, steps: range, device: str) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(16, 96, generator=generator).to(device)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def _make(device: str, **options: Any) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = gpu_model().to(device)
    options = {"lr": 1e-2, "module": model, "bucket_bytes": 1} | options
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)


def _goes_on(root: Path, fused: bool) -> None:
    """Save now, in the background and by torch's own module; train on from each."""
    model, opt = _make("cuda", fused=fused)
    _train(model, opt, range(3), "cuda")
    ckpt.save(root / "sync", opt, model)
    dcp.save({"opt": ckpt.Sharded(opt), "model": model}, checkpoint_id=root / "dcp")
    pending = ckpt.async_save(root / "async", opt, model)
    _train(model, opt, range(3, 6), "cuda")
    pending.wait()
    for name in ("sync", "async", "dcp"):
        again, loaded = _make("cuda", fused=fused)
        if name == "dcp":
            dcp.load({"opt": ckpt.Sharded(loaded), "model": again}, checkpoint_id=root / name)
        else:
            ckpt.load(root / name, loaded, again)
        for state in loaded.optim.state.values():
            assert (state["exp_avg"].is_cuda, state["step"].is_cuda) == (True, fused), name
        _train(again, loaded, range(3, 6), "cuda")
        for (key, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(a, b), (name, key)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("backend", "world_size"), [("nccl", 1), ("gloo", 2)])
def test_training_goes_on_bit_for_bit(
    tmp_path: Path, backend: str, world_size: int, fused: bool
) -> None:
    run_ranks(_goes_on, world_size, tmp_path, fused, backend=backend)


def _cross(root: Path, source: str, target: str) -> bool:
    """State saved on one device is the same on another."""
    model, opt = _make(source)
    _train(model, opt, range(3), source)
    ckpt.save(root / "x", opt, model)
    again, loaded = _make(target)
    ckpt.load(root / "x", loaded, again)
    pairs = [*zip(model.parameters(), again.parameters(), strict=True)]
    for name, _ in model.named_parameters():
        other = loaded.full_state(name)
        pairs += [(value, other[key]) for key, value in opt.full_state(name).items()]
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


@pytest.mark.parametrize(("source", "target"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_devices_do_not_matter(tmp_path: Path, source: str, target: str) -> None:
    assert all(run_ranks(_cross, 2, tmp_path, source, target))


def _learning_rate_on_the_device(root: Path) -> None:
    options: dict[str, Any] = {"capturable": True, "foreach": True}
    model, opt = _make("cuda", lr=torch.tensor(1e-2, device="cuda"), **options)
    _train(model, opt, range(3), "cuda")
    ckpt.save(root / "x", opt, model)
    again, loaded = _make("cuda", lr=torch.tensor(1.0, device="cuda"), **options)
    ckpt.load(root / "x", loaded, again)
    assert loaded.param_groups[0]["lr"].is_cuda
    for each, optimizer in ((model, opt), (again, loaded)):
        _train(each, optimizer, range(3, 6), "cuda")
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_learning_rate_that_is_a_tensor_stays_on_its_device(tmp_path: Path) -> None:
    run_ranks(_learning_rate_on_the_device, 2, tmp_path)
