"""Classes that skip or refuse empty groups are sharded all the same, with the same counters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from problems import copies, difference
from ranks import run_ranks
from torch import nn, optim
from torch.optim import Optimizer

from shardstep import MixedPrecision, ZeroRedundancyOptimizer, checkpoint
from shardstep.layouts.choose import choose
from shardstep.layouts.probe import probe
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.local.empty_groups import empty_param, fill_empty_groups


class LeavesEmptyOut(Optimizer):
    """Momentum with a counter in each group that has parameters, as fused classes have it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if self.counts(group["params"]):
                group["step"] = group.get("step", 0) + 1
                self.update(group)

    def counts(self, params: list[torch.Tensor]) -> bool:
        return bool(params)

    def update(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            if param.grad is not None:
                moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                moment.mul_(0.9).add_(self.direction(param.grad))
                param.sub_(moment, alpha=group["lr"] / group["step"])

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad


class CountsWhereThereIsAGradient(LeavesEmptyOut):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["step"] = 0

    def counts(self, params: list[torch.Tensor]) -> bool:
        return any(param.grad is not None for param in params)


class TakesTheFirst(LeavesEmptyOut):
    def counts(self, params: list[torch.Tensor]) -> bool:
        return params[0].dim() >= 0


class SaysWhatItTakes(LeavesEmptyOut):
    def counts(self, params: list[torch.Tensor]) -> bool:
        if not params:
            raise ValueError("a parameter group is empty")
        return True


class ByTensor(LeavesEmptyOut):
    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad / (1 + grad.norm())


class Keeps(LeavesEmptyOut):
    def update(self, group: dict[str, Any]) -> None:
        super().update(group)
        group["kept"] = sum(param.numel() for param in group["params"])


class KeepsInAnotherOrder(LeavesEmptyOut):
    """In the order in which keys come up, which depends on the group."""

    def update(self, group: dict[str, Any]) -> None:
        super().update(group)
        numel = sum(param.numel() for param in group["params"])
        for key in ("late", "early") if numel % 2 else ("early", "late"):
            group.setdefault(key, True)


class Wraps(LeavesEmptyOut):
    """Has an inner optimizer on the same groups, with its own state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.inside = optim.SGD(self.param_groups, lr=lr, momentum=0.5)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.inside.step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inside": self.inside.state_dict()}


@pytest.mark.parametrize(
    ("cls", "kind", "why"),
    [
        (LeavesEmptyOut, "element-wise", "with placeholders in empty groups"),
        (TakesTheFirst, "element-wise", "with placeholders in empty groups"),
        (SaysWhatItTakes, "element-wise", "with placeholders in empty groups"),
        (ByTensor, "per tensor", "with placeholders in empty groups"),
        (CountsWhereThereIsAGradient, "coupled", ""),
        (Keeps, "coupled", "'kept'"),
        (KeepsInAnotherOrder, "coupled", "'late'"),
        (Wraps, "coupled", ""),
        (optim.AdamW, "element-wise", ""),
    ],
)
def test_the_probe_finds_the_classes_that_need_placeholders(
    cls: type[Optimizer], kind: str, why: str
) -> None:
    verdict = probe(OptimizerRecipe(cls))
    assert verdict.kind == kind
    assert why in verdict.why
    assert verdict.fill_empty_groups == ("placeholders" in verdict.why)


class LeavesEmptyOutOfWide(LeavesEmptyOut):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        self.narrow = all(param.dtype is torch.bfloat16 for param in params)
        super().step()

    def counts(self, params: list[torch.Tensor]) -> bool:
        return bool(params) or self.narrow


def test_one_dtype_that_needs_placeholders_is_enough() -> None:
    params = [torch.ones(2, dtype=d, requires_grad=True) for d in (torch.float32, torch.bfloat16)]
    for order in (params, params[::-1]):
        choice = choose("auto", OptimizerRecipe(LeavesEmptyOutOfWide), order, world_size=2)
        assert choice.verdict is not None
        assert choice.verdict.fill_empty_groups


def test_nothing_is_left_in_an_inner_optimizer() -> None:
    opt = Wraps([{"params": [nn.Parameter(torch.ones(2))]}, {"params": []}])
    with fill_empty_groups(opt, {1: empty_param(torch.ones(2), torch.float32, has_gradient=True)}):
        opt.step()
        assert opt.inside.state
    assert not opt.inside.state
    opt.state_dict()


class Net(nn.Module):
    """Its second group is so small that most ranks have nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(40, 40), nn.Linear(40, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(torch.tanh(self.large(x)))

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
    return copies(net.parameters()), kept


def sharded(cls: type[Optimizer], way: str, folder: Path) -> Any:
    net, opt = make(cls, way)
    train(net, opt, range(6))
    checkpoint.save(folder / "six", opt, net)
    middle = outcome(net, opt)
    opt.consolidate_state_dict(to=(last := opt.world_size - 1))
    saved = opt.state_dict() if opt.rank == last else None
    train(net, opt, range(6, 10))
    other, fresh = make(cls, way)
    checkpoint.load(folder / "six", fresh, other)
    train(other, fresh, range(6, 10))
    empty = not opt.optim.param_groups[1]["params"]
    return middle, saved, outcome(net, opt), outcome(other, fresh), empty


@pytest.mark.parametrize(
    ("cls", "way", "ranks"),
    [
        (LeavesEmptyOut, "module", 2),
        (TakesTheFirst, "plain", 2),
        (LeavesEmptyOut, "plain", 3),
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
    for half, _, then, resumed, _ in found:
        assert difference([half, then, resumed], [middle, end, end]) is None
    assert difference(found[-1][1], saved) is None


class HasModes(LeavesEmptyOut):
    """Notes its mode only in groups that have parameters."""

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


@on_ranks(3)
def test_train_and_eval_modes_are_those_of_the_unsharded_class() -> None:
    net, opt = make(HasModes, "plain")
    opt.train()
    train(net, opt, range(3))
    for set_mode, trains in (
        (opt.eval, False),
        (opt.train, True),
        (lambda: opt.train(False), False),
        (lambda: opt.train(mode=True), True),
    ):
        set_mode()
        assert [group["trains"] for group in opt.param_groups] == [trains] * 2


@on_ranks(2)
def test_a_group_that_was_refused_is_not_filled() -> None:
    net, opt = make(LeavesEmptyOut, "plain")
    more = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="needs the same on every rank"):
        opt.add_param_group({"params": more.parameters(), "lr": 0.1 + dist.get_rank()})
    train(net, opt, range(2))
    assert str(opt.report()).count("sliced tensors: LeavesEmptyOut updates") == 2
    opt.add_param_group({"params": more.parameters(), "lr": 0.3})
    train(net, opt, range(2, 4))
    assert [group["step"] for group in opt.param_groups] == [4, 4, 2]


class NotesDown(LeavesEmptyOut):
    """Notes the first parameter of each group, once the closure has been evaluated."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        super().step()

    def update(self, group: dict[str, Any]) -> None:
        super().update(group)
        first = group["params"][0]
        # Not in the group: there it would depend on the rank.
        found = str(first.dtype), first.requires_grad, first.grad is not None
        vars(self).setdefault("found", []).append(found)


@pytest.mark.parametrize("way", ["masters", "closure", "quantised"])
@on_ranks(3)
def test_a_placeholder_is_like_the_trained_parameters_of_its_group(way: str) -> None:
    torch.manual_seed(0)
    net = Net().to(torch.bfloat16)
    groups = net.groups()
    if way == "quantised":  # weights that do not train, as adapters are put on
        codes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
        groups[0]["params"].append(codes)
        groups[1]["params"].insert(0, nn.Parameter(codes.clone(), requires_grad=False))
    opt: Any = ZeroRedundancyOptimizer(groups, NotesDown, precision=MixedPrecision())

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = net(torch.ones(1, 40, dtype=torch.bfloat16)).sum()
        loss.backward()
        return loss

    if way != "closure":
        closure()
    opt.step(closure if way == "closure" else None)
    found = opt.optim.found
    assert len(found) == 2
    if way != "quantised":  # where ranks note different parameters
        assert found == [("torch.float32", True, True)] * 2
