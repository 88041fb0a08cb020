"""What a class does to parameters outside of its step reaches every rank: `apply` and `eval`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
from problems import assert_alike, assert_same, copies, differing
from ranks import raises_on_every_rank, run_ranks
from torch import nn, optim
from torch.distributed.algorithms.join import Join

from shardstep import MixedPrecision, ZeroRedundancyOptimizer, checkpoint
from shardstep.layouts.probe import probe
from shardstep.layouts.recipe import OptimizerRecipe


class Averaged(optim.Optimizer):
    """SGD on one sequence of weights that is judged by its average, in the way of schedule-free.

    While it trains, a parameter lies between the two; `eval()` puts the average there. It starts in
    that mode.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.8) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "trains": False, "k": 0})

    @torch.no_grad()
    def eval(self) -> None:
        self._turn(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self) -> None:
        self._turn(True, lambda beta: 1 - beta)

    def _turn(self, trains: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight(group["beta"]))
            group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("call train() before step()")
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "z" not in state:
                    state["z"] = param.clone()
                param.lerp_(state["z"], 1 / group["k"])
                param.add_(param.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"])))
                state["z"].sub_(param.grad, alpha=group["lr"])


class Exchanges(Averaged):
    """Has the averages beside, and exchanges the two rather than their values."""

    def _turn(self, trains: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for param in group["params"]:
                    state = self.state[param]
                    if "z" in state:
                        param.data, state["z"] = state["z"], param.data
            group["trains"] = trains


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def make(way: str, cls: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    net = Net().to(dtype)
    if way == "unsharded":
        return net, cls(net.parameters(), **options)
    if way == "module":
        options |= {"module": net, "bucket_bytes": 64}
    elif dtype != torch.float32:
        options["precision"] = MixedPrecision()
    options["parameters_as_bucket_view"] = way == "views"
    return net, ZeroRedundancyOptimizer(net.named_parameters(), cls, **options)


def use(net: nn.Module, opt: Any, step: int) -> None:
    """One iteration on the same batch on all ranks."""
    random = torch.Generator().manual_seed(step)
    dtype = next(net.parameters()).dtype
    opt.zero_grad()
    net(torch.randn(4, 7, generator=random).to(dtype)).float().square().mean().backward()
    opt.step()


def journey(
    way: str, dtype: torch.dtype = torch.float32, cls: type[Averaged] = Averaged
) -> list[list[torch.Tensor]]:
    """Train, judge, train on, freeze, judge; the weights after each."""
    net, opt = make(way, cls, dtype)
    seen = []

    def look() -> None:
        seen.append(copies(net.parameters()))

    def judge() -> None:
        opt.eval()
        look()
        assert not opt.param_groups[0]["trains"]
        with pytest.raises(RuntimeError, match="call train"):
            use(net, opt, 0)
        opt.train()
        look()

    opt.eval()  # there is no state yet
    opt.train()
    for step in range(3):
        use(net, opt, step)
    judge()
    judge()
    use(net, opt, 3)
    net.a.requires_grad_(False)  # it keeps its state, and its average is judged with the others'
    use(net, opt, 4)
    judge()
    net.a.requires_grad_(True)
    use(net, opt, 5)
    judge()
    return seen


def check(way: str, expected: Any, *args: Any, ranks: Sequence[int] = (2,)) -> None:
    assert_alike(expected, journey(way, *args))
    for each in ranks:
        for seen in run_ranks(journey, each, way, *args):
            assert_alike(expected, seen)


@pytest.mark.parametrize("way", ["plain", "views", "module"])
def test_train_and_eval_are_those_of_the_unsharded_class(way: str) -> None:
    """Also if it exchanges parameters for its state; masters turn, and parameters round them."""
    expected = journey("unsharded")
    assert differing(expected[0], expected[1])
    check(way, expected, ranks=(2, 3) if way == "plain" else (2,))
    args = (torch.float32, Exchanges)
    check(way, journey("unsharded", *args), *args)
    check(way, journey(way, torch.bfloat16), torch.bfloat16)


def halve(local: optim.Optimizer) -> None:
    with torch.no_grad():
        for group in local.param_groups:
            for param in group["params"]:
                param.mul_(0.5)


@on_ranks(2)
def test_autograd_sees_that_parameters_were_written_to_on_every_rank() -> None:
    """At two ranks, each of which owns some of the parameters and is sent the others."""
    net = Net()
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, layout="whole", lr=0.1)
    before = [param._version for param in net.parameters()]
    opt.apply(halve)
    assert all(p._version > old for p, old in zip(net.parameters(), before, strict=True))


@on_ranks(2)
def test_anything_may_be_applied_in_between() -> None:
    net, opt = make("module", optim.AdamW, lr=0.1)
    before = copies(net.parameters())
    out = net(torch.ones(1, 7)).sum()
    opt.apply(halve)
    assert_same([old * 0.5 for old in before], list(net.parameters()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    opt.zero_grad()
    # A gradient that is there is there afterwards, and the step is taken on it.
    net(torch.ones(1, 7)).sum().backward()
    grad = opt.full_grad(net.c.weight)
    opt.apply(halve)
    assert grad is not None
    assert torch.equal(opt.full_grad(net.c.weight), grad)  # type: ignore[arg-type]
    opt.step()


def descend(local: optim.Optimizer) -> None:
    with torch.no_grad():
        for group in local.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad)


def look_for_gradients(way: str) -> None:
    net, opt = make(way, optim.AdamW)
    net(torch.ones(1, 7)).sum().backward()
    opt.clip_grad_norm_(1.0)
    before = copies(net.parameters())
    opt.apply(descend)
    assert_same(before, list(net.parameters()))
    opt.step()
    assert not torch.equal(before[0], net.a.weight)


@pytest.mark.parametrize("way", ["plain", "module"])
def test_no_gradients_are_seen_whoever_has_them(way: str) -> None:
    look_for_gradients(way)
    run_ranks(look_for_gradients, 2, way)


def change_what_does_not_train(way: str) -> list[torch.Tensor]:
    net = Net()
    net.a.requires_grad_(False)  # it never had any state
    net.b.bias = nn.Parameter(torch.empty(0, 5), requires_grad=False)
    module = {"module": net} if way == "module" else {}
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, **module)
    opt.apply(halve)
    return copies(net.parameters())


@pytest.mark.parametrize("way", ["plain", "module"])
def test_what_does_not_train_is_changed_everywhere_too(way: str) -> None:
    expected = change_what_does_not_train(way)
    for seen in run_ranks(change_what_does_not_train, 2, way):
        assert_same(expected, seen)


@on_ranks(2, raises=(ValueError, RuntimeError), match="no more")
def test_what_fails_on_one_rank_fails_on_all_and_leaves_equal_parameters() -> None:
    _, opt = make("plain", optim.SGD, lr=0.1)

    def act(local: optim.Optimizer) -> None:
        halve(local)
        if dist.get_rank() == 1:
            raise ValueError("no more")

    try:
        opt.apply(act)
    finally:
        opt.verify()


class MeansSomethingElse(optim.SGD):
    train = True

    def eval(self, loss: float) -> float:
        return loss


class WantsToBeToldMore(MeansSomethingElse):
    def train(self, data: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


class PassesItOn(optim.SGD):
    def train(self) -> None:
        self.inside.train()  # type: ignore[attr-defined]

    def eval(self) -> None:
        self.inside.eval()  # type: ignore[attr-defined]


def pass_it_on(folder: Path) -> None:
    net = Net()
    opt: Any = ZeroRedundancyOptimizer(net.named_parameters(), PassesItOn, lr=0.1, momentum=0.9)
    use(net, opt, 0)
    dcp.save({"opt": checkpoint.Sharded(opt)}, checkpoint_id=folder)
    other = ZeroRedundancyOptimizer(Net().named_parameters(), PassesItOn, lr=0.1, momentum=0.9)
    dcp.load({"opt": checkpoint.Sharded(other)}, checkpoint_id=folder)
    opt.eval()


def test_a_class_whose_eval_fails_may_still_step(tmp_path: Path) -> None:
    assert probe(OptimizerRecipe(PassesItOn, {"lr": 0.1})).kind == "element-wise"
    match = "no attribute 'inside'"
    raises_on_every_rank(pass_it_on, 2, (AttributeError, RuntimeError), tmp_path, match=match)


@pytest.mark.parametrize("cls", [optim.AdamW, MeansSomethingElse, WantsToBeToldMore])
def test_train_and_eval_exist_only_if_the_class_means_the_modes(cls: type[optim.Optimizer]) -> None:
    assert probe(OptimizerRecipe(cls, {"lr": 0.1})).kind == "element-wise"
    opt = ZeroRedundancyOptimizer(Net().parameters(), cls, lr=0.1)
    assert not hasattr(opt, "train")
    assert not hasattr(opt, "eval")
    with pytest.raises(AttributeError, match="'ZeroRedundancyOptimizer' has no attribute 'evil'"):
        opt.evil()  # type: ignore[attr-defined]


def test_eval_reaches_the_class_of_a_mixture_that_has_it() -> None:
    net = Net()
    groups = [
        {"params": [net.a.weight, net.b.weight], "optimizer_class": Averaged},
        {"params": [net.a.bias, net.b.bias, *net.c.parameters()]},
    ]
    opt: Any = ZeroRedundancyOptimizer(groups, optim.AdamW, lr=0.1)
    opt.train()
    use(net, opt, 0)
    use(net, opt, 1)
    before = copies(net.parameters())
    opt.eval()
    changed = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
    assert changed == [True, False, True, False, False, False]


@pytest.mark.parametrize("way", ["dcp", "folder"])
@on_ranks(2)
def test_an_optimizer_may_be_saved_in_eval_mode(tmp_path: Path, way: str) -> None:
    """Save while the model is judged, load that, and train on."""
    (net, opt), (fresh, other) = make("plain", Averaged), make("plain", Averaged)
    opt.train()
    for step in range(3):
        use(net, opt, step)
    opt.eval()
    if way == "dcp":
        dcp.save({"opt": checkpoint.Sharded(opt), "net": net}, checkpoint_id=tmp_path)
        dcp.load({"opt": checkpoint.Sharded(other), "net": fresh}, checkpoint_id=tmp_path)
    else:
        checkpoint.save(tmp_path / "step", opt, net)
        checkpoint.load(tmp_path / "step", other, fresh)
    assert not other.param_groups[0]["trains"]
    for each, its in ((net, opt), (fresh, other)):
        its.train()
        use(each, its, 3)
        its.eval()
    assert_same(list(net.parameters()), list(fresh.parameters()))


@on_ranks(2, raises=RuntimeError, match="cannot be called within Join")
def test_train_and_eval_are_refused_within_join() -> None:
    opt: Any = ZeroRedundancyOptimizer(Net().parameters(), Averaged)
    with Join([opt]):
        opt.eval()


@on_ranks(2, raises=ValueError, match="param_groups was edited by hand")
def test_groups_that_were_edited_are_named_with_frozen_parameters_too() -> None:
    net = Net()
    next(net.parameters()).requires_grad_(False)
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.SGD)
    opt.param_groups[0]["params"].reverse()
    opt.apply(lambda local: None)


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"]
)
def test_an_optimizer_is_not_copied(make: Callable[[Any], Any]) -> None:
    opt = ZeroRedundancyOptimizer(Net().parameters(), optim.AdamW)
    with pytest.raises(TypeError, match="construct another one and load this one's state dict"):
        make(opt)
