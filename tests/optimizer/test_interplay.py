"""Two features at once: each of them is tested alone elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixtures import MASTERS, net, steps
from models import consolidated
from on_ranks import on_ranks
from problems import assert_same, copies, differing
from ranks import run_ranks
from torch import nn, optim
from traffic import counted

from shardstep import MixedPrecision, ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt
from shardstep.gradients.lockstep import Lockstep


def adamw(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        model.named_parameters(), optim.AdamW, lr=1e-3, precision=MASTERS, bucket_bytes=1
    )


@pytest.mark.parametrize("way", ["native", "dict"])
@on_ranks(2)
def test_a_parameter_that_is_frozen_when_its_state_is_loaded_has_it_in_fp32(
    tmp_path: Path, way: str
) -> None:
    """Its state and its master are those of one that had trained in 32 bits.

    The first parameter trains, is frozen, and then a checkpoint is made.
    """
    reference = net()
    first = next(reference.parameters())
    opt = adamw(reference)
    steps(reference, opt, range(3))
    first.requires_grad_(False)
    steps(reference, opt, range(3, 5))
    ckpt.save(tmp_path / "saved", opt, reference)
    saved, values = consolidated(opt), copies(reference.parameters())
    first.requires_grad_(True)
    steps(reference, opt, range(5, 8))
    model = net()
    next(model.parameters()).requires_grad_(False)
    opt = adamw(model)
    if way == "native":
        ckpt.load(tmp_path / "saved", opt, model)
    else:
        for rank in range(opt.world_size):  # one after the other: nobody waits for anybody
            if opt.rank == rank:
                opt.load_state_dict(saved)
            dist.barrier()
        for param, value in zip(model.parameters(), values, strict=True):
            param.data.copy_(value)
    next(model.parameters()).requires_grad_(True)
    steps(model, opt, range(5, 8))
    assert_same(list(reference.parameters()), list(model.parameters()))


@on_ranks(2)
def test_a_parameter_that_never_trained_has_no_master_after_loading(tmp_path: Path) -> None:
    """A large model that is frozen but for adapters is not to be kept twice."""
    model = net()
    first, *_ = model.parameters()
    first.requires_grad_(False)
    opt = adamw(model)
    steps(model, opt, range(2))
    ckpt.save(tmp_path / "never", opt, model)
    saved = consolidated(opt)
    for way in ("native", "dict"):
        model = net()
        first, *_ = model.parameters()
        first.requires_grad_(False)
        opt = adamw(model)
        if way == "native":
            ckpt.load(tmp_path / "never", opt, model)
        else:
            opt.load_state_dict(saved)
        assert opt.full_master(first) is None


# --------------------------------------------------------------------------- reports and masters


def reported(reduce_dtype: torch.dtype | None, frozen: bool) -> dict[str, Any]:
    model = net()
    next(model.parameters()).requires_grad_(not frozen)
    policy = MixedPrecision(reduce_dtype=reduce_dtype)
    with counted() as traffic:
        opt = ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, module=model, precision=policy, bucket_bytes=1
        )
    traffic.reset()
    model(torch.ones(2, 30, dtype=torch.bfloat16)).sum().backward()
    opt.step()
    opt.shards.wait_for_params()
    sent = [traffic.nbytes["reduce_scatter"], traffic.nbytes["all_gather"]]
    report = opt.report()
    masters = {m.untyped_storage().data_ptr(): m for m in opt.shards.masters().values()}
    return {
        "sent": ([report.reduce_nbytes, report.gather_nbytes], sent),
        "masters": (
            report.master_nbytes,
            sum(master.untyped_storage().nbytes() for master in masters.values()),
        ),
        "gradients": (report.gradient_nbytes, report.master_nbytes),
        "text": str(report),
    }


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float32])
def test_a_report_counts_masters_and_what_travels_in_another_dtype(
    reduce_dtype: torch.dtype | None, frozen: bool
) -> None:
    for report in run_ranks(reported, 2, reduce_dtype, frozen):
        (reduced, gathered), sent = report["sent"]
        # Which parameters had a gradient is gathered too, a byte for each, behind a note.
        assert sent == [reduced, gathered + Lockstep.nbytes + 6 - frozen]
        assert reduced == gathered * (2 if reduce_dtype is torch.float32 else 1)
        assert report["masters"][0] == report["masters"][1] > 0
        assert "masters" in report["text"]


def test_a_report_of_one_rank_counts_its_gradients_once() -> None:
    """In 32 bits, as its masters are."""
    gradients, masters = reported(None, frozen=False)["gradients"]
    assert gradients == masters > 0


# ------------------------------------------------------------- where torch makes its tensors


def _with_default_device(device: str, path: Path, module_given: bool) -> list[torch.Tensor]:
    """A loop in which a part of the model has no gradient, saved in both ways and loaded."""
    model = net()
    batches = [torch.randn(2, 30, dtype=torch.bfloat16) for _ in range(3)]
    given = {"module": model} if module_given else {}
    with torch.device(device):
        opt = ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, precision=MASTERS, bucket_bytes=1, **given
        )
        for batch in batches:
            model.get_submodule("0")(batch).square().mean().backward()
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
        ckpt.save(path / device, opt, model)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        ckpt.load(path / device, opt, model)
        ckpt.async_save(path / f"{device}-async", opt, model).wait()
        master = opt.full_master("0.weight")
    assert master is not None
    return copies([*model.parameters(), master])


@pytest.mark.parametrize("module_given", [False, True])
@on_ranks(2)
def test_the_default_device_is_the_user_s_own_affair(
    tmp_path: Path, module_given: bool
) -> list[int]:
    devices = ("cpu", "meta")
    return differing(*(_with_default_device(each, tmp_path, module_given) for each in devices))


# --------------------------------------------------------------------- what is made twice


class NeverMade(optim.SGD):
    """Cannot be constructed."""

    shardstep_layout = "sliced"  # it is not tried then

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        raise ValueError("not today")


@on_ranks(2)
def test_a_module_runs_on_after_an_optimizer_that_could_not_be_made() -> None:
    model = net(torch.float32)
    expected = model(torch.ones(2, 30))
    with pytest.raises(ValueError, match="not today"):
        ZeroRedundancyOptimizer(model.parameters(), NeverMade, module=model, lr=0.1)
    torch.testing.assert_close(model(torch.ones(2, 30)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("module_given", [False, True])
@on_ranks(2, fresh=True)
def test_a_compiled_function_may_step(module_given: bool) -> None:
    """Step within a compiled function, beside a plain one; return whether both are equal."""
    values = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        more = {"module": model} if module_given else {}
        opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, **more)
        step = torch.compile(lambda opt=opt: opt.step(), backend="eager") if compiled else opt.step
        for _ in range(3):
            model(torch.ones(2, 8)).square().mean().backward()
            step()
            opt.zero_grad()
        values.append([param.detach().clone() for param in model.parameters()])
    torch.compiler.reset()
    assert all(torch.equal(*pair) for pair in zip(*values, strict=True))
