"""What a class does to parameters outside of its step reaches every rank: `apply` and `eval`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
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
        self.a, self.b, self.c = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


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
    torch.manual_seed(0)
    net: Any = Net().to(dtype)
    if way == "unsharded":
        opt: Any = cls(net.parameters())
    elif way == "module":
        opt = ZeroRedundancyOptimizer(net.parameters(), cls, module=net, bucket_bytes=64)
    else:
        policy = MixedPrecision() if dtype != torch.float32 else None
        views = way == "views"
        opt = ZeroRedundancyOptimizer(
            net.parameters(), cls, parameters_as_bucket_view=views, precision=policy
        )
    seen = []

    def look() -> None:
        seen.append([param.detach().clone() for param in net.parameters()])

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


def equal(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


@pytest.mark.parametrize("way", ["plain", "views", "module"])
def test_train_and_eval_are_those_of_the_unsharded_class(way: str) -> None:
    expected = journey("unsharded")
    assert not equal(expected[:1], expected[1:2])
    assert equal(journey(way), expected)
    for ranks in (2, 3) if way == "plain" else (2,):
        for seen in run_ranks(journey, ranks, way):
            assert equal(seen, expected)


@pytest.mark.parametrize("way", ["plain", "views", "module"])
def test_a_class_may_exchange_its_parameters_for_its_state(way: str) -> None:
    expected = journey("unsharded", cls=Exchanges)
    assert equal(journey(way, cls=Exchanges), expected)
    for seen in run_ranks(journey, 2, way, cls=Exchanges):
        assert equal(seen, expected)


@pytest.mark.parametrize("way", ["plain", "module"])
def test_masters_turn_and_parameters_are_their_rounding(way: str) -> None:
    expected = journey(way, torch.bfloat16)
    for seen in run_ranks(journey, 2, way, torch.bfloat16):
        assert equal(seen, expected)


def halve(local: optim.Optimizer) -> None:
    with torch.no_grad():
        for group in local.param_groups:
            for param in group["params"]:
                param.mul_(0.5)


def versions_after_apply() -> list[bool]:
    """At two ranks, each of which owns some of the parameters and is sent the others."""
    net = Net()
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, layout="whole", lr=0.1)
    before = [param._version for param in net.parameters()]
    opt.apply(halve)
    return [p._version > old for p, old in zip(net.parameters(), before, strict=True)]


def test_autograd_sees_that_parameters_were_written_to_on_every_rank() -> None:
    assert run_ranks(versions_after_apply, 2) == [[True] * 6] * 2


@on_ranks(2)
def test_anything_may_be_applied_in_between() -> None:
    torch.manual_seed(0)
    net = Net()
    before = [param.detach().clone() for param in net.parameters()]
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, module=net, lr=0.1)
    out = net(torch.ones(1, 7)).sum()
    opt.apply(halve)
    for old, new in zip(before, net.parameters(), strict=True):
        assert torch.equal(old * 0.5, new)
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
    torch.manual_seed(0)
    net = Net()
    module = {"module": net} if way == "module" else {}
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, **module)
    net(torch.ones(1, 7)).sum().backward()
    opt.clip_grad_norm_(1.0)
    before = [param.detach().clone() for param in net.parameters()]
    opt.apply(descend)
    assert equal([before], [[param.detach().clone() for param in net.parameters()]])
    opt.step()
    assert not torch.equal(before[0], net.a.weight)


@pytest.mark.parametrize("way", ["plain", "module"])
def test_no_gradients_are_seen_whoever_has_them(way: str) -> None:
    look_for_gradients(way)
    run_ranks(look_for_gradients, 2, way)


def change_what_does_not_train(way: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = Net()
    net.a.requires_grad_(False)  # it never had any state
    net.b.bias = nn.Parameter(torch.empty(0, 5), requires_grad=False)
    module = {"module": net} if way == "module" else {}
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, **module)
    opt.apply(halve)
    return [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("way", ["plain", "module"])
def test_what_does_not_train_is_changed_everywhere_too(way: str) -> None:
    expected = change_what_does_not_train(way)
    for seen in run_ranks(change_what_does_not_train, 2, way):
        assert equal([seen], [expected])


@on_ranks(2, raises=(ValueError, RuntimeError), match="no more")
def test_what_fails_on_one_rank_fails_on_all_and_leaves_equal_parameters() -> None:
    torch.manual_seed(0)
    net = Net()
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.SGD, lr=0.1)

    def act(local: optim.Optimizer) -> None:
        halve(local)
        if dist.get_rank() == 1:
            raise ValueError("no more")

    try:
        opt.apply(act)
    finally:
        flat = torch.cat([param.detach().flatten() for param in net.parameters()])
        dist.all_gather(both := [torch.empty_like(flat) for _ in range(2)], flat)
        assert torch.equal(*both)


def test_only_what_the_class_has_is_there() -> None:
    net = Net()
    opt = ZeroRedundancyOptimizer(net.parameters(), optim.AdamW)
    assert not hasattr(opt, "train")
    assert not hasattr(opt, "eval")
    with pytest.raises(AttributeError, match="'ZeroRedundancyOptimizer' has no attribute 'evil'"):
        opt.evil()  # type: ignore[attr-defined]


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


def test_a_class_may_fail_to_turn_and_still_step(tmp_path: Path) -> None:
    assert probe(OptimizerRecipe(PassesItOn, {"lr": 0.1})).kind == "element-wise"
    match = "no attribute 'inside'"
    raises_on_every_rank(pass_it_on, 2, (AttributeError, RuntimeError), tmp_path, match=match)


@pytest.mark.parametrize("cls", [MeansSomethingElse, WantsToBeToldMore])
def test_a_class_may_mean_something_else_by_these_names(cls: type[optim.Optimizer]) -> None:
    assert probe(OptimizerRecipe(cls, {"lr": 0.1})).kind == "element-wise"
    opt = ZeroRedundancyOptimizer(Net().parameters(), cls, lr=0.1)
    assert not hasattr(opt, "train")
    assert not hasattr(opt, "eval")


def test_the_class_in_a_mixture_that_has_them_is_turned() -> None:
    net = Net()
    groups = [
        {"params": [net.a.weight, net.b.weight], "optimizer_class": Averaged},
        {"params": [net.a.bias, net.b.bias, *net.c.parameters()]},
    ]
    opt: Any = ZeroRedundancyOptimizer(groups, optim.AdamW, lr=0.1)
    opt.train()
    use(net, opt, 0)
    use(net, opt, 1)
    before = [param.detach().clone() for param in net.parameters()]
    opt.eval()
    changed = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
    assert changed == [True, False, True, False, False, False]


def go_on_from(folder: Path, way: str) -> list[list[torch.Tensor]]:
    """Save while the model is judged, load that, and train on; the weights before and after."""
    torch.manual_seed(0)
    net, fresh = Net(), Net()
    opt: Any = ZeroRedundancyOptimizer(net.named_parameters(), Averaged)
    other: Any = ZeroRedundancyOptimizer(fresh.named_parameters(), Averaged)
    opt.train()
    for step in range(3):
        use(net, opt, step)
    opt.eval()
    if way == "dcp":
        dcp.save({"opt": checkpoint.Sharded(opt), "net": net}, checkpoint_id=folder)
        dcp.load({"opt": checkpoint.Sharded(other), "net": fresh}, checkpoint_id=folder)
    else:
        checkpoint.save(folder / "step", opt, net)
        checkpoint.load(folder / "step", other, fresh)
    assert not other.param_groups[0]["trains"]
    seen = []
    for each, its in ((net, opt), (fresh, other)):
        its.train()
        use(each, its, 3)
        its.eval()
        seen.append([param.detach().clone() for param in each.parameters()])
    return seen


@pytest.mark.parametrize("way", ["dcp", "folder"])
def test_it_may_be_saved_while_it_is_judged(tmp_path: Path, way: str) -> None:
    for before, after in run_ranks(go_on_from, 2, tmp_path, way):
        assert equal([before], [after])


@on_ranks(2, raises=RuntimeError, match="cannot be called within Join")
def test_not_within_join() -> None:
    opt: Any = ZeroRedundancyOptimizer(Net().parameters(), Averaged)
    with Join([opt]):
        opt.eval()


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"]
)
def test_an_optimizer_is_not_copied(make: Callable[[Any], Any]) -> None:
    opt = ZeroRedundancyOptimizer(Net().parameters(), optim.AdamW)
    with pytest.raises(TypeError, match="construct another one and load this one's state dict"):
        make(opt)
