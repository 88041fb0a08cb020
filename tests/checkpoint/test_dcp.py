"""`torch.distributed.checkpoint` saves an optimizer in shards, and loads it at any world size and
layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
from problems import (
    Case,
    OneByOne,
    copies,
    difference,
    differing,
    make_groups,
    set_gradients,
    train,
)
from ranks import run_ranks
from test_checkpoint import Net
from torch import nn, optim
from torch.optim import Optimizer

from shardstep import ZeroRedundancyOptimizer
from shardstep.checkpoint import Sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

ADAMW = Case(optim.AdamW)
MOMENTUM = Case(optim.SGD, {"momentum": 0.9, "dampening": 0.3})
ADAFACTOR = Case(optim.Adafactor)


def named(case: Case, module: nn.Module) -> list[dict[str, Any]]:
    """Three groups of named parameters."""
    pairs = list(module.named_parameters())
    groups = make_groups([param for _, param in pairs], case.optimizer_class)
    name_of = {param: name for name, param in pairs}
    return [{**g, "params": [(name_of[p], p) for p in g["params"]]} for g in groups]


def zero(case: Case, **options: Any) -> tuple[Net, ZeroRedundancyOptimizer]:
    net, cls = Net(), case.optimizer_class
    return net, ZeroRedundancyOptimizer(named(case, net), cls, **options, **case.fresh_options())


def plain(case: Case, module: nn.Module | None = None) -> tuple[nn.Module, Optimizer]:
    net = Net() if module is None else module
    return net, case.optimizer_class(named(case, net), **case.fresh_options())


def unnamed() -> tuple[nn.Module, Optimizer]:
    net = Net()
    return net, optim.AdamW(make_groups(list(net.parameters()), optim.AdamW))


def advance(opt: Any, net: nn.Module, steps: range, missing: bool = True) -> list[torch.Tensor]:
    """Take steps with gradients that depend on the step alone."""
    return train(opt, list(net.parameters()), steps, missing=missing)


def unbroken(case: Case, steps: int = 6, missing: bool = True) -> list[torch.Tensor]:
    """The parameters of the unsharded optimizer that was never saved or loaded."""
    net, opt = plain(case)
    return advance(opt, net, range(steps), missing)


def save(folder: Path, net: nn.Module, opt: ZeroRedundancyOptimizer, **options: Any) -> None:
    dcp.save({"model": net, "optim": Sharded(opt, **options)}, checkpoint_id=folder)


def load(folder: Path, net: nn.Module, opt: ZeroRedundancyOptimizer) -> None:
    dcp.load({"model": net, "optim": Sharded(opt)}, checkpoint_id=folder)


def load_and_advance(folder: Path, net: nn.Module, opt: Any, missing: bool = True) -> Any:
    # Zeros, so that a load which does nothing is noticed.
    torch._foreach_zero_([param.detach() for param in net.parameters()])
    load(folder, net, opt)
    return advance(opt, net, range(3, 6), missing)


def load_adamw(folder: Path, missing: bool, **options: Any) -> list[torch.Tensor]:
    return load_and_advance(folder, *zero(ADAMW, **options), missing)


def consolidated(opt: ZeroRedundancyOptimizer) -> Any:
    """The whole state on rank 0, with options in one order: torch's loading changes it."""
    opt.consolidate_state_dict(to=0)
    if opt.rank > 0:
        return None
    state = opt.state_dict()
    return {**state, "param_groups": [dict(sorted(g.items())) for g in state["param_groups"]]}


def save_one(
    folder: Path, case: Case, steps: int, missing: bool = False, param_names: bool = False
) -> Any:
    net, opt = zero(case)
    advance(opt, net, range(steps), missing)
    save(folder, net, opt, param_names=param_names)
    return consolidated(opt)


def load_one(folder: Path, case: Case) -> Any:
    net, opt = zero(case)
    load(folder, net, opt)
    return consolidated(opt)


# --------------------------------------------------------------------------- what is in a state


def test_without_a_process_group_too(tmp_path: Path) -> None:
    save_one(tmp_path, ADAMW, 3, missing=True)
    for got in [load_adamw(tmp_path, True), *run_ranks(load_adamw, 2, tmp_path, True)]:
        assert differing(unbroken(ADAMW), got) == []


def _save_in_part(folder: Path, case: Case) -> Any:
    net, opt = zero(case)
    set_gradients(list(net.parameters()), 1, missing=False)
    net.unused.grad = net.scale.grad = None  # these never take part
    opt.step()
    save(folder, net, opt)
    return consolidated(opt)


LR_TENSOR = Case(optim.Adam, {"lr": torch.tensor(0.003), "betas": (0.8, 0.95), "amsgrad": True})


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        *((case, 3) for case in (LR_TENSOR, Case(optim.Adagrad), Case(optim.SGD))),
        *((case, 0) for case in (ADAMW, MOMENTUM, ADAFACTOR)),
        (ADAMW, None),  # one step, without some parameters
    ],
    ids=str,
)
def test_state_and_options_of_any_form_come_back(
    tmp_path: Path, case: Case, steps: int | None
) -> None:
    if steps is None:
        before, _ = run_ranks(_save_in_part, 2, tmp_path, case)
    else:
        before, _ = run_ranks(save_one, 2, tmp_path, case, steps)
    after, *_ = run_ranks(load_one, 3, tmp_path, case)
    assert difference(before, after) is None
    assert bool(after["state"]) == (steps != 0 and case.optimizer_class is not optim.SGD)


class Remembering(OneByOne):
    """Keeps the last three gradients in a list that grows step by step."""

    def update(self, p: Any, state: Any, lr: float) -> None:
        state["past"] = [*state.get("past", []), p.grad.clone()][-3:]
        p.sub_(lr * sum(state["past"]))


REMEMBERING = Case(Remembering)


def _load_longer_lists(folder: Path) -> Any:
    net, opt = zero(REMEMBERING)
    with pytest.raises(ValueError, match=r"saved with 3 entries in 'past', and 1 were read"):
        load(folder, net, opt)
    advance(opt, net, range(7, 10), False)
    load(folder, net, opt)
    return consolidated(opt)


def test_a_list_that_is_longer_there_is_not_cut_short(tmp_path: Path) -> None:
    before, _ = run_ranks(save_one, 2, tmp_path, REMEMBERING, 3)
    after, *_ = run_ranks(_load_longer_lists, 3, tmp_path)
    assert difference(before, after) is None


class Dicing(OneByOne):
    """Draws random numbers."""

    shardstep_layout = "sliced"

    def update(self, p: Any, state: Any, lr: float) -> None:
        p.add_(torch.rand_like(p))
        state["noise"] = torch.rand_like(p)


@on_ranks(2)
def test_finding_out_the_form_of_the_state_touches_nothing() -> None:
    net, opt = zero(Case(Dicing))
    torch.manual_seed(3)
    before, random = copies(net.parameters()), torch.get_rng_state()
    Sharded(opt).state_dict()
    assert differing(before, copies(net.parameters())) == []
    assert torch.equal(random, torch.get_rng_state())
    assert not opt.optim.state
    assert all(param.grad is None for param in net.parameters())


class Reluctant(OneByOne):
    """Does not step without a closure."""

    shardstep_layout = "whole"

    def update(self, p: Any, state: Any, lr: float) -> None:
        raise ValueError("give me a closure")


@on_ranks(2, raises=RuntimeError, match="give me a closure.*one step first")
def test_a_class_whose_state_cannot_be_found_out_is_refused() -> None:
    Sharded(zero(Case(Reluctant))[1]).state_dict()


class CountsOnTheCPU(OneByOne):
    """Makes its counter without saying where, as torchao's classes do."""

    def update(self, p: Any, state: Any, lr: float) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["average"] = torch.zeros_like(p)
        state["step"] += 1


def test_a_counter_that_is_not_there_yet_is_expected_where_a_step_makes_it() -> None:
    """On the CPU, whatever device the parameters are on; here on one without data."""

    def elsewhere(piece: torch.Tensor) -> torch.Tensor:
        copy = nn.Parameter(torch.empty_like(piece, device="meta"))
        copy.grad = torch.zeros_like(copy)
        return copy

    opt = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(4, 4))], CountsOnTheCPU)
    with mock.patch("shardstep.local.local_optimizer._copy", elsewhere):
        states, _ = opt.shards.local.rehearse([0])
    devices = {key: value.device.type for key, value in states[0].items()}
    assert devices == {"step": "cpu", "average": "meta"}
