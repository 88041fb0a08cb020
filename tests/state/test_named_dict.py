"""Optimizer state dicts from elsewhere are loaded by the names of their parameters, ours go there,
and a dict that does not cover what trains is not taken in silence."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from models import TwoLayers as Net
from models import consolidated
from models import train_alike as train
from on_ranks import on_ranks
from problems import LAYOUTS, assert_alike, differing, set_gradients
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardstep import ZeroRedundancyOptimizer
from shardstep.checkpoint import by_name
from shardstep.params.groups import rename_params
from shardstep.params.names import strip_wrapper_prefixes

MODES = ("nested", "flat")


def groups_of(net: nn.Module, names: bool = False) -> list[dict[str, Any]]:
    """Weights decay, biases do not."""
    pairs = list(net.named_parameters())
    decaying = [pair if names else pair[1] for pair in pairs if pair[1].ndim > 1]
    others = [pair if names else pair[1] for pair in pairs if pair[1].ndim <= 1]
    return [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def zero(layout: str = "auto", **options: Any) -> tuple[Net, ZeroRedundancyOptimizer]:
    net = Net()
    return net, ZeroRedundancyOptimizer(
        groups_of(net, names=True), optim.AdamW, layout=layout, **options
    )


def trained(steps: int = 3) -> tuple[Net, Optimizer]:
    net = Net()
    opt = optim.AdamW(groups_of(net))
    train(net, opt, range(steps))
    return net, opt


def goes_on(net: Net, opt: Any, values: Any) -> list[int]:
    """Which parameters differ from those of a run that was not interrupted, three steps on."""
    net.load_state_dict(values)
    return differing([*trained(6)[0].parameters()], train(net, opt, range(3, 6)))


# ------------------------------------------------------------------------------------ by name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_the_full_dict_of_fsdp2_loads(mode: str, layout: str) -> list[int]:
    net = Net()
    for part in (net.up, net.down, net):
        fully_shard(part)
    opt = optim.AdamW(groups_of(net))
    train(net, opt, range(3))
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=mode == "flat")
    state = get_optimizer_state_dict(net, opt, options=options)
    before = copy.deepcopy(state)
    ours, sharded = zero(layout)
    sharded.load_state_dict(state)
    plain, _ = trained()
    assert_alike(before, state)
    return goes_on(ours, sharded, plain.state_dict())


def _replace(key: str, rename: dict[str, str]) -> str:
    return next(key.replace(old, new) for old, new in rename.items() if f".{old}." in key)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_names_from_inside_of_wrappers_are_known(mode: str, compiled: bool) -> list[Any]:
    net = Net()
    ddp = DistributedDataParallel(net)
    opt = optim.AdamW(groups_of(net))
    train(net, opt, range(3))
    wrapped = torch.compile(ddp) if compiled else ddp
    state = get_optimizer_state_dict(
        net, opt, options=StateDictOptions(flatten_optimizer_state_dict=mode == "flat")
    )
    wrapper = {id(param): name for name, param in wrapped.named_parameters()}
    rename = {name: wrapper[id(param)] for name, param in net.named_parameters()}
    assert all(new.endswith(f"module.{old}") for old, new in rename.items())
    if mode == "flat":
        state = {_replace(key, rename): value for key, value in state.items()}
    else:
        state = rename_params(state, rename)
    ours, sharded = zero()
    sharded.load_state_dict(state)
    return goes_on(ours, sharded, net.state_dict())


def test_a_submodule_called_module_keeps_its_name_unless_all_have_it() -> None:
    assert strip_wrapper_prefixes(["module.a", "module.module.b"]) == ["a", "module.b"]
    assert strip_wrapper_prefixes(["module.a", "b"]) == ["module.a", "b"]
    assert strip_wrapper_prefixes(["_orig_mod.module.a", "module._orig_mod.b"]) == ["a", "b"]


@pytest.mark.parametrize("numbers", [False, True])
@on_ranks(2)
def test_names_count_and_not_places(numbers: bool) -> list[int]:
    """Names say what is whose, also where parameters and groups come in another order."""
    net, opt = trained()
    names = [name for g in groups_of(net, names=True) for name, _ in g["params"]]
    state = by_name(opt.state_dict(), names)
    state = {
        "state": dict(reversed(state["state"].items())),
        "param_groups": [{**g, "params": g["params"][::-1]} for g in state["param_groups"][::-1]],
    }
    if numbers:
        for group in state["param_groups"]:
            group["param_names"] = group["params"]
        order = [name for group in state["param_groups"] for name in group["params"]]
        state = rename_params(state, {name: number for number, name in enumerate(order)})
    ours, sharded = zero()
    sharded.load_state_dict(state)
    return goes_on(ours, sharded, net.state_dict())


@on_ranks(2)
def test_other_names_are_refused_and_change_nothing() -> list[int]:
    """What does not fit is refused by name and changes nothing."""
    net, opt = trained()
    good = get_optimizer_state_dict(net, opt)
    flat = get_optimizer_state_dict(
        net, opt, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    unknown, fewer, regrouped, shape = (copy.deepcopy(good) for _ in range(4))
    unknown["param_groups"][0]["params"][0] = "up.heavy"
    fewer["param_groups"][1]["params"].remove("down.bias")
    regrouped["param_groups"][1]["params"].append(regrouped["param_groups"][0]["params"].pop())
    shape["state"]["up.bias"]["exp_avg"] = torch.zeros(7)
    ours, sharded = zero()
    train(ours, sharded, range(2))
    for state, match in (
        (unknown, "'up.weight'.*'up.heavy'"),
        (fewer, "'down.bias'"),
        (regrouped, "group 0.*'up.weight'"),
        (shape, "'up.bias'"),
        ({**flat, "param_groups.up.bias.lr": 0.5}, "'up.bias'.*options"),
        (net.state_dict(), "not the state dict of an optimizer"),
    ):
        with pytest.raises(ValueError, match=match):
            sharded.load_state_dict(state)
    return differing([*trained(6)[0].parameters()], train(ours, sharded, range(2, 6)))


def test_names_are_refused_where_there_are_none() -> None:
    net, opt = trained()
    ours = ZeroRedundancyOptimizer(groups_of(Net()), optim.AdamW)
    with pytest.raises(ValueError, match="named_parameters"):
        ours.load_state_dict(get_optimizer_state_dict(net, opt))


@on_ranks(2, raises=ValueError, match="is a DTensor.*full_state_dict=True")
def test_a_dict_of_dtensors_is_refused() -> None:
    net = Net()
    fully_shard(net)
    opt = optim.AdamW(groups_of(net))
    train(net, opt, range(1))
    _, ours = zero()
    ours.load_state_dict(get_optimizer_state_dict(net, opt))


# ------------------------------------------------------------------------------- the other way


@on_ranks(2)
def test_a_consolidated_dict_with_names_is_what_torch_gives() -> list[int]:
    net, opt = zero()
    train(net, opt, range(3))
    state = by_name(consolidated(opt), [spec.name for spec in opt.plan.specs])
    plain, unsharded = trained()
    expected = get_optimizer_state_dict(plain, unsharded)
    assert_alike(expected["state"], {name: state["state"][name] for name in expected["state"]})
    again = Net()
    fresh = optim.AdamW(groups_of(again))
    set_optimizer_state_dict(again, fresh, state)
    return goes_on(again, fresh, net.state_dict())


def test_names_have_to_be_as_many_as_parameters() -> None:
    _, opt = trained()
    with pytest.raises(ValueError, match="expected 4 different names"):
        by_name(opt.state_dict(), ["a", "b"])


# -------------------------------------------------------------------- what a dict does not cover


IN_PART = (
    "the loaded state has nothing for 2 of 4 trainable parameters ('down.weight', 'up.bias'): "
    "these resume from zero"
)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("complete", []),
        ("SGD keeps none", []),
        ("frozen", []),
        ("empty", ["the loaded state is empty: this resumes from zero"]),
        ("in part", [IN_PART]),
    ],
)
@on_ranks(1, 2)
def test_a_dict_that_does_not_cover_what_trains_is_warned_of(kind: str, said: list[str]) -> None:
    net, ours = Net(), Net()
    for each in (net, ours):
        each.up.requires_grad_(kind != "frozen")
    make: Any = optim.SGD if kind == "SGD keeps none" else optim.AdamW
    unsharded = make(groups_of(net))
    if kind != "empty":
        set_gradients(list(net.parameters()), 1, missing=False)
        if kind == "in part":
            net.up.bias.grad = net.down.weight.grad = None
        unsharded.step()
    opt = ZeroRedundancyOptimizer(groups_of(ours, names=True), make)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.load_state_dict(unsharded.state_dict())
    assert [str(w.message) for w in caught if w.category is UserWarning] == said
