"""Several classes in one optimizer, with masters, checkpoints, buckets and added groups."""

from __future__ import annotations

import functools
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from by_hand import ByHand
from mixtures import MASTERS, mixed, mixture, net, steps
from models import consolidated
from on_ranks import on_ranks
from problems import Case, assert_same, copies, differing
from ranks import run_ranks
from test_inside_ddp import CountsInItself
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardstep import ZeroRedundancyOptimizer, hook_with_zero_step_interleaved
from shardstep import checkpoint as ckpt
from shardstep.local.multi_class import MultiClass

# --------------------------------------------------------- several classes, masters, checkpoints


def save_mixture(root: Path) -> Any:
    model, opt = mixture()
    steps(model, opt, range(3))
    ckpt.save(root / "native", opt, model)
    dcp.save({"model": model, "optim": ckpt.Sharded(opt)}, checkpoint_id=root / "dcp")
    return consolidated(opt), copies(model.parameters())


def go_on_with_mixture(root: Path, way: str, saved: Any) -> None:
    reference = net()
    unsharded = ByHand(mixed(reference, lr=0.02), Case(optim.AdamW, {"lr": 1e-3}), MASTERS)
    steps(reference, unsharded, range(6))
    model, opt = mixture()
    if way == "native":
        ckpt.load(root / "native", opt, model)
    elif way == "dcp":
        dcp.load({"model": model, "optim": ckpt.Sharded(opt)}, checkpoint_id=root / "dcp")
    else:
        opt.load_state_dict(saved[0])
        for param, value in zip(model.parameters(), saved[1], strict=True):
            param.data.copy_(value)
    steps(model, opt, range(3, 6))
    masters = [opt.full_master(param) for param in model.parameters()]
    expected = [*reference.parameters(), *map(unsharded.masters.get, reference.parameters())]
    assert_same(expected, [*model.parameters(), *masters])  # type: ignore[list-item]


def test_muon_and_adamw_on_masters_resume_at_another_number_of_ranks(tmp_path: Path) -> None:
    """Into optimizers that have not stepped yet, and so have no state to show the form of it."""
    saved, *_ = run_ranks(save_mixture, 2, tmp_path)
    for way in ("native", "dcp", "dict"):
        run_ranks(go_on_with_mixture, 3, tmp_path, way, saved)


class Registered(optim.SGD):
    """Counts its instances, and shuffles with Python's random numbers."""

    shardstep_layout = "sliced"  # it is not tried then
    made = 0

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        type(self).made += 1
        super().__init__(params, lr)

    def step(self, closure: Any = None) -> Any:
        random.random()
        return super().step(closure)


@on_ranks(2)
def test_loading_into_several_classes_without_state_warns_of_nothing_and_leaves_no_trace() -> list[
    Any
]:
    """SGD without momentum keeps no state: to see that, a step is rehearsed on the side."""
    model = net(torch.float32)
    opt = ZeroRedundancyOptimizer(
        mixed(model, Registered, lr=0.1), optim.SGD, lr=0.1, layout="sliced", bucket_bytes=1
    )
    steps(model, opt, range(2))
    saved = consolidated(opt)
    seen: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda *args: seen.append("a hook"))
    before = copies(model.parameters()), Registered.made, random.getstate(), torch.get_rng_state()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        opt.load_state_dict(saved)
    hook.remove()
    seen += [str(warning.message) for warning in told]
    seen += differing(before[0], list(model.parameters()))
    same = (Registered.made, random.getstate()) == before[1:3]
    if not (same and torch.equal(before[3], torch.get_rng_state())):
        seen.append("counters or random numbers")
    return seen


class Extra(optim.SGD):
    """Has a number of its own in its state dict."""

    shardstep_layout = "sliced"

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "turn": 3}


def test_a_class_with_more_in_its_state_dict_is_refused_in_a_mixture() -> None:
    """At one rank, too, and declared, where nothing is tried: it would be lost in a checkpoint."""
    with pytest.raises(ValueError, match=r"Extra keeps 'turn' .* use it alone"):
        ZeroRedundancyOptimizer(mixed(net(), Extra, lr=0.1), optim.AdamW)


class Picky(optim.SGD):
    """Loads nothing."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("nothing is good enough")


def test_a_mixture_that_cannot_load_stays_as_it_was() -> None:
    results = []
    for fails in (False, True):
        model = net(torch.float32)
        muon, rest = mixed(model, lr=0.02)
        first, *others = rest["params"]
        picky = {"params": others, "optimizer_class": Picky, "lr": 0.1}
        groups = [muon, {"params": [first]}, picky]
        opt = MultiClass(groups, optim.AdamW, lr=1e-3)
        saved = opt.state_dict()
        steps(model, opt, range(3))
        if fails:
            with pytest.raises(KeyError, match="good enough"):
                opt.load_state_dict(saved)
        steps(model, opt, range(3, 6))
        results.append(copies(model.parameters()))
    assert differing(*results) == []


# ------------------------------------------------------------- several classes, bucket by bucket


def step_by_bucket(optimizer_class: Any) -> bool:
    model = net(torch.float32)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    opt = ZeroRedundancyOptimizer(
        mixed(model, optimizer_class, lr=0.1), optim.AdamW, overlap_with_ddp=True, bucket_bytes=1
    )
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, opt))
    for _ in range(2):
        ddp(torch.ones(2, 30)).sum().backward()
    opt.shards.wait_for_params()
    return opt.shards.local.stepped


@on_ranks(2)
def test_steps_that_were_taken_bucket_by_bucket_were_taken() -> None:
    """A checkpoint says whether there were any. A class that counts its steps takes none."""
    assert step_by_bucket(optim.Muon)
    with pytest.raises(RuntimeError, match="counts its steps"):
        step_by_bucket(CountsInItself)


# ------------------------------------------------------- classes, groups and masters that change


@on_ranks(2, raises=ValueError, match=r"group 0 .*Muon.*adamw\.AdamW")
def test_a_dict_of_several_classes_is_refused_by_an_optimizer_of_one() -> None:
    model, opt = mixture(torch.float32)
    steps(model, opt, range(2))
    saved = consolidated(opt)
    other = ZeroRedundancyOptimizer([{"params": g["params"]} for g in mixed(net())], optim.AdamW)
    other.load_state_dict(saved)


def test_a_class_is_known_by_its_name_within_a_partial_too() -> None:
    def make(optimizer_class: Any) -> MultiClass:
        groups = mixed(net(), functools.partial(optimizer_class, lr=0.1))
        return MultiClass(groups, optim.AdamW)

    with pytest.raises(ValueError, match=r"group 0 .*Muon.*SGD"):
        make(optim.SGD).load_state_dict(make(optim.Muon).state_dict())


@on_ranks(2)
def test_a_group_that_is_added_has_the_defaults_of_its_own_class() -> None:
    """And not the learning rate, say, of the class that the other groups have.

    Two optimizers apart; a mixture, and a divided one, that get the second class later.
    """
    reference = net(torch.float32)
    (matrices, *_), rest = (group["params"] for group in mixed(reference))
    apart = [optim.Adafactor([matrices]), optim.AdamW(rest, lr=1e-3)]
    for part in apart:
        steps(reference, part, range(3))
    for sharded in (False, True):
        model = net(torch.float32)
        (weight, *_), rest = (group["params"] for group in mixed(model))
        groups = [{"params": rest, "optimizer_class": optim.AdamW, "lr": 1e-3}]
        cls: Any = ZeroRedundancyOptimizer if sharded else MultiClass
        opt = cls([{"params": []}, *groups], optim.SGD, lr=0.7)
        opt.add_param_group({"params": [weight], "optimizer_class": optim.Adafactor})
        assert opt.param_groups[-1]["lr"] == apart[0].param_groups[0]["lr"]
        steps(model, opt, range(3))
        assert_same(list(reference.parameters()), list(model.parameters()))


@on_ranks(2)
def test_a_group_whose_class_refuses_its_options_changes_nothing() -> list[Any]:
    results = []
    for refused in (False, True):
        model, opt = mixture()
        steps(model, opt, range(2))
        more = nn.Parameter(torch.ones(9, 9))
        plan = opt.plan
        if refused:
            for cls in (optim.Adam, optim.AdamW, optim.Muon):
                with pytest.raises((ValueError, RuntimeError), match="rate"):
                    opt.add_param_group({"params": [more], "optimizer_class": cls, "lr": -1.0})
                assert opt.plan is plan
        opt.add_param_group({"params": [more], "optimizer_class": optim.Adam, "lr": 0.1})
        more.grad = torch.ones(9, 9)
        steps(model, opt, range(2, 4))
        results.append([more.detach(), *copies(model.parameters())])
    return differing(*results)
