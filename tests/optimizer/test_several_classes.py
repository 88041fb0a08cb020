"""Several classes in one optimizer, Muon for matrices and AdamW for the rest: as if apart."""

from __future__ import annotations

import copy
import functools
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from by_hand import ByHand
from mixtures import ADAMW, MASTERS, MUON, mixed, mixture, net, steps
from models import consolidated, make_gpt
from on_ranks import on_ranks
from problems import Case, assert_same, copies, difference, differing, make_params, set_gradients
from ranks import run_ranks
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardstep import ZeroRedundancyOptimizer, hook_with_zero_step_interleaved
from shardstep import checkpoint as ckpt
from shardstep.local.multi_class import MultiClass, full_name, optimizer_name, split_state_dict

STEPS = range(6)


class Apart:
    """Muon and AdamW as people use them: two optimizers, stepped one after the other."""

    def __init__(self, module: nn.Module) -> None:
        hidden, rest = (group["params"] for group in mixed(module))
        self.muon, self.adamw = optim.Muon(hidden, **MUON), optim.AdamW(rest, **ADAMW)
        self.param_groups = self.muon.param_groups + self.adamw.param_groups

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def state_dicts(self) -> dict[str, Any]:
        return {full_name(type(opt)): opt.state_dict() for opt in (self.muon, self.adamw)}


def gpt() -> nn.Module:
    torch.manual_seed(7)
    return make_gpt()


def train(opt: Any, module: nn.Module, steps: range = STEPS) -> list[torch.Tensor]:
    params = list(module.parameters())
    for step in steps:
        set_gradients(params, step, missing=step % 2 == 1)
        opt.step()
        opt.zero_grad()
    return copies(params)


# --------------------------------------------------------------------------------- in one process


def test_a_mixture_is_its_parts() -> None:
    one, other = gpt(), gpt()
    mixture, apart = MultiClass(mixed(one, **MUON), optim.AdamW, **ADAMW), Apart(other)
    schedulers = [lr_scheduler.StepLR(opt, 1, 0.5) for opt in (mixture, apart.muon, apart.adamw)]
    for step in STEPS:
        now = range(step, step + 1)
        assert differing(train(apart, other, now), train(mixture, one, now)) == []
        for scheduler in schedulers:
            scheduler.step()
    assert [type(part) for part in mixture.parts] == [optim.Muon, optim.AdamW]
    assert optimizer_name(mixture) == "Muon and AdamW"
    assert difference(apart.state_dicts(), split_state_dict(mixture.state_dict())) is None
    again = MultiClass(mixed(copy.deepcopy(one), **MUON), optim.AdamW, lr=9.0)
    again.load_state_dict(mixture.state_dict())
    assert difference(mixture.state_dict(), again.state_dict()) is None
    assert all(part.state is again.state for part in again.parts)
    assert again.param_groups[0] is again.parts[0].param_groups[0]


def _winged(params: Any, **options: Any) -> optim.Optimizer:
    return optim.SGD(params, wings=options)  # type: ignore[call-arg]


def test_groups_of_the_default_class_share_one_optimizer() -> None:
    params = make_params([(3, 3)] * 4, frozen=())
    mixture = MultiClass(
        [
            {"params": [params[0]], "lr": 0.5},
            {"params": [params[1]], "optimizer_class": optim.Muon, "label": "hidden"},
            {"params": [params[2]]},
        ],
        optim.SGD,
        lr=0.1,
    )
    mixture.add_param_group({"params": [params[3]], "optimizer_class": optim.Adam, "lr": 0.2})
    assert [len(part.param_groups) for part in mixture.parts] == [2, 1, 1]
    assert [group["lr"] for group in mixture.param_groups] == [0.5, 1e-3, 0.1, 0.2]
    assert mixture.param_groups[1]["label"] == "hidden"
    group = {"params": [params[0]], "optimizer_class": _winged, "lr": 1}
    with pytest.raises(TypeError, match="wings"):
        MultiClass([group], optim.SGD)
    with pytest.raises(ValueError, match="must be an optimizer class, not 'Muon'"):
        MultiClass([{"params": [params[0]], "optimizer_class": "Muon"}], optim.SGD)


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


class Counts(optim.SGD):
    """Counts its steps in an attribute."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


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
        step_by_bucket(Counts)


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


@on_ranks(2, 3)
def test_freezing_and_adding_groups_keep_the_numbers() -> list[int]:
    """Freezing, unfreezing and adding groups move the state of both classes."""
    results = []
    for make in (MultiClass, functools.partial(ZeroRedundancyOptimizer, bucket_bytes=1 << 14)):
        module = gpt()
        (first, second, *hidden), rest = (group["params"] for group in mixed(module))
        groups = [{"params": hidden, "optimizer_class": optim.Muon, **MUON}, {"params": []}]
        opt: Any = make([*groups, {"params": rest}], optim.AdamW, **ADAMW)
        params = list(module.parameters())
        for step in range(9):
            if step == 2:
                opt.add_param_group({"params": [first], "optimizer_class": optim.Muon})
                opt.add_param_group({"params": [second], "lr": 0.01})
                # The default of its own class, not of the one that the other groups have.
                assert opt.param_groups[-2]["lr"] == 1e-3
            for param in (hidden[0], rest[0]):
                param.requires_grad_(not 3 <= step < 6)
            set_gradients(params, step)
            opt.step()
            opt.zero_grad()
        names = [group["optimizer_class"].split(".")[-1] for group in opt.param_groups]
        assert names == ["Muon", "AdamW", "AdamW", "Muon", "AdamW"]
        results.append(copies(params))
    return differing(*results)
