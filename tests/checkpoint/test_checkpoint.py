"""A checkpoint written at any world size and layout goes on at any other, to the bit."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import PROBLEMS, Problem, Setup, with_zero
from on_ranks import on_ranks
from problems import assert_same, difference, differing
from ranks import run_ranks
from torch import Tensor, nn, optim

from shardstep import MixedPrecision, ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt
from shardstep.checkpoint.load import on_device_of

WORLD_SIZES = (1, 2, 3, 4)
CASES: dict[str, tuple[type[optim.Optimizer], dict[str, Any], tuple[str, ...]]] = {
    "AdamW": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, ("sliced", "whole")),
    "SGD": (optim.SGD, {"lr": 0.05, "momentum": 0.9}, ("sliced", "whole")),
    "Adafactor": (optim.Adafactor, {"lr": 0.01}, ("whole",)),
}
BEFORE, AFTER = range(3), range(3, 6)
NO_MASTERS = MixedPrecision(master_dtype=None)


class Net(nn.Module):
    """Parameters of awkward shapes, memory formats and kinds; gradients are made by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(37, 24)
        self.conv = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(24)
        self.frozen = nn.Parameter(torch.randn(70), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(130))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.table.weight

    def groups(self) -> list[dict[str, Any]]:
        decayed = [(n, p) for n, p in self.named_parameters() if p.dim() > 1]
        rest = [(n, p) for n, p in self.named_parameters() if p.dim() <= 1]
        return [{"params": decayed}, {"params": rest, "lr": 0.002, "weight_decay": 0.0}]


def take_steps(net: Net, opt: optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, param in net.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if param.requires_grad and name != "unused":
                param.grad = torch.empty_like(param).copy_(noise)
        opt.step()
        opt.zero_grad()
        for group in opt.param_groups:
            group["lr"] *= 0.9
        net.norm.running_mean.add_(step)


def plain(case: str, steps: range) -> tuple[Net, optim.Optimizer]:
    cls, options, _ = CASES[case]
    net = Net()
    opt = cls(net.groups(), **options)
    take_steps(net, opt, steps)
    return net, opt


def sharded(
    case: str, layout: str, names: bool = True, **options: Any
) -> tuple[Net, ZeroRedundancyOptimizer]:
    cls, defaults, _ = CASES[case]
    net = Net()
    groups = net.groups()
    for group in groups if not names else ():
        group["params"] = [param for _, param in group["params"]]
    options = {"layout": layout, "bucket_bytes": 1, **defaults, **options}
    return net, ZeroRedundancyOptimizer(groups, cls, **options)


# Without names, parameters are known by their positions.
SAVED = [(case, layout, True) for case, (*_, layouts) in CASES.items() for layout in layouts]
SAVED.append(("AdamW", "sliced", False))


def write_all(root: Path) -> None:
    for case, layout, names in SAVED:
        net, opt = sharded(case, layout, names)
        take_steps(net, opt, BEFORE)
        where = root / f"{case}-{opt.world_size}-{layout}-{names}"
        ckpt.save(where, opt, net, {"step": 3, "seen": torch.arange(100)})
        dcp.save({"model": net, "optim": ckpt.Sharded(opt)}, checkpoint_id=f"{where}-dcp")


@on_ranks(1, pytest.param(2, marks=pytest.mark.slow), 3, 4)
def test_goes_on_at_any_world_size_and_layout(written: Path) -> None:
    """From a checkpoint of ours in each layout, from one of DCP in one of them in turn."""
    references = {case: plain(case, range(BEFORE.start, AFTER.stop)) for case in CASES}
    for number, (case, saved_in, names) in enumerate(SAVED):
        (expected, reference), layouts = references[case], CASES[case][2]
        for source in WORLD_SIZES:
            of_dcp = layouts[(source + number) % len(layouts)]
            for layout, way in [*((layout, "") for layout in layouts), (of_dcp, "-dcp")]:
                net, opt = sharded(
                    case, layout, names, parameters_as_bucket_view=saved_in == "whole"
                )
                for tensor in net.state_dict().values():
                    tensor.zero_()
                where = f"{written}/{case}-{source}-{saved_in}-{names}{way}"
                if way:
                    dcp.load({"model": net, "optim": ckpt.Sharded(opt)}, checkpoint_id=where)
                else:
                    loaded = ckpt.load(where, opt, net)
                    assert loaded.extra["step"] == 3
                    assert torch.equal(loaded.extra["seen"], torch.arange(100))
                take_steps(net, opt, AFTER)
                opt.consolidate_state_dict(to=0)
                found = opt.state_dict() if opt.rank == 0 else reference.state_dict()
                what = f"{where} -> {opt.world_size}:{layout}"
                assert_same([*expected.state_dict().values()], [*net.state_dict().values()], what)
                assert_same(flattened(reference.state_dict()), flattened(found), what)


def flattened(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    tensors = [
        torch.as_tensor(value)
        for _, state in sorted(state_dict["state"].items())
        for _, value in sorted(state.items())
    ]
    return tensors + [torch.tensor(group["lr"]) for group in state_dict["param_groups"]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for world_size in WORLD_SIZES:
        run_ranks(write_all, world_size, root)
    return root


@pytest.mark.parametrize("case", CASES)
def test_goes_on_in_the_plain_optimizer(written: Path, case: str) -> None:
    expected, _ = plain(case, range(BEFORE.start, AFTER.stop))
    for world_size, layout in itertools.product(WORLD_SIZES, CASES[case][2]):
        where = written / f"{case}-{world_size}-{layout}-True"
        net, opt = plain(case, range(0))
        net.load_state_dict(ckpt.weights(where))
        opt.load_state_dict(ckpt.state_dict(where))
        take_steps(net, opt, AFTER)
        assert not differing([*expected.state_dict().values()], [*net.state_dict().values()]), where


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cls", [optim.NAdam, optim.ASGD])
def test_scalars_go_on_in_their_own_dtype(tmp_path: Path, cls: Any, dtype: torch.dtype) -> None:
    """They have torch's scalar dtype whatever the parameter's, and torch's own load casts them."""

    def started() -> tuple[nn.ParameterDict, ZeroRedundancyOptimizer]:
        net = nn.ParameterDict({"weight": nn.Parameter(torch.linspace(-1, 1, 90).to(dtype))})
        named = net.named_parameters()
        return net, ZeroRedundancyOptimizer(named, cls, precision=NO_MASTERS, lr=0.013)

    def train(net: nn.ParameterDict, opt: optim.Optimizer, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            net["weight"].grad = torch.randn(90, generator=generator).to(dtype)
            opt.step()

    straight, loaded, copied = started(), started(), started()
    train(*straight, BEFORE)
    ckpt.save(tmp_path / "one", straight[1], straight[0])
    ckpt.load(tmp_path / "one", loaded[1], loaded[0])
    for each, its in zip(copied, straight, strict=True):
        each.load_state_dict(its.state_dict())
    for _, opt in (loaded, copied):
        assert difference(straight[1].state_dict(), opt.state_dict()) is None
    train(*straight, AFTER)
    for net, opt in (loaded, copied):
        train(net, opt, AFTER)
        torch.testing.assert_close(net["weight"], straight[0]["weight"], rtol=0, atol=0)


# ------------------------------------------------------------------------------------ ZeRO-2


def steps(setup: Setup, problem: Problem, numbers: range) -> None:
    for step in numbers:
        setup.backward(step, problem)
        setup.finish()


def everything(setup: Setup) -> list[Tensor]:
    """Parameters, buffers and state, in full."""
    setup.opt.consolidate_state_dict(to=0)
    states = setup.opt.state_dict()["state"] if setup.opt.rank == 0 else {}
    tensors = [*setup.module.state_dict().values()]
    for _, state in sorted(states.items()):
        tensors += [torch.as_tensor(value) for _, value in sorted(state.items())]
    return [tensor.detach().clone() for tensor in tensors]


def test_an_option_that_is_a_tensor_goes_to_the_device_of_the_present_one() -> None:
    there, loaded = torch.tensor(0.1, device="meta"), torch.tensor(0.2)
    assert on_device_of(there, loaded).is_meta
    assert on_device_of(0.1, loaded) is loaded


@pytest.mark.slow
@on_ranks(2, 3, timeout=100)
def test_zero_2_goes_on(tmp_path: Path) -> None:
    """Saved while gathers are in flight, loaded between steps: training goes on to the bit."""
    # Of the last, parameters in 16 bits have masters, which are saved and loaded with the rest.
    for name in ("gpt", "conv", "branching", "mixed dtypes"):
        problem = PROBLEMS[name]
        straight = with_zero(problem.fresh())
        steps(straight, problem, range(3))
        # Right after the step, with parameters still on their way.
        ckpt.save(tmp_path / f"{name}-sync", straight.opt, straight.module)
        there = everything(straight)
        steps(straight, problem, range(3, 6))
        end = everything(straight)

        background = with_zero(problem.fresh())
        steps(background, problem, range(3))
        saving = ckpt.async_save(tmp_path / f"{name}-async", background.opt, background.module)
        steps(background, problem, range(3, 6))
        saving.wait()
        assert not differing(end, everything(background)), name

        for kind in ("sync", "async"):
            # Into one that has other values, and whose last gathers are in flight.
            resumed = with_zero(problem.fresh())
            steps(resumed, problem, range(7, 9))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if name == "branching" else "error")
                ckpt.load(tmp_path / f"{name}-{kind}", resumed.opt, resumed.module)
            assert not differing(there, everything(resumed)), (name, kind)
            steps(resumed, problem, range(3, 6))
            assert not differing(end, everything(resumed)), (name, kind)
        # The model alone, without being told of the optimizer.
        alone = with_zero(problem.fresh())
        steps(alone, problem, range(3))
        ckpt.save(tmp_path / f"{name}-model", model=alone.module)
        weights = ckpt.weights(tmp_path / f"{name}-model")
        assert weights.keys() <= straight.module.state_dict().keys()
        assert not differing(there[: len(weights)], list(weights.values())), name
