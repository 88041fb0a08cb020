"""Calls that cannot be done: every rank raises within seconds, and nothing has changed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bad import SECONDS, SGD, Adam, build, p, sparse
from models import from_rank
from on_ranks import on_ranks
from ranks import each_raises_on_every_rank
from torch.distributed.optim import ZeroRedundancyOptimizer as Upstream
from torch.nn.parallel import DistributedDataParallel as DDP

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import SoloComm
from shardstep.comm.consensus import run_on_all_ranks

# -------------------------------------------------------------------------- adding a group

#: The group, its error, and what the message names.
BAD_GROUPS: dict[str, tuple[Callable[[list[Any]], dict[str, Any]], type[Exception], str]] = {
    "something that is no tensor": (lambda params: {"params": [p(4), 3]}, TypeError, "int"),
    "a sparse parameter": (lambda params: {"params": [sparse()]}, ValueError, "sparse"),
    "a parameter it has already": (lambda params: {"params": [params[0]]}, ValueError, "parameter"),
    "memory it has already": (
        lambda params: {"params": [torch.nn.Parameter(params[0].detach())]},
        *(ValueError, "share memory"),
    ),
    "a set, which has no order": (lambda params: {"params": {p(4), p(5)}}, TypeError, "set"),
    "a class of its own": (
        lambda params: {"params": [p(4)], "optimizer_class": SGD},
        *(ValueError, "name the class of a group from the start"),
    ),
}


def take_step(params: list[torch.Tensor], optimizer: torch.optim.Optimizer, step: int) -> None:
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + index)
        param.grad = torch.rand(param.shape, generator=generator)
    optimizer.step()


def add_bad_group(case: str, where: str, view: bool) -> tuple[str, str]:
    """Adds a bad group, then goes on as if nothing had been; returns the error."""
    params, plain = ([p(30, 30), p(9)] for _ in range(2))
    opt = build(params, Adam, parameters_as_bucket_view=view, lr=0.1)
    reference = Adam(plain, lr=0.1)
    take_step(params, opt, 0)
    take_step(plain, reference, 0)
    before = opt.plan.fingerprint, [param.data_ptr() for param in params]
    rank = dist.get_rank()
    group: dict[str, Any] = {"params": [p(4)]}
    if case == "another shape":
        group = {"params": [p(4 + rank)]}
    elif where == "everywhere" or rank == 1:
        group = BAD_GROUPS[case][0](params)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r".") as raised:
        opt.add_param_group(group)
    assert (opt.plan.fingerprint, [param.data_ptr() for param in params]) == before
    assert [len(group["params"]) for group in opt.param_groups] == [2]
    assert len(opt.optim.param_groups) == 1
    # The next step, a good group and the step after that all work, with the right numbers.
    for optimizer, held in ((opt, params), (reference, plain)):
        take_step(held, optimizer, 1)
        held.append(p(200))
        optimizer.add_param_group({"params": [held[-1]], "lr": 0.5})
        take_step(held, optimizer, 2)
    for param, expected in zip(params, plain, strict=True):
        assert torch.equal(param, expected)
    return raised.type.__name__, str(raised.value)


@pytest.mark.parametrize("where", ["everywhere", "on rank 1"])
@on_ranks(2)
def test_a_bad_group_is_refused_on_every_rank_and_changes_nothing(where: str) -> None:
    for case, view in itertools.product(BAD_GROUPS, (False, True)):
        kind, message = add_bad_group(case, where, view)
        if where == "everywhere" or dist.get_rank() == 1:
            assert kind == BAD_GROUPS[case][1].__name__
            assert BAD_GROUPS[case][2] in message
        else:
            assert kind == "RuntimeError"
            assert "add_param_group failed on rank 1" in message


@on_ranks(2, timeout=SECONDS)
def test_groups_that_differ_between_ranks_are_refused_and_change_nothing() -> None:
    kind, message = add_bad_group("another shape", "", False)
    assert kind == "ValueError"
    assert "rank 0 has 'param 2' (shape (4,)" in message
    assert "rank 1 has 'param 2' (shape (5,)" in message


# ------------------------------------------------------------------------------- the state


def stepped() -> ZeroRedundancyOptimizer:
    params = [p(30, 30), p(9)]
    opt = build(params, Adam, lr=0.1)
    take_step(params, opt, 0)
    return opt


def consolidate(to: list[int]) -> None:
    opt = stepped()
    try:
        opt.consolidate_state_dict(to=to[dist.get_rank()])
    except Exception:
        opt.consolidate_state_dict(to=0)  # nobody is left waiting: the next call works
        assert dist.get_rank() or len(opt.state_dict()["state"]) == 2
        raise


def test_consolidating_to_a_rank_that_is_not_there_or_to_different_ranks_is_refused() -> None:
    missing = "to={} is not a rank of this group of 2 ranks"
    differ = "consolidate_state_dict .*rank 0 has to=0 where rank 1 has to=1"
    cases: list[tuple[Any, ...]] = [
        *((consolidate, ValueError, missing.format(to), [to, to]) for to in (7, 2, -1)),
        (consolidate, ValueError, differ, [0, 1]),
        (consolidate, (ValueError, RuntimeError), "to=7", [0, 7]),
    ]
    *_, seen = each_raises_on_every_rank(2, cases)
    assert [kind for kind, _ in seen] == ["RuntimeError", "ValueError"]
    assert "failed on rank 1" in seen[0][1]


@pytest.mark.parametrize("consolidated_to", [None, 1])
@on_ranks(2)
def test_state_dict_without_consolidating_says_what_to_call_and_where(
    consolidated_to: int | None,
) -> None:
    """As upstream raises; rank `consolidated_to` gets the state."""
    params, rank = [p(30, 30), p(9)], dist.get_rank()
    theirs = Upstream(params, Adam, lr=0.1)
    take_step(params, theirs, 0)
    match = rf"consolidate_state_dict\(to={rank}\) on all 2 ranks.*state_dict\(\) on rank {rank}"
    for opt, message in ((stepped(), match), (theirs, "")):
        if consolidated_to is not None:
            opt.consolidate_state_dict(to=consolidated_to)
        with (
            contextlib.nullcontext()
            if rank == consolidated_to
            else pytest.raises(RuntimeError, match=message)
        ):
            opt.state_dict()


# ------------------------------------------------------------------------- sparse gradients


@pytest.mark.parametrize("layout", ["sliced", "whole"])
@on_ranks(3, timeout=SECONDS)
def test_a_sparse_gradient_of_a_whole_parameter_is_taken_and_of_a_sliced_one_refused(
    layout: str,
) -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(100, 8, sparse=True)
    twin = torch.nn.Embedding(100, 8, sparse=True)
    twin.load_state_dict(table.state_dict())
    opt = build(table.named_parameters(), SGD, layout=layout, lr=0.5)
    plain = SGD(twin.parameters(), lr=0.5)
    rows = torch.tensor([3, 50, 3, 99])
    for module in (table, twin):
        module(rows).pow(2).sum().backward()
    assert table.weight.grad.is_sparse
    if layout == "sliced":
        with pytest.raises(ValueError, match=r"'weight' has a sparse gradient.*layout=\"whole\""):
            opt.step()
        # The optimizer is as it was: a dense gradient is taken the next time.
        assert torch.equal(table.weight, twin.weight)
        for module in (table, twin):
            module.weight.grad = module.weight.grad.to_dense()
    opt.step()
    plain.step()
    assert torch.equal(table.weight, twin.weight)


# --------------------------------------------------------- ranks that have nothing to update


class AsksTheFirst(SGD):
    """Cannot do without parameters."""

    def step(self, closure: Any = None) -> Any:
        self.where = next(p for group in self.param_groups for p in group["params"]).device
        return super().step(closure)


class WantsClosure(SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise ValueError("a closure, please")
        return super().step(closure)


def one_step(cls: Any, layout: str = "auto", first: Any = None) -> list[float]:
    """Step on gradients of ones; a class for the first parameter may be given."""
    params = [p(50), p(9, 9)]
    named = {} if first is None else {"optimizer_class": first}
    groups = [{"params": params[:1], "lr": 0.5, **named}, {"params": params[1:]}]
    opt = ZeroRedundancyOptimizer(groups, cls, lr=0.5, layout=layout)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step(*([lambda: 0.0] if first is None else []))
    return torch.cat([param.detach().flatten() for param in params]).unique().tolist()


@on_ranks(2, 5)
def test_a_class_that_cannot_do_without_parameters_is_refused_where_a_rank_has_none() -> None:
    match = "owns no parameters, and AsksTheFirst cannot step without any"
    for layout in ("auto", "sliced", "whole"):
        if dist.get_world_size() == 2:
            assert one_step(AsksTheFirst, layout) == [0.5]
        else:
            with pytest.raises((ValueError, RuntimeError), match=match):
                one_step(AsksTheFirst, layout)
    assert one_step(SGD) == one_step(WantsClosure) == [0.5]
    values = one_step(SGD, first=Adam)
    assert values == from_rank(0, values)


@on_ranks(2, raises=RuntimeError, match="With module=, do not wrap")
def test_ddp_around_a_module_of_an_optimizer_is_refused_and_named() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = build(module.parameters(), module=module)
    wrapped = DDP(module)
    for _ in range(2):
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_rank_of_torchrun_s_without_a_process_group_is_told_to_make_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It would train alone, and so would each of the others, without a word.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"2 ranks.*init_process_group\(\) first"):
        build([p(4)])
    monkeypatch.setenv("WORLD_SIZE", "1")
    build([p(4)])


def test_a_name_that_is_not_known_is_answered_with_one_that_is() -> None:
    optimizer = build(list(torch.nn.Linear(4, 4).parameters()))
    for ask in (optimizer.full_grad, optimizer.full_state, optimizer.full_master):
        with pytest.raises(ValueError, match=r"'weight' is not .*called 'param 0'; names are"):
            ask("weight")


class Alone(SoloComm):
    """A rank that the others have left, or have never followed, to a meeting."""

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        raise RuntimeError("shardstep: rank 0: comparing notes with the other ranks failed: late")


def test_a_call_that_other_ranks_do_not_make_is_named_when_they_do_not_come() -> None:
    with pytest.raises(RuntimeError, match=r"late .*saving a checkpoint must be .*every rank"):
        run_on_all_ranks(Alone(), "saving a checkpoint", lambda: None)


def test_state_that_is_assigned_is_refused_with_the_way_to_set_it() -> None:
    weight = p(4)
    optimizer: Any = build([weight])
    with pytest.raises(TypeError, match=r"sharded across ranks; set it with load_state_dict\(\)"):
        optimizer.state[weight] = {}


@pytest.mark.parametrize("with_module", [False, True])
def test_clipping_with_parameters_in_place_of_the_limit_is_refused(with_module: bool) -> None:
    model = torch.nn.Linear(1, 1)
    opt = build(model.parameters(), SGD, module=model if with_module else None, lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    for given in (model.parameters(), list(model.parameters()), model.weight):
        with pytest.raises(TypeError, match=r"max_norm must be a number, not .*_\(1\.0\) clips"):
            opt.clip_grad_norm_(given)
        with pytest.raises(TypeError, match=r"clip_value must be a number, not .*_\(1\.0\) clips"):
            opt.clip_grad_value_(given)
    opt.clip_grad_norm_(torch.tensor(1.0))
    opt.clip_grad_value_(torch.tensor(1.0))
