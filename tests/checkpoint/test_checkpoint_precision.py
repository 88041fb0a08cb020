"""Checkpoints across precision policies: masters are kept where they can be, made where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from problems import differing
from ranks import run_ranks
from torch import nn, optim

from shardstep import MixedPrecision, ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt

MASTERS = MixedPrecision()
STOCHASTIC = MixedPrecision(master_dtype=None, stochastic_rounding=True, seed=3)


class Frugal(optim.Optimizer):
    """Keeps its momentum in 16 bits, whatever it steps on."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["momentum"] = torch.zeros_like(param, dtype=torch.bfloat16)
                    state["momentum"].mul_(0.9).add_(param.grad)
                    param.sub_(group["lr"] * state["momentum"].to(param.dtype))


CASES: dict[str, tuple[Any, MixedPrecision]] = {
    "masters": (optim.AdamW, MASTERS),
    "stochastic": (optim.AdamW, STOCHASTIC),
    "frugal-masters": (Frugal, MASTERS),
    "frugal-stochastic": (Frugal, STOCHASTIC),
}


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 70), nn.Linear(70, 8), nn.LayerNorm(8)).to(dtype)


def make(
    dtype: torch.dtype,
    precision: MixedPrecision | None,
    layout: str = "sliced",
    cls: Any = optim.AdamW,
) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    model = net(dtype)
    named = model.named_parameters()
    return model, ZeroRedundancyOptimizer(
        named, cls, lr=1e-3, precision=precision, layout=layout, bucket_bytes=1
    )


def steps(model: nn.Module, opt: Any, numbers: range) -> None:
    for step in numbers:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        opt.step()
        opt.zero_grad()


def masters(model: nn.Module, opt: ZeroRedundancyOptimizer) -> list[Any]:
    return [opt.full_master(name) for name, _ in model.named_parameters()]


def write(root: Path) -> None:
    for name, (cls, precision) in CASES.items():
        model, opt = make(torch.bfloat16, precision, cls=cls)
        steps(model, opt, range(4))
        ckpt.save(root / name, opt, model)
        dcp.save({"model": model, "optim": ckpt.Sharded(opt)}, checkpoint_id=root / f"dcp-{name}")
        opt.consolidate_state_dict()
        if opt.rank == 0:
            torch.save([model.state_dict(), opt.state_dict()], root / f"{name}.pt")
    model, opt = make(torch.float32, None)
    steps(model, opt, range(4))
    ckpt.save(root / "fp32", opt, model)


def read(root: Path, name: str, kind: str, model: nn.Module, opt: ZeroRedundancyOptimizer) -> None:
    if kind == "native":
        ckpt.load(root / name, opt, model)
    elif kind == "dcp":
        parts = {"model": model, "optim": ckpt.Sharded(opt)}
        dcp.load(parts, checkpoint_id=root / f"dcp-{name}")
    else:
        weights, state = torch.load(root / f"{name}.pt", weights_only=True)
        model.load_state_dict(weights)
        opt.load_state_dict(state)


def go_on(root: Path, layout: str) -> list[str]:
    """The same policy: as if never interrupted."""
    failures = []
    for name, (cls, precision) in CASES.items():
        expected, reference = make(torch.bfloat16, precision, layout, cls)
        steps(expected, reference, range(8))
        for kind in ("native", "dcp", "plain"):
            model, opt = make(torch.bfloat16, precision, layout, cls)
            for param in model.parameters():
                param.detach().zero_()
            read(root, name, kind, model, opt)
            steps(model, opt, range(4, 8))
            wrong = differing(list(expected.parameters()), list(model.parameters()))
            if precision.master_dtype is not None:
                wrong += differing(masters(expected, reference), masters(model, opt))
            if wrong:
                failures.append(f"{name}, {kind}, {opt.world_size}, {layout}: {wrong}")
    return failures


def cross(root: Path) -> list[str]:
    failures = []
    # From masters to a model that can hold them.
    source, holder = make(torch.bfloat16, MASTERS)
    ckpt.load(root / "masters", holder, source)
    wide, opt = make(torch.float32, None)
    ckpt.load(root / "masters", opt, wide)
    if differing(masters(source, holder), list(wide.parameters())):
        failures.append("an fp32 model did not take the masters")
    alone = net(torch.float32)
    ckpt.load(root / "masters", model=alone)
    if differing(masters(source, holder), list(alone.parameters())):
        failures.append("an fp32 model without an optimizer did not take the masters")
    # From an fp32 model to masters.
    expected, _ = make(torch.float32, None)
    ckpt.load(root / "fp32", model=expected)
    narrow, opt = make(torch.bfloat16, MASTERS)
    ckpt.load(root / "fp32", opt, narrow)
    if differing(list(expected.parameters()), masters(narrow, opt)):
        failures.append("masters were not made of the fp32 weights")
    steps(narrow, opt, range(4, 5))
    # To 16 bits without masters: the parameters as the model saw them.
    bare, opt = make(torch.bfloat16, MixedPrecision(master_dtype=None))
    ckpt.load(root / "masters", opt, bare)
    if differing(list(source.parameters()), list(bare.parameters())):
        failures.append("without masters the parameters differ")
    if any(
        key != "step" and v.dtype != torch.bfloat16
        for s in opt.optim.state.values()
        for key, v in s.items()
    ):
        failures.append("without masters the state is not in the parameters' dtype")
    return failures


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("precision")
    run_ranks(write, 2, root)
    return root


@pytest.mark.parametrize("layout", ["sliced", "whole"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_training_goes_on_with_the_same_policy(written: Path, world_size: int, layout: str) -> None:
    for failures in run_ranks(go_on, world_size, written, layout):
        assert not failures


@pytest.mark.parametrize("world_size", [1, 2])
def test_policies_may_differ(written: Path, world_size: int) -> None:
    for failures in run_ranks(cross, world_size, written):
        assert not failures


def into_moving_parameters(root: Path) -> list[str]:
    """Loading gives a frozen parameter a master, and parameters a place in another buffer."""
    failures = []
    for views in (False, True):
        model = net(torch.bfloat16)
        module = None if views else model

        def fresh(model: nn.Module, module: Any, views: bool = views) -> ZeroRedundancyOptimizer:
            named = model.named_parameters()
            return ZeroRedundancyOptimizer(
                named, optim.AdamW, None, views, module=module, precision=MASTERS, lr=1e-3
            )

        opt = fresh(model, module)
        steps(model, opt, range(3))
        path = root / f"moving-{views}"
        ckpt.save(path, opt, model)
        for frozen in (False, True):
            other = net(torch.bfloat16)
            next(other.parameters()).requires_grad_(not frozen)
            again = fresh(other, None if views else other)
            for param in other.parameters():
                param.data = torch.zeros_like(param) if not frozen else param.data.zero_()
            ckpt.load(path, again, other)
            if wrong := differing(list(model.parameters()), list(other.parameters())):
                failures.append(f"views {views}, frozen {frozen}: parameters {wrong}")
            if wrong := differing(masters(model, opt), masters(other, again)):
                failures.append(f"views {views}, frozen {frozen}: masters {wrong}")
    return failures


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_reach_parameters_that_loading_has_moved(tmp_path: Path, world_size: int) -> None:
    assert run_ranks(into_moving_parameters, world_size, tmp_path) == [[]] * world_size


def into_another_memory_format(layout: str) -> list[Any]:
    """The format changes after the optimizer was made, and before it has taken notice."""

    def fresh() -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(5, 7, 3), nn.Conv2d(7, 20, 5)).bfloat16()
        named = model.named_parameters()
        return model, ZeroRedundancyOptimizer(
            named, optim.AdamW, module=model, layout=layout, lr=1e-3
        )

    expected, reference = fresh()
    steps(expected, reference, range(3))
    expected.to(memory_format=torch.channels_last)
    reference.consolidate_state_dict()
    saved = [reference.state_dict(), expected.state_dict()] if reference.rank == 0 else [None] * 2
    if reference.world_size > 1:
        dist.broadcast_object_list(saved)
    model, opt = fresh()
    model.to(memory_format=torch.channels_last)
    opt.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    for each, its in ((expected, reference), (model, opt)):
        its.zero_grad()
        steps(each, its, range(3, 6))
    parameters = differing(list(expected.parameters()), list(model.parameters()))
    return parameters + differing(masters(expected, reference), masters(model, opt))


@pytest.mark.parametrize("layout", ["sliced", "whole"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_loaded_masters_outlive_a_change_of_memory_format(world_size: int, layout: str) -> None:
    assert run_ranks(into_another_memory_format, world_size, layout) == [[]] * world_size


def test_masters_are_beside_the_state_in_plain_dicts(written: Path, tmp_path: Path) -> None:
    plain = ckpt.state_dict(written / "masters")
    assert set(plain["masters"]) == set(range(6))
    assert all(set(s) == {"step", "exp_avg", "exp_avg_sq"} for s in plain["state"].values())
    model, opt = make(torch.bfloat16, MASTERS)
    model.load_state_dict(ckpt.weights(written / "masters"))
    opt.load_state_dict(plain)
    assert not differing(list(plain["masters"].values()), masters(model, opt))
    names = [name for name, _ in model.named_parameters()]
    ckpt.import_state_dict(
        tmp_path / "again",
        optimizer=plain,
        model=model.state_dict(),
        names=names,
        optimizer_class="AdamW",
    )
    again, loaded = make(torch.bfloat16, MASTERS)
    ckpt.load(tmp_path / "again", loaded, again)
    assert not differing(masters(model, opt), masters(again, loaded))
    ckpt.reshard(written / "masters", tmp_path / "cut", ranks=3, layout="whole")
    ckpt.load(tmp_path / "cut", loaded, again)
    assert not differing(masters(model, opt), masters(again, loaded))


class Wrapping(nn.Module):
    """Its child is called as DDP calls what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(9, 9)


def test_masters_and_weights_of_a_child_called_module_find_each_other(tmp_path: Path) -> None:
    def build(dtype: torch.dtype) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        model = Wrapping().to(dtype)
        opt = ZeroRedundancyOptimizer(
            model.named_parameters(), optim.AdamW, precision=MixedPrecision(), lr=1e-3
        )
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        opt.step()
        return model, opt

    narrow, opt = build(torch.bfloat16)
    ckpt.save(tmp_path / "narrow", opt, narrow)
    wide, wide_opt = build(torch.float32)
    ckpt.load(tmp_path / "narrow", None, wide)
    for there, here in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(here, opt.full_master(there))
    wide, wide_opt = build(torch.float32)
    ckpt.save(tmp_path / "wide", wide_opt, wide)
    ckpt.load(tmp_path / "wide", opt, narrow)
    for there, here in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(there, opt.full_master(here))
