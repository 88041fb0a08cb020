"""Checkpoints across precision policies: masters are kept where they can be, made where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mixtures import MASTERS, net, steps
from models import consolidated
from on_ranks import on_ranks
from problems import OneByOne, differing
from ranks import run_ranks
from torch import nn, optim

from shardstep import MixedPrecision, ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt

STOCHASTIC = MixedPrecision(master_dtype=None, stochastic_rounding=True, seed=3)
LOW, WIDE = torch.bfloat16, torch.float32


class Frugal(OneByOne):
    """Keeps its momentum in 16 bits, whatever it steps on."""

    def update(self, p: Any, state: Any, lr: float) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(p, dtype=LOW)
        state["momentum"].mul_(0.9).add_(p.grad)
        p.sub_(lr * state["momentum"].to(p.dtype))


CASES: dict[str, tuple[Any, MixedPrecision]] = {
    "masters": (optim.AdamW, MASTERS),
    "stochastic": (optim.AdamW, STOCHASTIC),
    "frugal-masters": (Frugal, MASTERS),
    "frugal-stochastic": (Frugal, STOCHASTIC),
}
Pair = tuple[nn.Module, ZeroRedundancyOptimizer]


def sharded(model: nn.Module, cls: Any = optim.AdamW, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.named_parameters(), cls, lr=1e-3, **options)


def make(dtype: torch.dtype, precision: MixedPrecision | None, **options: Any) -> Pair:
    model = net(dtype)
    return model, sharded(model, precision=precision, bucket_bytes=1, **options)


def masters(model: nn.Module, opt: ZeroRedundancyOptimizer) -> list[Any]:
    return [opt.full_master(name) for name, _ in model.named_parameters()]


def write(root: Path) -> None:
    for name, (cls, precision) in CASES.items():
        model, opt = make(LOW, precision, cls=cls)
        steps(model, opt, range(4))
        ckpt.save(root / name, opt, model)
        dcp.save({"model": model, "optim": ckpt.Sharded(opt)}, checkpoint_id=root / f"dcp-{name}")
        opt.consolidate_state_dict()
        if opt.rank == 0:
            torch.save([model.state_dict(), opt.state_dict()], root / f"{name}.pt")
    model, opt = make(WIDE, None)
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


@pytest.mark.parametrize("layout", ["sliced", "whole"])
@on_ranks(1, 3)
def test_training_goes_on_with_the_same_policy(written: Path, layout: str) -> None:
    """The same policy: as if never interrupted."""
    for name, (cls, precision) in CASES.items():
        expected, reference = make(LOW, precision, layout=layout, cls=cls)
        steps(expected, reference, range(8))
        for kind in ("native", "dcp", "plain"):
            model, opt = make(LOW, precision, layout=layout, cls=cls)
            for param in model.parameters():
                param.detach().zero_()
            read(written, name, kind, model, opt)
            steps(model, opt, range(4, 8))
            assert not differing([*expected.parameters()], [*model.parameters()]), (name, kind)
            if precision.master_dtype is not None:
                found = masters(model, opt)
                assert not differing(masters(expected, reference), found), (name, kind)


@on_ranks(1, 2)
def test_policies_may_differ(written: Path) -> None:
    # From masters to a model that can hold them, with an optimizer and without.
    source, holder = make(LOW, MASTERS)
    ckpt.load(written / "masters", holder, source)
    for with_optimizer in (True, False):
        wide, opt = make(WIDE, None)
        ckpt.load(written / "masters", opt if with_optimizer else None, wide)
        assert not differing(masters(source, holder), [*wide.parameters()]), with_optimizer
    # From an fp32 model to masters.
    expected = net(WIDE)
    ckpt.load(written / "fp32", model=expected)
    narrow, opt = make(LOW, MASTERS)
    ckpt.load(written / "fp32", opt, narrow)
    assert not differing([*expected.parameters()], masters(narrow, opt))
    steps(narrow, opt, range(4, 5))
    # To 16 bits without masters: the parameters as the model saw them.
    bare, opt = make(LOW, MixedPrecision(master_dtype=None))
    ckpt.load(written / "masters", opt, bare)
    assert not differing([*source.parameters()], [*bare.parameters()])
    for state in opt.optim.state.values():
        assert {value.dtype for key, value in state.items() if key != "step"} == {LOW}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("precision")
    run_ranks(write, 2, root)
    return root


@on_ranks(1, 2)
def test_weights_reach_parameters_that_loading_has_moved(tmp_path: Path) -> None:
    """Loading gives a frozen parameter a master, and parameters a place in another buffer."""
    for views in (False, True):

        def fresh(model: nn.Module, views: bool = views) -> ZeroRedundancyOptimizer:
            way: Any = {"parameters_as_bucket_view": True} if views else {"module": model}
            return sharded(model, precision=MASTERS, **way)

        model = net(LOW)
        opt = fresh(model)
        steps(model, opt, range(3))
        ckpt.save(tmp_path / f"moving-{views}", opt, model)
        for frozen in (False, True):
            other = net(LOW)
            next(other.parameters()).requires_grad_(not frozen)
            again = fresh(other)
            for param in other.parameters():
                param.data = torch.zeros_like(param) if not frozen else param.data.zero_()
            ckpt.load(tmp_path / f"moving-{views}", again, other)
            assert not differing([*model.parameters()], [*other.parameters()]), (views, frozen)
            assert not differing(masters(model, opt), masters(other, again)), (views, frozen)


@on_ranks(2)
def test_masters_that_were_loaded_before_the_first_step_are_not_left_out(tmp_path: Path) -> None:
    """A full state dict without them would resume from the rounded weights."""
    ckpt.save(tmp_path / "wide", *reversed(make(WIDE, None)))
    model, opt = make(LOW, MASTERS)
    assert opt.state_dict()["state"] == {}
    ckpt.load(tmp_path / "wide", opt, model)
    dcp.save({"optim": ckpt.Sharded(opt)}, checkpoint_id=tmp_path / "dcp")
    other, again = make(LOW, MASTERS)
    other.load_state_dict(model.state_dict())
    dcp.load({"optim": ckpt.Sharded(again)}, checkpoint_id=tmp_path / "dcp")
    for each in (opt, again):
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            each.state_dict()
        each.consolidate_state_dict("all")
        found = each.state_dict()["masters"]
        assert differing(list(found.values()), masters(model, opt)) == []
    plain, unsharded = make(LOW, MixedPrecision(master_dtype=None))
    ckpt.load(tmp_path / "wide", unsharded, plain)
    assert "masters" not in unsharded.state_dict()


@pytest.mark.parametrize("layout", ["sliced", "whole"])
@on_ranks(1, 2)
def test_loaded_masters_outlive_a_change_of_memory_format(layout: str) -> None:
    """The format changes after the optimizer was made, and before it has taken notice."""

    def fresh() -> Pair:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(5, 7, 3), nn.Conv2d(7, 20, 5)).bfloat16()
        return model, sharded(model, module=model, layout=layout)

    expected, reference = fresh()
    steps(expected, reference, range(3))
    expected.to(memory_format=torch.channels_last)
    model, opt = fresh()
    model.to(memory_format=torch.channels_last)
    opt.load_state_dict(consolidated(reference))
    model.load_state_dict(expected.state_dict())
    for each, its in ((expected, reference), (model, opt)):
        its.zero_grad()
        steps(each, its, range(3, 6))
    assert not differing([*expected.parameters()], [*model.parameters()])
    assert not differing(masters(expected, reference), masters(model, opt))


def test_masters_are_separate_from_the_state_in_plain_dicts(written: Path, tmp_path: Path) -> None:
    plain = ckpt.state_dict(written / "masters")
    assert set(plain["masters"]) == set(range(6))
    assert all(set(s) == {"step", "exp_avg", "exp_avg_sq"} for s in plain["state"].values())
    model, opt = make(LOW, MASTERS)
    model.load_state_dict(ckpt.weights(written / "masters"))
    opt.load_state_dict(plain)
    assert not differing([*plain["masters"].values()], masters(model, opt))
    names = [name for name, _ in model.named_parameters()]
    ckpt.import_state_dict(
        tmp_path / "again", plain, model.state_dict(), names=names, optimizer_class="AdamW"
    )
    ckpt.reshard(written / "masters", tmp_path / "cut", ranks=3, layout="whole")
    for path in (tmp_path / "again", tmp_path / "cut"):
        again, loaded = make(LOW, MASTERS)
        ckpt.load(path, loaded, again)
        assert not differing(masters(model, opt), masters(again, loaded))


def test_masters_and_weights_of_a_child_called_module_find_each_other(tmp_path: Path) -> None:
    """The child is called as DDP calls what it wraps."""

    def build(dtype: torch.dtype) -> Pair:
        model = nn.ModuleDict({"module": nn.Linear(9, 9)}).to(dtype)
        opt = sharded(model, precision=MASTERS)
        steps(model, opt, range(1))
        return model, opt

    narrow, opt = build(LOW)
    ckpt.save(tmp_path / "narrow", opt, narrow)
    wide, wide_opt = build(WIDE)
    ckpt.save(tmp_path / "wide", wide_opt, wide)
    ckpt.load(tmp_path / "narrow", None, wide)
    assert not differing(masters(narrow, opt), [*wide.parameters()])
    ckpt.load(tmp_path / "wide", model=wide)
    ckpt.load(tmp_path / "wide", opt, narrow)
    assert not differing([*wide.parameters()], masters(narrow, opt))
