"""Classes that do not get along with an empty group are sharded all the same, and count alike."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problems import difference
from ranks import run_ranks
from torch import nn, optim
from torch.optim import Optimizer

from shardstep import MixedPrecision, ZeroRedundancyOptimizer, checkpoint
from shardstep.layouts.choose import choose
from shardstep.layouts.probe import Verdict
from shardstep.layouts.probe import probe as probe_recipe
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.local.empty_groups import empty_param, fill_empty_groups


def probe(cls: Any) -> Verdict:
    return probe_recipe(OptimizerRecipe(cls))


class LeavesEmptyOut(Optimizer):
    """Momentum with a counter in each group that has parameters, as fused classes have it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                self.update(group)

    def update(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            if param.grad is not None:
                moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                moment.mul_(0.9).add_(self.direction(param.grad))
                param.sub_(moment, alpha=group["lr"] / group["step"])

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad


class CountsWhereThereIsAGradient(LeavesEmptyOut):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("step", 0)
        for group in self.param_groups:
            with torch.no_grad():
                if any(param.grad is not None for param in group["params"]):
                    group["step"] += 1
                    self.update(group)


class TakesTheFirst(LeavesEmptyOut):
    """Raises where a group is empty."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["where"] = str(group["params"][0].device)
        super().step()


class SaysWhatItTakes(LeavesEmptyOut):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not all(group["params"] for group in self.param_groups):
            raise ValueError("a parameter group is empty")
        super().step()


class ByTensor(LeavesEmptyOut):
    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad / (1 + grad.norm())


CLASSES = {
    LeavesEmptyOut: "element-wise",
    CountsWhereThereIsAGradient: "coupled",
    TakesTheFirst: "element-wise",
    SaysWhatItTakes: "element-wise",
    ByTensor: "per tensor",
}


@pytest.mark.parametrize("cls", CLASSES)
def test_the_probe_tells(cls: type[Optimizer]) -> None:
    verdict = probe(cls)
    assert verdict.kind == CLASSES[cls]
    assert verdict.fill_empty_groups == (verdict.kind != "coupled")
    assert verdict.fill_empty_groups == ("with placeholders in empty groups" in str(verdict))
    assert not probe(optim.AdamW).fill_empty_groups


class LeavesEmptyOutOfWide(LeavesEmptyOut):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        dtypes = {param.dtype for group in self.param_groups for param in group["params"]}
        for group in self.param_groups:
            if group["params"] or dtypes == {torch.bfloat16}:
                group["step"] = group.get("step", 0) + 1
                with torch.no_grad():
                    self.update(group)


def test_one_dtype_that_needs_it_is_enough() -> None:
    params = [torch.ones(2, dtype=d, requires_grad=True) for d in (torch.float32, torch.bfloat16)]
    for order in (params, params[::-1]):
        choice = choose("auto", OptimizerRecipe(LeavesEmptyOutOfWide), order, world_size=2)
        assert choice.verdict is not None
        assert choice.verdict.fill_empty_groups


def test_what_differs_in_a_group_is_named() -> None:
    assert "kept" in (found := str(probe(Keeps))), found


class Keeps(LeavesEmptyOut):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["kept"] = sum(param.numel() for param in group["params"])


def test_so_is_what_is_kept_in_another_order() -> None:
    verdict = probe(KeepsInAnotherOrder)
    assert verdict.kind == "coupled"
    assert "'late'" in str(verdict)


class KeepsInAnotherOrder(LeavesEmptyOut):
    """In the order in which things come up, and what comes up first depends on the group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            numel = sum(param.numel() for param in group["params"])
            for key in ("late", "early") if numel % 2 else ("early", "late"):
                group.setdefault(key, True)


class Wraps(LeavesEmptyOut):
    """Has another optimizer inside, on the same groups, that keeps state of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.inside = optim.SGD(self.param_groups, lr=lr, momentum=0.5)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.inside.step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inside": self.inside.state_dict()}


def test_nothing_is_left_in_an_optimizer_inside() -> None:
    assert probe(Wraps).kind == "coupled"
    opt = Wraps([{"params": [nn.Parameter(torch.ones(2))]}, {"params": []}])
    with fill_empty_groups(opt, {1: empty_param(torch.ones(2), torch.float32, has_gradient=True)}):
        opt.step()
        assert opt.inside.state
    assert not opt.inside.state
    opt.state_dict()


class Net(nn.Module):
    """So small beside its first group that most ranks have nothing of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(40, 40), nn.Linear(40, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.small(torch.tanh(self.large(x)))
        return out

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": list(self.large.parameters())},
            {"params": list(self.small.parameters()), "lr": 0.2},
        ]


def make(cls: type[Optimizer], way: str) -> tuple[Net, Any]:
    torch.manual_seed(0)
    net = Net()
    if way == "unsharded":
        return net, cls(net.groups())  # type: ignore[call-arg]
    module = {"module": net} if way == "module" else {}
    return net, ZeroRedundancyOptimizer(net.groups(), cls, **module)


def train(net: Net, opt: Any, steps: range) -> None:
    for step in steps:
        source = torch.Generator().manual_seed(step)
        opt.zero_grad()
        out = net(torch.randn(4, 40, generator=source))
        # Some steps leave the second group without gradients, as freezing does.
        net.small.requires_grad_(step % 4 != 3)
        (out if step % 4 != 3 else net.large(torch.ones(1, 40))).square().mean().backward()
        opt.step()


def outcome(net: Net, opt: Any) -> Any:
    kept = [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
    return [param.detach().clone() for param in net.parameters()], kept


def sharded(cls: type[Optimizer], way: str, folder: Path) -> Any:
    net, opt = make(cls, way)
    train(net, opt, range(6))
    checkpoint.save(folder / "six", opt, net)
    middle = outcome(net, opt)
    rank = dist.get_rank()
    opt.consolidate_state_dict(to=dist.get_world_size() - 1)
    saved = opt.state_dict() if rank == dist.get_world_size() - 1 else None
    train(net, opt, range(6, 10))
    other, fresh = make(cls, way)
    checkpoint.load(folder / "six", fresh, other)
    train(other, fresh, range(6, 10))
    empty = not opt.optim.param_groups[1]["params"]
    return middle, saved, outcome(net, opt), outcome(other, fresh), empty


@pytest.mark.parametrize(
    ("cls", "way", "ranks"),
    [
        (LeavesEmptyOut, "plain", 3),
        (LeavesEmptyOut, "module", 2),
        (TakesTheFirst, "plain", 2),
        (ByTensor, "plain", 3),
    ],
)
def test_numbers_and_counters_are_those_of_the_unsharded_class(
    cls: type[Optimizer], way: str, ranks: int, tmp_path: Path
) -> None:
    net, opt = make(cls, "unsharded")
    train(net, opt, range(6))
    middle, saved = outcome(net, opt), copy.deepcopy(opt.state_dict())
    train(net, opt, range(6, 10))
    end = outcome(net, opt)
    found = run_ranks(sharded, ranks, cls, way, tmp_path)
    assert any(empty for *_, empty in found)
    for number, (half, dumped, then, resumed, _) in enumerate(found):
        assert difference(half, middle) is None
        assert difference(then, end) is None
        assert difference(resumed, end) is None
        if number == ranks - 1:
            assert difference(dumped, saved) is None


class HasModes(LeavesEmptyOut):
    """Lets nobody know of the mode where there is nothing to turn."""

    def train(self, mode: bool = True) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["trains"] = mode

    def eval(self) -> None:
        self.train(False)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not all(group["trains"] for group in self.param_groups if group["params"]):
            raise RuntimeError("call train() first")
        super().step()


def go_through_modes() -> list[list[Any]]:
    net, opt = make(HasModes, "plain")
    opt.train()
    train(net, opt, range(3))
    modes = []
    for turn in (opt.eval, opt.train, lambda: opt.train(False), lambda: opt.train(mode=True)):
        turn()
        modes.append([group["trains"] for group in opt.param_groups])
    return modes


def test_modes_are_those_of_the_unsharded_class_too() -> None:
    expected = [[False] * 2, [True] * 2, [False] * 2, [True] * 2]
    assert run_ranks(go_through_modes, 3) == [expected] * 3


def refuse_a_group() -> None:
    net, opt = make(LeavesEmptyOut, "plain")
    more = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="needs the same on every rank"):
        opt.add_param_group({"params": more.parameters(), "lr": 0.1 + dist.get_rank()})
    train(net, opt, range(2))
    assert str(opt.report()).count("sliced tensors: LeavesEmptyOut updates") == 2
    opt.add_param_group({"params": more.parameters(), "lr": 0.3})
    train(net, opt, range(2, 4))
    assert [group["step"] for group in opt.param_groups] == [4, 4, 2]


def test_a_group_that_was_refused_is_not_filled() -> None:
    run_ranks(refuse_a_group, 2)


class NotesDown(LeavesEmptyOut):
    """Counts by what it finds in a group, once the closure has been evaluated."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        super().step()
        for group in self.param_groups:
            if group["params"]:
                first = group["params"][0]
                group["found"] = str(first.dtype), first.requires_grad, first.grad is not None


def note_down(way: str) -> list[Any]:
    torch.manual_seed(0)
    net = Net().to(torch.bfloat16)
    groups = net.groups()
    if way == "quantised":  # weights that do not train, as adapters are put on
        codes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
        groups[0]["params"].append(codes)
        groups[1]["params"].insert(0, nn.Parameter(codes.clone(), requires_grad=False))
    opt = ZeroRedundancyOptimizer(groups, NotesDown, precision=MixedPrecision())

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = net(torch.ones(1, 40, dtype=torch.bfloat16)).sum()
        loss.backward()
        return loss

    if way == "closure":
        opt.step(closure)  # type: ignore[arg-type]
    else:
        closure()
        opt.step()
    return [
        local["found"] if way != "quantised" else "found" in local for local in opt.param_groups
    ]


@pytest.mark.parametrize("way", ["masters", "closure"])
def test_an_empty_group_is_filled_with_what_others_have_there(way: str) -> None:
    for found in run_ranks(note_down, 3, way):
        assert found == [("torch.float32", True, True)] * 2


def test_weights_that_do_not_train_are_not_what_it_is_filled_like() -> None:
    assert run_ranks(note_down, 3, "quantised") == [[True, True]] * 3
