"""Per-parameter state outside `optimizer.state` is never lost silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import problems
import pytest
import torch
from on_ranks import on_ranks
from problems import differing, train
from ranks import each_raises_on_every_rank
from torch.optim import SGD, Optimizer

from shardstep import ZeroRedundancyOptimizer

SHAPES = [(33, 22), (33, 22), (70,), (40, 40), (5, 64)]


class UnderParameters(SGD):
    """Keeps its moments in an attribute, under the parameters."""

    key: Callable[[torch.Tensor], Any] = staticmethod(lambda param: param)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        moments = self.__dict__.setdefault("moments", {})
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    before = moments.get(self.key(p), torch.zeros_like(p))
                    moments[self.key(p)] = before * 0.9 + p.grad
                    p.sub_(moments[self.key(p)], alpha=group["lr"])


class UnderIdentities(UnderParameters):
    key = staticmethod(id)


class InOrder(SGD):
    """Keeps them in a list, in the order of the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        if not hasattr(self, "moments"):
            self.moments = [torch.zeros_like(p) for p in params]
        for p, moment in zip(params, self.moments, strict=True):
            if p.grad is not None:
                moment.mul_(0.9).add_(p.grad)
                p.sub_(moment, alpha=self.param_groups[0]["lr"])


class Around(Optimizer):
    """Has another optimizer step for it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = SGD(self.param_groups, lr=lr, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1


class ThroughViews(SGD):
    """Writes to its parameters through views that it keeps in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("view", p.detach()).sub_(p.grad, alpha=group["lr"])


class ThroughEarlyViews(SGD):
    """The same, made from the start."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.views = {"all": [p.detach() for g in self.param_groups for p in g["params"]]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, view in zip(self.param_groups[0]["params"], self.views["all"], strict=True):
            if p.grad is not None:
                view.sub_(p.grad, alpha=self.param_groups[0]["lr"])


HIDING = [UnderParameters, UnderIdentities, InOrder, Around, ThroughViews, ThroughEarlyViews]


def make_params() -> list[torch.nn.Parameter]:
    return problems.make_params(SHAPES, frozen=())


def against_unsharded(cls: Any, frozen: range, layout: str = "auto") -> list[int]:
    """The parameters that differ from the unsharded class after six steps."""
    mirror, params = make_params(), make_params()
    for each, opt in (
        (mirror, cls(mirror, lr=0.1)),
        (params, ZeroRedundancyOptimizer(params, cls, layout=layout, lr=0.1)),
    ):
        for step in range(6):
            each[3].requires_grad_(step not in frozen)
            train(opt, each, range(step, step + 1))
    return differing(mirror, params)


def after_adding_a_group(cls: Any) -> None:
    first, *params = make_params()
    opt = ZeroRedundancyOptimizer(params, cls, lr=0.1)
    train(opt, params, range(3))
    opt.add_param_group({"params": [first]})


@on_ranks(2)
def test_classes_with_state_elsewhere_have_the_unsharded_numbers() -> None:
    for cls in HIDING:
        assert against_unsharded(cls, range(0)) == [], cls


def test_state_elsewhere_is_not_left_behind_when_the_plan_changes() -> None:
    match = "following a change of the parameters would lose what .* keeps|failed on rank"
    runs = [(cls, range(3, 6), layout) for cls in HIDING for layout in ("sliced", "whole")]
    cases: list[Any] = [(against_unsharded, RuntimeError, match, *run) for run in runs]
    match = "add_param_group would lose what UnderParameters keeps .*'moments'"
    cases.append((after_adding_a_group, RuntimeError, match, UnderParameters))
    each_raises_on_every_rank(2, cases)


@on_ranks(2, raises=ValueError, match="ThroughEarlyViews keeps a view")
def test_views_from_before_parameters_move_into_buckets_are_refused() -> None:
    ZeroRedundancyOptimizer(
        make_params(), ThroughEarlyViews, parameters_as_bucket_view=True, lr=0.1
    )


class Innocent(SGD):
    """Has other tensors, but not one for each parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.table = {"map": torch.zeros(70), "other": torch.zeros(70)}
        self.count = torch.zeros(())
        self.sizes = [p.numel() for group in self.param_groups for p in group["params"]]


@on_ranks(2)
def test_other_attributes_do_no_harm() -> list[int]:
    return against_unsharded(Innocent, range(3, 6))


class Listing(SGD):
    """Keeps the parameters themselves, which stay what they are when their data moves."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.every = [param for group in self.param_groups for param in group["params"]]


@pytest.mark.parametrize("second", [{}, {"optimizer_class": SGD, "lr": 0.1}])
def test_parameters_that_are_plain_tensors_are_not_taken_for_views_of_themselves(
    second: dict[str, Any],
) -> None:
    tensors = [torch.ones(4, 4, requires_grad=True) for _ in range(2)]
    groups = [{"params": tensors[:1]}, {"params": tensors[1:], **second}]
    opt = ZeroRedundancyOptimizer(groups, Listing, parameters_as_bucket_view=True, lr=0.1)
    sum(tensor.sum() for tensor in tensors).backward()  # type: ignore[union-attr]
    opt.step()
    for tensor in tensors:
        torch.testing.assert_close(tensor, torch.full((4, 4), 0.9), rtol=0, atol=0)
