"""The consolidated state dict is the unsharded optimizer's, and loads anywhere."""

from __future__ import annotations

import collections
import contextlib
import copy
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import MLP_PROBLEM, consolidated
from on_ranks import on_ranks
from problems import (
    ELEMENT_WISE,
    LAYOUTS,
    Case,
    copies,
    difference,
    differing,
    make_groups,
    make_params,
    train,
)
from ranks import run_ranks
from scenarios import ALL, sharded
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardstep import ZeroRedundancyOptimizer

SHAPES = [(53, 17), (), (7,), (0,), (1,), (64,), (2, 3, 5, 7), (1009,), (40, 33)]
FROZEN = (2, 5)

CASES = [
    *ELEMENT_WISE,
    Case(optim.Adafactor),
    Case(optim.Adafactor, {"foreach": True}),
]
FIRSTS = list({case.optimizer_class: case for case in reversed(CASES)}.values())
"""One set of options per class."""


def problem(case: Case) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    # torch's Adafactor divides by the number of elements, so the empty one must not train there.
    frozen = (*FROZEN, 3) if case.optimizer_class is optim.Adafactor else FROZEN
    params = make_params(SHAPES, frozen=frozen)
    return params, make_groups(params, case.optimizer_class)


def plain(case: Case) -> tuple[list[nn.Parameter], Optimizer]:
    params, groups = problem(case)
    return params, case.optimizer_class(groups, **case.fresh_options())


def zero(case: Case, **kwargs: Any) -> tuple[list[nn.Parameter], ZeroRedundancyOptimizer]:
    params, groups = problem(case)
    opt = ZeroRedundancyOptimizer(groups, case.optimizer_class, **kwargs, **case.fresh_options())
    return params, opt


def by_number(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The dict with its parameters in order; torch has them in the order they were first updated,
    which no reader of a state dict looks at."""
    return {**state_dict, "state": dict(sorted(state_dict["state"].items()))}


def half_a_run(case: Case) -> tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor], Any]:
    """State dict and parameters of the unsharded class after four steps, and after eight."""
    params, opt = plain(case)
    values = train(opt, params, range(4))
    saved = copy.deepcopy(opt.state_dict())
    return saved, values, train(opt, params, range(4, 8)), opt.state_dict()


def goes_on(
    opt: Any, params: list[nn.Parameter], saved: Any, values: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Load, and take the steps of the other half."""
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)
    opt.load_state_dict(saved)
    return train(opt, params, range(4, 8))


@on_ranks(1, pytest.param(2, marks=pytest.mark.slow), 3, 4)
def test_the_consolidated_dict_is_the_unsharded_one_and_only_its_receiver_has_it() -> None:
    world_size = dist.get_world_size()
    for number, case in enumerate(CASES if world_size < 3 else FIRSTS):
        params, unsharded = plain(case)
        before = copy.deepcopy(unsharded.state_dict())
        train(unsharded, params, range(4), missing=case.missing)
        layouts = ["auto"] if case.optimizer_class is optim.Adafactor else LAYOUTS
        for turn, layout in enumerate(layouts, number):
            params, opt = zero(case, layout=layout, parameters_as_bucket_view=turn % 2 == 0)
            to = turn % world_size
            for wanted in (before, unsharded.state_dict()):
                opt.consolidate_state_dict(to=to)
                # Without state there is nothing that a rank could lack.
                if opt.rank == to or (wanted is before and not before["state"]):
                    assert difference(by_number(wanted), opt.state_dict()) is None, (case, layout)
                else:
                    with pytest.raises(RuntimeError, match=rf"\(to={opt.rank}\)"):
                        opt.state_dict()
                if wanted is before:
                    train(opt, params, range(4), missing=case.missing)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_names_of_parameters_are_kept(layout: str) -> str | None:
    dicts = []
    for make in (optim.AdamW, partial(ZeroRedundancyOptimizer, optimizer_class=optim.AdamW)):
        named = [(f"layer.{i}", param) for i, param in enumerate(make_params(SHAPES))]
        groups = [{"params": named[:4]}, {"params": named[4:], "lr": 0.1}]
        opt: Any = make(groups, **({} if make is optim.AdamW else {"layout": layout}))
        train(opt, [param for _, param in named], range(2))
        dicts.append(opt.state_dict() if make is optim.AdamW else consolidated(opt, to=1))
    optim.AdamW(groups).load_state_dict(dicts[1])
    return difference(by_number(dicts[0]), dicts[1])


def _save(folder: str) -> None:
    """Trains and saves, for one set of options per class."""
    for number, case in enumerate(FIRSTS):
        layout = "auto" if case.optimizer_class is optim.Adafactor else LAYOUTS[number % 2]
        params, opt = zero(case, layout=layout)
        train(opt, params, range(4))
        opt.consolidate_state_dict(to=0)
        if opt.rank == 0:
            saved = {"optimizer": opt.state_dict(), "params": copies(params)}
            torch.save(saved, f"{folder}/{opt.world_size}-{number}.pt")


@pytest.mark.slow
@on_ranks(1, 2, 3, 4)
def test_a_run_goes_on_at_any_world_size_from_any_other_and_from_torch(folder: Path) -> None:
    for number, case in enumerate(FIRSTS):
        saved, values, expected, expected_state = half_a_run(case)
        for turn, source in enumerate(("torch", 1, 2, 3, 4)):
            if source != "torch":
                # Plain tensors and numbers: nothing that needs unpickling of code.
                loaded = torch.load(f"{folder}/{source}-{number}.pt", weights_only=True)
                saved, values = loaded["optimizer"], loaded["params"]
            params, again = plain(case)
            # torch keeps what it is given.
            got = goes_on(again, params, copy.deepcopy(saved), values)
            assert differing(expected, got) == [], f"{case}: from {source} into the plain class"
            layout = "auto" if case.optimizer_class is optim.Adafactor else LAYOUTS[turn % 2]
            params, opt = zero(case, layout=layout, parameters_as_bucket_view=number % 2 == 0)
            got = goes_on(opt, params, saved, values)
            assert differing(expected, got) == [], f"{case}: from {source}, layout {layout}"
            opt.consolidate_state_dict()
            if opt.rank == 0:
                assert difference(by_number(expected_state), opt.state_dict()) is None, case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of runs on one to four ranks."""
    folder = tmp_path_factory.mktemp("saved")
    for world_size in (1, 2, 3, 4):
        run_ranks(_save, world_size, str(folder))
    return folder


def _storages(value: Any) -> set[int]:
    return {
        item.untyped_storage().data_ptr()
        for item in tree_leaves(value)
        if isinstance(item, torch.Tensor) and item.numel()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_the_callers_dict_is_the_callers(layout: str) -> None:
    for case in (Case(optim.Adam, {"lr": torch.tensor(0.003)}), Case(optim.SGD, {"momentum": 0.9})):
        given = half_a_run(case)[0]
        before = copy.deepcopy(given)
        params, opt = zero(case, layout=layout)
        opt.load_state_dict(given)
        train(opt, params, range(3, 6))
        opt.consolidate_state_dict(to=1)
        assert difference(before, given) is None
        own = _storages([opt.optim.state_dict(), opt.param_groups])
        assert not _storages(given) & own
        got = opt.state_dict() if opt.rank == 1 else {}
        before = copy.deepcopy(got)
        assert not _storages(got) & (own | _storages(given))
        if opt.rank == 1:
            other = opt.state_dict()
            other["param_groups"][0]["lr"] = 5.0
            other["state"].clear()
            assert difference(before, opt.state_dict()) is None
        train(opt, params, range(6, 8))
        assert difference(before, got) is None


class Counting(optim.SGD):
    """Counts steps in a tensor of its state that belongs to no parameter, and in one beside it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.total = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        self.state.setdefault("all", {"count": torch.zeros(())})["count"] += 1
        self.total += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total = state_dict["total"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "total"})


def test_what_belongs_to_no_parameter_is_copied_too() -> None:
    params = make_params(SHAPES)
    opt = ZeroRedundancyOptimizer(params, Counting, layout="sliced")
    train(opt, params, range(2))
    saved = opt.state_dict()
    before = copy.deepcopy(saved)
    train(opt, params, range(2, 4))
    assert difference(before, saved) is None
    opt.load_state_dict(saved)
    train(opt, params, range(4, 6))
    assert difference(before, saved) is None
    assert opt.state_dict()["state"]["all"]["count"] == opt.state_dict()["total"] == 4


@on_ranks(1, 2)
def test_hooks_of_the_outer_optimizer_fire() -> None:
    params, opt = zero(Case(optim.Adam))
    calls: list[Any] = []

    def saved(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append(("saved", optimizer is opt))
        return {**state_dict, "epoch": 7}

    def loading(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append((f"loading epoch {state_dict['epoch']}", optimizer is opt))
        groups = [{**group, "lr": 0.5} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    opt.register_state_dict_pre_hook(lambda each: calls.append(("saving", each is opt)))
    opt.register_state_dict_post_hook(saved)
    opt.register_load_state_dict_pre_hook(loading)
    opt.register_load_state_dict_post_hook(
        lambda each: calls.append((f"loaded lr {each.param_groups[0]['lr']}", each is opt))
    )
    train(opt, params, range(2))
    for to in range(opt.world_size):
        opt.consolidate_state_dict(to=to)
        if opt.rank == to:
            opt.load_state_dict(opt.state_dict())
    expected = ("saving", "saved", "loading epoch 7", "loaded lr 0.5")
    assert calls == [(call, True) for call in expected]


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_dicts_from_when_step_was_a_number_load(layout: str) -> None:
    for optimizer_class in (optim.Adam, optim.RMSprop, optim.Adamax, optim.NAdam, optim.ASGD):
        case = Case(optimizer_class)
        legacy, values, expected, _ = half_a_run(case)
        for state in legacy["state"].values():
            for key in state.keys() & {"step", "mu_product", "eta", "mu"}:
                state[key] = state[key].item()
        params, opt = zero(case, layout=layout)
        assert differing(expected, goes_on(opt, params, legacy, values)) == [], case


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_dict_that_does_not_fit_is_refused_and_changes_nothing(layout: str) -> list[int]:
    """Every wrong dict raises on each rank, and training goes on as if it had not been tried."""
    case = Case(optim.Adam)
    params, opt = zero(case, layout=layout)
    train(opt, params, range(4))
    good = consolidated(opt)
    group_less = {**good, "param_groups": good["param_groups"][:-1]}
    param_less, other_shape = copy.deepcopy(good), copy.deepcopy(good)
    param_less["param_groups"][0]["params"].pop()
    number = next(n for n, state in good["state"].items() if state["exp_avg"].numel() > 1)
    other_shape["state"][number]["exp_avg"] = torch.zeros(3, 3, 3)
    for bad in (group_less, param_less, other_shape):
        with pytest.raises(ValueError, match=r"loaded state dict|another model"):
            opt.load_state_dict(bad)
    return differing(half_a_run(case)[2], train(opt, params, range(4, 8)))


@on_ranks(2)
def test_the_dict_of_torchs_own_zero_redundancy_optimizer_loads() -> None:
    for case in FIRSTS:
        if case.optimizer_class is optim.Adagrad:
            continue  # upstream cannot consolidate the state of parameters that never trained
        _, values, expected, _ = half_a_run(case)
        params, groups = problem(case)
        upstream = TorchZero(groups, case.optimizer_class, **case.fresh_options())
        train(upstream, params, range(4))
        saved = consolidated(upstream)
        params, opt = zero(case)
        assert differing(expected, goes_on(opt, params, saved, values)) == [], case


@contextlib.contextmanager
def _no_pickle() -> Iterator[None]:
    refuse = mock.Mock(side_effect=AssertionError("pickle was used"))
    with contextlib.ExitStack() as stack:
        for module, names in (
            (pickle, "dump dumps load loads Pickler Unpickler"),
            (torch, "save load"),
            (dist, "all_gather_object broadcast_object_list gather_object send_object_list"),
        ):
            for name in names.split():
                stack.enter_context(mock.patch.object(module, name, refuse))
        yield


@on_ranks(2)
def test_no_pickle_is_on_the_wire() -> None:
    params, groups = problem(Case(optim.Adam))
    with _no_pickle():
        with pytest.raises(AssertionError, match="pickle was used"):
            dist.broadcast_object_list([1])
        opt = ZeroRedundancyOptimizer(groups, optim.Adam)
        train(opt, params, range(2))
        opt.consolidate_state_dict(to=1)
        if opt.rank == 1:
            opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(optim.RMSprop, {"momentum": 0.9, "centered": True}),
        Case(optim.Adam, {"fused": True}),  # its step stays a float tensor on the CPU
    ],
    ids=str,
)
@on_ranks(2)
def test_saving_and_loading_at_every_step_changes_nothing(case: Case, layout: str) -> None:
    params, unsharded = plain(case)
    train(unsharded, params, range(6))
    ours, opt = zero(case, layout=layout)
    for step in range(6):
        train(opt, ours, range(step, step + 1))
        opt.load_state_dict(consolidated(opt, to=step % opt.world_size))
    assert difference(by_number(unsharded.state_dict()), consolidated(opt)) is None
    assert differing(params, ours) == []


class Unreadable(collections.UserDict[str, Any]):
    """A mapping that raises when it is read."""

    def items(self) -> Any:
        raise OSError("unreadable 'object'")


class Unsendable(Optimizer):
    """Keeps something in its state that cannot be sent, on one rank."""

    shardstep_layout = "whole"

    def __init__(self, params: Any, kind: Any = object) -> None:
        super().__init__(params, {"kind": kind})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["object"] = group["kind"]() if dist.get_rank() == 1 else 1


@pytest.mark.parametrize("kind", [object, Unreadable])
@on_ranks(2, raises=RuntimeError, match="cannot be moved.* on rank 1: .*'object'")
def test_state_that_cannot_be_sent_is_refused_on_every_rank(kind: Any) -> None:
    params = make_params([(5,), (6,)], frozen=())
    opt = ZeroRedundancyOptimizer(params, Unsendable, layout="whole", kind=kind)
    opt.step()
    opt.consolidate_state_dict()


@on_ranks(2)
def test_no_mode_gives_out_state_from_before_a_step_or_a_load() -> None:
    for mode in ALL:
        setup = sharded(mode, MLP_PROBLEM.fresh())
        assert not setup.opt.state_dict()["state"], mode
        for step in (1, 2):
            setup.backward(step)
            setup.finish()
            what = "holds only its share" if step == 1 else "before it last changed"
            with pytest.raises(RuntimeError, match=rf"{what}.*consolidate_state_dict\(to="):
                setup.opt.state_dict()
            setup.opt.consolidate_state_dict(to="all")
            states = setup.opt.state_dict()["state"].values()
            assert {int(state["step"]) for state in states} == {step}, mode
        setup.opt.load_state_dict(copy.deepcopy(setup.opt.state_dict()))
        with pytest.raises(RuntimeError, match="before it last changed"):
            setup.opt.state_dict()


@on_ranks(2)
def test_a_look_at_state_that_is_not_there_does_no_harm() -> None:
    params = make_params([(30, 30), (30,)])
    opt = ZeroRedundancyOptimizer(params, optim.Adam, layout="sliced", bucket_bytes=1)
    params[1].grad = torch.ones(30)
    opt.step()
    if opt.rank == 0:
        for group in opt.optim.param_groups:
            for piece in group["params"]:
                opt.optim.state[piece].get("step")
    found = consolidated(opt)["state"]
    assert not found.get(0)
    assert found[1]["step"] == 1


@on_ranks(2)
def test_names_in_a_loaded_dict_are_not_cut_to_the_share_of_a_rank() -> None:
    module = MLP_PROBLEM.fresh()
    saved = optim.AdamW(module.named_parameters()).state_dict()
    for named in (False, True):
        params = module.named_parameters() if named else module.parameters()
        opt = ZeroRedundancyOptimizer(list(params), optim.AdamW, bucket_bytes=1)
        opt.load_state_dict(saved)
        opt.consolidate_state_dict(to="all")
        found = opt.state_dict()["param_groups"][0].get("param_names")
        assert found == (saved["param_groups"][0]["param_names"] if named else None)
        opt.load_state_dict(opt.state_dict())
        next(module.parameters()).requires_grad_(False)
        opt.step()
        next(module.parameters()).requires_grad_(True)
