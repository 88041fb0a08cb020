"""Several classes in one optimizer, Muon for matrices and AdamW for the rest: as if apart."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixtures import ADAMW, MUON, mixed
from models import make_gpt
from on_ranks import on_ranks
from problems import copies, difference, differing, make_params, set_gradients
from ranks import raises_on_every_rank
from torch import nn, optim
from torch.optim import lr_scheduler

from shardstep import ZeroRedundancyOptimizer
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


# ------------------------------------------------------------------------------- divided by ranks


@on_ranks(2, 3)
def test_freezing_and_adding_groups_keep_the_numbers() -> list[int]:
    """Freezing, unfreezing and adding groups move the state of both classes."""
    results = []
    for make in (MultiClass, partial(ZeroRedundancyOptimizer, bucket_bytes=1 << 14)):
        module = gpt()
        (first, second, *hidden), rest = (group["params"] for group in mixed(module))
        groups = [{"params": hidden, "optimizer_class": optim.Muon, **MUON}, {"params": rest}]
        opt: Any = make(groups, optim.AdamW, **ADAMW)
        params = list(module.parameters())
        for step in range(9):
            if step == 2:
                opt.add_param_group({"params": [first], "optimizer_class": optim.Muon, **MUON})
                opt.add_param_group({"params": [second], "lr": 0.01})
            for param in (hidden[0], rest[0]):
                param.requires_grad_(not 3 <= step < 6)
            set_gradients(params, step)
            opt.step()
            opt.zero_grad()
        names = [group["optimizer_class"].split(".")[-1] for group in opt.param_groups]
        assert names == ["Muon", "AdamW", "Muon", "AdamW"]
        results.append(copies(params))
    return differing(*results)


# ------------------------------------------------------------------------------------ bad input


def _construct(classes: list[Any], lr: float) -> ZeroRedundancyOptimizer:
    first, second = make_params([(4, 4), (5,)], frozen=())
    named = {"optimizer_class": classes[dist.get_rank()], "lr": lr}
    return ZeroRedundancyOptimizer([{"params": [first], **named}, {"params": [second]}], optim.SGD)


def _late_class() -> None:
    params = make_params([(4, 4), (5, 5)], frozen=())
    opt = ZeroRedundancyOptimizer(params[:1], optim.AdamW)
    opt.add_param_group({"params": params[1:], "optimizer_class": optim.Muon})


@pytest.mark.parametrize(
    ("act", "args", "match"),
    [
        (_construct, ([optim.Muon, optim.AdamW], 0.1), "rank 0 has .* where rank 1 has"),
        (_construct, ([optim.Muon] * 2, -1.0), "(?i)learning rate"),
        (_late_class, (), "name the class of a group from the start"),
    ],
)
def test_what_cannot_be_mixed_is_refused_on_every_rank(act: Any, args: Any, match: str) -> None:
    raises_on_every_rank(act, 2, ValueError, *args, match=match)
