"""The state of masters: saved, loaded elsewhere, by other classes, and as wide as it should be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MLP
from on_ranks import on_ranks
from problems import LAYOUTS, copies, difference, differing, make_params, set_gradients
from ranks import run_ranks
from sixteen_bits import (
    AT_RANDOM,
    BF16,
    FP16,
    FP32,
    MASTERS,
    WITHOUT,
    bf16_mlp,
    give_gradients,
    train_on,
    zero_of,
)
from torch import Tensor, optim

from shardstep import MixedPrecision, ZeroRedundancyOptimizer


def _steps(module: MLP, opt: Any, steps: range) -> list[Tensor]:
    for step in steps:
        give_gradients(module, step)
        opt.step()
    return copies(module.parameters())


def _save(layout: str, with_module: bool) -> Any:
    """Train for a while; then on from there, and the state of the moment in between."""
    module = bf16_mlp()
    opt = zero_of(module, with_module, precision=MASTERS, layout=layout, bucket_bytes=None)
    model = _steps(module, opt, range(4))
    opt.consolidate_state_dict()
    saved = opt.state_dict() if dist.get_rank() == 0 else None
    return saved, model, _steps(module, opt, range(4, 8))


def _resume(saved: Any, model: list[Tensor], layout: str, with_module: bool, first: str) -> Any:
    module = bf16_mlp()
    opt = zero_of(module, with_module, precision=MASTERS, layout=layout, bucket_bytes=None)

    def load_model() -> None:
        with torch.no_grad():
            for param, value in zip(module.parameters(), model, strict=True):
                param.copy_(value)

    acts = [load_model, lambda: opt.load_state_dict(saved)]
    for act in acts if first == "model" else reversed(acts):
        act()
    return _steps(module, opt, range(4, 8))


@pytest.mark.slow
def test_training_goes_on_at_any_world_size_and_layout_as_if_it_had_not_stopped() -> None:
    (saved, model, expected), *_ = run_ranks(_save, 2, "sliced", True)
    moments = {entry["exp_avg"].dtype for entry in saved["state"].values()}
    assert moments == {FP32}
    for index, master in saved["masters"].items():
        assert torch.equal(master.bfloat16(), model[index])
        assert master.dtype == FP32
        assert not torch.equal(master, model[index].float())
    (other, *_), *_ = run_ranks(_save, 3, "whole", False)
    (same, *_), *_ = run_ranks(_save, 2, "sliced", False)
    assert difference(same, other) is None
    ways = [
        (1, "whole", True, "model"),
        (3, "sliced", False, "optimizer"),
        (2, "whole", True, "model"),
    ]
    for world_size, layout, with_module, first in ways:
        for got in run_ranks(_resume, world_size, saved, model, layout, with_module, first):
            assert differing(expected, got) == [], (world_size, layout, with_module, first)


def test_a_plain_optimizer_loads_a_state_dict_with_masters() -> None:
    module = bf16_mlp()
    opt = zero_of(module)
    train_on(module, opt, range(3))
    saved = opt.state_dict()
    plain = optim.AdamW(bf16_mlp(FP32).parameters())
    plain.load_state_dict(saved)
    assert torch.equal(plain.state_dict()["state"][2]["exp_avg"], saved["state"][2]["exp_avg"])
    without = zero_of(bf16_mlp(FP32))
    without.load_state_dict(saved)
    assert without.shards.masters() == {}
    assert "masters" not in without.state_dict()


def test_a_state_dict_without_masters_makes_them_from_the_parameters() -> None:
    """A dict of the plain 16-bit optimizer, whose moments become fp32."""
    module = bf16_mlp()
    plain = optim.AdamW(module.parameters(), lr=0.003)
    train_on(module, plain, range(3))
    opt = zero_of(module)
    train_on(module, opt, range(3, 5))  # masters that are to be forgotten
    opt.load_state_dict(plain.state_dict())
    for param in module.parameters():
        master = opt.full_master(param)
        assert master is not None
        assert torch.equal(master, param.float())
        moment = opt.state[param]["exp_avg"]
        assert moment.dtype == FP32
        assert torch.equal(moment, plain.state[param]["exp_avg"].float())


class _Foreign(optim.Optimizer):
    """Not one of torch's: part of its state has the parameter's dtype, part is fp32 whatever."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                state.setdefault("wide", torch.zeros(param.shape)).add_(param.grad)
                param.data.sub_(state["sum"], alpha=self.param_groups[0]["lr"])


def test_state_of_a_foreign_class_becomes_the_masters_where_it_was_the_parameters() -> None:
    params = make_params([(70, 3), (5,)], dtypes=(BF16,), frozen=())
    plain = _Foreign(params)
    set_gradients(params, 1, missing=False)
    plain.step()
    opt = ZeroRedundancyOptimizer(params, _Foreign, precision=MASTERS)
    opt.load_state_dict(plain.state_dict())
    for param in params:
        assert opt.state[param]["sum"].dtype == FP32
        assert opt.state[param]["wide"].dtype == FP32
        assert torch.equal(opt.state[param]["sum"], plain.state[param]["sum"].float())
        assert torch.equal(opt.state[param]["wide"], plain.state[param]["wide"])
    without = ZeroRedundancyOptimizer(params, _Foreign, precision=WITHOUT)
    without.load_state_dict(plain.state_dict())
    for param in params:
        assert without.state[param]["sum"].dtype == BF16
        assert without.state[param]["wide"].dtype == FP32


@pytest.mark.parametrize(
    ("masters", "match"),
    [
        ({0: torch.zeros(3)}, "the master of parameter 'layers.0.weight' has shape"),
        ({0: torch.zeros(1)}, "the master of parameter 'layers.0.weight' has shape"),
        ({99: torch.zeros(3)}, "a master for 99, which is in no group"),
    ],
)
def test_masters_of_another_model_are_refused(masters: Any, match: str) -> None:
    module = bf16_mlp()
    opt = zero_of(module)
    train_on(module, opt, range(2))
    before = {index: master.clone() for index, master in opt.shards.masters().items()}
    with pytest.raises(ValueError, match=match):
        opt.load_state_dict({**opt.state_dict(), "masters": masters})
    assert all(torch.equal(before[i], master) for i, master in opt.shards.masters().items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", [MASTERS, AT_RANDOM], ids=["masters", "at random"])
@on_ranks(2)
def test_state_from_when_a_parameter_was_frozen_is_as_wide_as_that_of_others(
    policy: MixedPrecision, layout: str
) -> str | None:
    """Adagrad makes its state when it is constructed, also for what does not train yet."""
    states = []
    for frozen in ((), (0,)):
        params = make_params([(70, 3), (5,)], dtypes=(FP16,), frozen=frozen)
        opt = ZeroRedundancyOptimizer(
            params, optim.Adagrad, precision=policy, layout=layout, initial_accumulator_value=0.1
        )
        params[0].requires_grad_(True)
        for param in params:
            param.grad = torch.full_like(param, 1e-3)  # squared, it is lost in 16 bits
        opt.step()
        states.append([opt.full_state(param) for param in params])
    return difference(*states)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_parameter_cast_to_16_bits_keeps_its_wide_state(layout: str) -> None:
    """Trained in fp32, cast to fp16 while it is frozen or not, perhaps loaded, and trained on."""
    for freeze, load in itertools.product((False, True), repeat=2):
        params = make_params([(70, 3), (5,)], dtypes=(FP32,), frozen=())
        opt = ZeroRedundancyOptimizer(
            params, optim.Adagrad, precision=MASTERS, layout=layout, initial_accumulator_value=0.1
        )
        for step in range(2):
            set_gradients(params, step, missing=False)
            opt.step()
        expected = [opt.full_state(param)["sum"] for param in params]
        opt.zero_grad()
        opt.consolidate_state_dict(to="all")
        saved = opt.state_dict()
        params[0].requires_grad_(not freeze)
        for param in params:
            param.data = param.data.half()
        if load:
            opt.load_state_dict(saved)
        opt.step()
        params[0].requires_grad_(True)
        opt.step()
        assert difference(expected, [opt.full_state(param)["sum"] for param in params]) is None
