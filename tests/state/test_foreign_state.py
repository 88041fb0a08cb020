"""State of any structure is discovered, never assumed: it is put together, loaded and resharded."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
from problems import OneByOne, copies, difference, differing, make_params, train
from ranks import raises_on_every_rank, run_ranks

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.state.tree import encode, leaves

SHAPES = [(31, 17), (40, 8), (9,), (5, 5), (2, 3, 4), (70, 65)]


class Foreign(OneByOne):
    """A class with parameters of its own."""

    shapes: Sequence[tuple[int, ...]] = SHAPES
    dtype = torch.float32

    @classmethod
    def make_params(cls) -> list[torch.nn.Parameter]:
        return make_params(cls.shapes, frozen=(), dtypes=(cls.dtype,))


class Preconditions(Foreign):
    """A Shampoo in small: one matrix per dimension, in lists in dicts; roots at even steps."""

    def update(self, p: Any, state: Any, lr: float) -> None:
        grad = p.grad
        if not state:
            state["step"] = 0
            state["factors"] = {"left": [torch.eye(n) for n in p.shape], "roots": None}
        state["step"] += 1
        factors = state["factors"]
        for dim, factor in enumerate(factors["left"]):
            unfolded = grad.movedim(dim, 0).reshape(len(factor), -1)
            factor.addmm_(unfolded, unfolded.mT)
        if state["step"] % 2 == 0:
            factors["roots"] = [torch.linalg.inv(f + torch.eye(len(f))) for f in factors["left"]]
        for dim, root in enumerate(factors["roots"] or ()):
            grad = torch.tensordot(grad, root, dims=([dim], [0])).movedim(-1, dim)
        p.sub_(grad, alpha=lr)


class Quantises(Foreign):
    """An 8-bit state in small: codes by element, scales by block of 64; large tensors only."""

    def update(self, p: Any, state: Any, lr: float) -> None:
        grad = p.grad
        if p.numel() < 4096:
            state["moment"] = state.get("moment", torch.zeros_like(p)) * 0.9 + grad
            p.sub_(state["moment"], alpha=lr)
            return
        room = -(-p.numel() // 64) * 64
        if not state:
            state["codes"] = torch.zeros(room, dtype=torch.int8)
            state["scales"] = torch.zeros(room // 64)
        moment = (state["codes"].view(-1, 64) * state["scales"][:, None]).view(-1)[: p.numel()]
        moment = moment * 0.9 + grad.reshape(-1)
        p.sub_(moment.view_as(p), alpha=lr)
        padded = torch.zeros(room)
        padded[: p.numel()] = moment
        blocks = padded.view(-1, 64)
        state["scales"] = blocks.abs().amax(1) / 127
        codes = blocks / state["scales"].clamp_min(1e-12)[:, None]
        state["codes"] = codes.round().to(torch.int8).view(-1)


class Coded(torch.Tensor):
    """A tensor kept as 8-bit codes and a scale; it can be moved and copied, and no more."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, note: tuple[Any, ...]) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, note: tuple[Any, ...]) -> None:
        self.codes, self.scale, self.note = codes, scale, note

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], (*self.note, self.shape)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Coded:
        assert tuple(context[-1]) == tuple(size)
        return cls(inner["codes"], inner["scale"], tuple(context[:-1]))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, (self, *_) = torch.ops.aten, args
        if func is aten._to_copy.default:
            return cls(self.codes, self.scale, self.note)
        raise NotImplementedError(f"{func}")

    def __deepcopy__(self, memo: Any) -> Coded:
        return Coded(self.codes.clone(), self.scale.clone(), self.note)


class LowBit(Foreign):
    """Keeps its moments coded, with one scale for a tensor."""

    def update(self, p: Any, state: Any, lr: float) -> None:
        moment = p.grad.clone()
        if "moment" in state:
            moment += 0.9 * state["moment"].codes * state["moment"].scale
        p.sub_(moment, alpha=lr)
        scale = moment.abs().max().reshape(1) / 127
        note = ("by", 8, p.dtype, p.shape)
        state["moment"] = Coded((moment / scale).round().to(torch.int8), scale, note)


class Remembers(Foreign):
    """Old gradients in a queue, momenta by their factor, and a counter of its own."""

    total = 0

    def step(self, closure: Any = None) -> None:
        self.total += 1
        super().step(closure)

    def update(self, p: Any, state: Any, lr: float) -> None:
        grad = p.grad
        if not state:
            state["queue"] = deque([grad.clone()], maxlen=3)
            state["momenta"] = {factor: torch.zeros_like(p) for factor in (0.0, 0.9)}
        state["queue"].append(grad.clone())
        for factor, moment in state["momenta"].items():
            moment.mul_(factor).add_(state["queue"][0])
            p.sub_(moment, alpha=lr / self.total)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.total = state_dict["total"]
        for state in self.state.values():
            # The base class forgets how long they may become.
            state["queue"] = deque(state["queue"], maxlen=3)


class AllKinds(Foreign):
    """State of all kinds, of which torch's own loading would cast or lose much."""

    shapes = (*SHAPES, (), (0,), (1,))
    dtype = torch.bfloat16

    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1  # belongs to no parameter
        super().step()

    def update(self, p: Any, state: Any, lr: float) -> None:
        grad = p.grad
        if not state:
            state["moment"] = torch.zeros_like(p, dtype=torch.float32)
            state["nested"] = {
                "pair": (torch.zeros_like(p, dtype=torch.float64), 3),
                "list": [torch.ones_like(p, dtype=torch.int8), 1.5, {"none": None}, "listed"],
                2: {"deep": torch.zeros_like(p, dtype=torch.bool)},
            }
            state |= {"calls": 0, "fast": True, "rate": 0.5}
            state["word"] = "bare"  # torch's own loading takes it for a sequence
            state["counter"] = torch.tensor(0, dtype=torch.int64)
        state["calls"] += 1
        state["words"] = [f"call {state['calls']}"]
        state["counter"] += 1
        state["fast"] = state["calls"] % 2 == 0
        state["rate"] *= 0.9
        state["moment"].mul_(0.9).add_(grad)
        double, _ = state["nested"]["pair"]
        double.add_(grad).add_(1e-9)
        state["nested"]["list"][0].add_(1)
        state["nested"][2]["deep"].copy_(grad > 0)
        mixed = state["moment"] + double.float() * state["rate"]
        p.sub_((lr * mixed).to(p.dtype))


class Stubborn(AllKinds):
    """Reads its state dicts in a way of its own."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["moment"] = state["moment"].double() + 1
            state["loaded by"] = "Stubborn"


def _round_trip(cls: Any, saved: Any, values: Any) -> tuple[str, Any, list[torch.Tensor]]:
    params = cls.make_params()
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


def plain(value: Any) -> Any:
    """With states in the order of the parameters, and coded tensors as what they are made of."""
    if isinstance(value, Coded):
        return [value.codes, value.scale, value.note]
    if isinstance(value, dict):
        by_number = sorted(value, key=lambda key: key if isinstance(key, int) else -1)
        return {key: plain(value[key]) for key in by_number}
    return value


@pytest.mark.parametrize(
    ("cls", "layout"),
    [
        (Preconditions, "whole"),
        (Quantises, "whole"),
        (LowBit, "whole"),
        (Remembers, "sliced"),
        (AllKinds, "sliced"),
    ],
)
def test_foreign_state_is_kept(cls: Any, layout: str) -> None:
    params = cls.make_params()
    unsharded = cls(params)
    train(unsharded, params, range(5))
    middle = copy.deepcopy(unsharded.state_dict())
    (chosen, saved, values), *_ = run_ranks(_round_trip, 3, cls, None, None)
    assert chosen == layout
    assert differing(copies(params), values) == []
    assert difference(plain(middle), plain(saved)) is None
    params[0].requires_grad_(False)
    train(unsharded, params, range(5, 6))
    params[0].requires_grad_(True)
    train(unsharded, params, range(6, 9))
    (_, saved, values), *_ = run_ranks(_round_trip, 2, cls, middle, values)
    assert differing(copies(params), values) == []
    assert difference(plain(unsharded.state_dict()), plain(saved)) is None


@on_ranks(2)
def test_a_class_that_loads_in_its_own_way_is_let() -> None:
    params = AllKinds.make_params()
    unsharded = AllKinds(params)
    train(unsharded, params, range(3))
    opt = ZeroRedundancyOptimizer(params, Stubborn)
    opt.load_state_dict(unsharded.state_dict())
    states = [opt.optim.state[piece] for g in opt.optim.param_groups for piece in g["params"]]
    found = {(state["loaded by"], state["moment"].dtype) for state in states}
    assert found == {("Stubborn", torch.float64)}


def _through_files(folder: Path, cls: Any, how: str, steps: int | None = None) -> Any:
    """Take steps and save, or load; return all state."""
    params = cls.make_params()
    opt = ZeroRedundancyOptimizer(params, cls, bucket_bytes=1)
    saving = steps is not None
    train(opt, params, range(steps or 0))
    with mock.patch("shardstep.checkpoint.read.WRAPPING_PACKAGES", (Coded.__module__,)):
        if how == "dcp":
            act = dcp.save if saving else dcp.load
            act({"optim": checkpoint.Sharded(opt)}, checkpoint_id=folder)
        else:
            (checkpoint.save if saving else checkpoint.load)(folder, opt)
    opt.consolidate_state_dict()
    return opt.state_dict()["state"] if opt.rank == 0 else None


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("how", ["ours", "dcp"])
@pytest.mark.parametrize("cls", [Quantises, LowBit, AllKinds])
def test_foreign_state_goes_through_files(cls: Any, how: str, steps: int, tmp_path: Path) -> None:
    before, *_ = run_ranks(_through_files, 2, tmp_path / "saved", cls, how, steps)
    after, *_ = run_ranks(_through_files, 3, tmp_path / "saved", cls, how)
    assert bool(before) is bool(steps)
    assert difference(plain(before), plain(after)) is None


def _refuses(folder: Path, cls: Any, known: str) -> None:
    opt = ZeroRedundancyOptimizer(cls.make_params(), cls, bucket_bytes=1)
    with mock.patch("shardstep.checkpoint.read.WRAPPING_PACKAGES", (known,)):
        checkpoint.load(folder, opt, strict=False)


def test_a_file_neither_chooses_the_class_that_is_made_nor_has_it_cut(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run_ranks(_through_files, 2, folder, LowBit, "ours", 5)
    for cls, known, match in (
        (LowBit, "torchao", "Coded.*not made"),
        (Remembers, Coded.__module__, "Coded.*be cut"),
    ):
        args = (folder, cls, known)
        raises_on_every_rank(_refuses, 2, checkpoint.CheckpointError, *args, match=match)


def _loads_into(cls: Any, saved: Any) -> None:
    ZeroRedundancyOptimizer(LowBit.make_params(), cls, lr=0.1).load_state_dict(saved)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, Remembers])
def test_coded_state_is_not_cut_for_a_class_that_knows_no_codes(cls: Any) -> None:
    params = LowBit.make_params()
    unsharded = LowBit(params)
    train(unsharded, params, range(5))
    raises_on_every_rank(
        _loads_into, 2, ValueError, cls, unsharded.state_dict(), match="'moment' of.* is a Coded"
    )


def test_paged_memory_is_the_devices_as_well() -> None:
    paged: Any = torch.ones(3)
    assert leaves(encode(paged)[0])[0].on_cpu
    paged.is_paged = True
    assert not leaves(encode(paged)[0])[0].on_cpu
