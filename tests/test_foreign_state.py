"""State of any structure is discovered, never assumed: it is put together, loaded and resharded."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from problems import copies, difference, differing, make_params, set_gradients
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer

SHAPES = [(31, 17), (40, 8), (9,), (5, 5), (2, 3, 4), (70, 65)]


class Preconditions(Optimizer):
    """A Shampoo in small: one matrix per dimension, in lists in dicts; roots now and then."""

    def __init__(self, params: Any, lr: float = 0.05, every: int = 2) -> None:
        super().__init__(params, {"lr": lr, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group)

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["factors"] = {"left": [torch.eye(n) for n in p.shape], "roots": None}
        state["step"] += 1
        factors = state["factors"]
        for dim, factor in enumerate(factors["left"]):
            unfolded = grad.movedim(dim, 0).reshape(len(factor), -1)
            factor.addmm_(unfolded, unfolded.mT)
        if state["step"] % group["every"] == 0:
            factors["roots"] = [torch.linalg.inv(f + torch.eye(len(f))) for f in factors["left"]]
        for dim, root in enumerate(factors["roots"] or ()):
            grad = torch.tensordot(grad, root, dims=([dim], [0])).movedim(-1, dim)
        p.sub_(grad, alpha=group["lr"])


class Quantises(Optimizer):
    """An 8-bit state in small: codes by element, scales by block of 64; large tensors only."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group)

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> None:
        state = self.state[p]
        if p.numel() < 4096:
            state["moment"] = state.get("moment", torch.zeros_like(p)) * 0.9 + grad
            p.sub_(state["moment"], alpha=group["lr"])
            return
        room = -(-p.numel() // 64) * 64
        if not state:
            state["codes"] = torch.zeros(room, dtype=torch.int8)
            state["scales"] = torch.zeros(room // 64)
        moment = (state["codes"].view(-1, 64) * state["scales"][:, None]).view(-1)[: p.numel()]
        moment = moment * 0.9 + grad.reshape(-1)
        p.sub_(moment.view_as(p), alpha=group["lr"])
        padded = torch.zeros(room)
        padded[: p.numel()] = moment
        blocks = padded.view(-1, 64)
        state["scales"] = blocks.abs().amax(1) / 127
        codes = blocks / state["scales"].clamp_min(1e-12)[:, None]
        state["codes"] = codes.round().to(torch.int8).view(-1)


class Remembers(Optimizer):
    """Old gradients in a queue, momenta by their factor, and a counter of its own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.total = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.total += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["queue"] = deque([p.grad.clone()], maxlen=3)
                    state["momenta"] = {factor: torch.zeros_like(p) for factor in (0.0, 0.9)}
                state["queue"].append(p.grad.clone())
                for factor, moment in state["momenta"].items():
                    moment.mul_(factor).add_(state["queue"][0])
                    p.sub_(moment, alpha=group["lr"] / self.total)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.total = state_dict["total"]
        for state in self.state.values():
            # The base class forgets how long they may become.
            state["queue"] = deque(state["queue"], maxlen=3)


def train(opt: Any, params: list[torch.nn.Parameter], steps: range) -> list[torch.Tensor]:
    for step in steps:
        set_gradients(params, step)
        opt.step()
    return copies(params)


def _round_trip(cls: Any, saved: Any, values: Any) -> tuple[str, Any, list[torch.Tensor]]:
    params = make_params(SHAPES, frozen=())
    opt = ZeroRedundancyOptimizer(params, cls, bucket_bytes=1)
    if saved is None:
        train(opt, params, range(5))
    else:
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)
        opt.load_state_dict(saved)
        # A parameter that is frozen moves, with its state, and moves back.
        params[0].requires_grad_(False)
        train(opt, params, range(5, 6))
        params[0].requires_grad_(True)
        train(opt, params, range(6, 9))
    opt.consolidate_state_dict()
    return opt.plan.layout, opt.state_dict() if opt.rank == 0 else None, copies(params)


def plain(state_dict: Any) -> Any:
    """With the entries of the state in the order of the parameters."""
    return {**state_dict, "state": dict(sorted(state_dict["state"].items()))}


@pytest.mark.parametrize(
    ("cls", "layout"), [(Preconditions, "whole"), (Quantises, "whole"), (Remembers, "sliced")]
)
def test_foreign_state_is_kept(cls: Any, layout: str) -> None:
    params = make_params(SHAPES, frozen=())
    unsharded = cls(params)
    train(unsharded, params, range(5))
    middle = copy.deepcopy(unsharded.state_dict())
    (chosen, saved, values), *_ = run_ranks(_round_trip, 3, cls, None, None)
    assert chosen == layout
    assert differing(copies(params), values) == []
    assert difference(plain(middle), saved) is None
    params[0].requires_grad_(False)
    train(unsharded, params, range(5, 6))
    params[0].requires_grad_(True)
    train(unsharded, params, range(6, 9))
    (_, saved, values), *_ = run_ranks(_round_trip, 2, cls, middle, values)
    assert differing(copies(params), values) == []
    assert difference(plain(unsharded.state_dict()), saved) is None
