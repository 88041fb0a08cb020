"""Stepping inside of DDP's backward, beyond the scenarios that all modes share."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_ways import HOOKS, WAYS, compare, overlapping, seen_in, set_up
from doubles import AnyOrder, LateArrival, behind_the_door
from graphs import READS
from models import ADAMW, MLP, MLP_PROBLEM, ConvNet, Setup, in_ddp, noise, rank, with_ddp
from on_ranks import on_ranks
from problems import OneByOne, assert_same, copies
from ranks import each_raises_on_every_rank
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer

from shardstep import ZeroRedundancyOptimizer, hook_with_zero_step, register

# DDP compares the annotations of a hook with classes, so that here, where they are strings, hooks
# that it is handed have none.


def at_once(state, bucket):  # type: ignore[no-untyped-def]
    """A communication hook that is done when it returns: the next bucket finds it so."""
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@on_ranks(2)
def test_ddp_has_several_buckets_in_these_tests_and_rebuilds_them() -> None:
    """How many buckets DDP has at first, and after it has seen the order of gradients."""
    seen: list[int] = []

    def count(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(bucket.index())
        return allreduce_hook(None, bucket)

    setup = overlapping("interleaved", MLP_PROBLEM.fresh(), comm_hook=count)
    setup.backward(0)
    first = len(seen)
    setup.finish()
    setup.backward(1)
    then = len(seen) - first
    assert then > 2
    assert first != then


# ---------------------------------------------------------------------- classes that count steps


class CountsInGroups(Optimizer):
    """Counts its steps beside the parameters, if there is anything to step on.

    A rank whose parameters have no gradient counts otherwise than the others, so it would be
    refused. Here every parameter has one, and the class says that it may be divided.
    """

    shardstep_layout = "whole"

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            given = [param for param in group["params"] if param.grad is not None]
            group["count"] += bool(given)
            for param in given:
                param.sub_(param.grad, alpha=group["lr"] / group["count"])


class CountsInItself(OneByOne):
    """Counts its steps in an attribute."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step()

    def update(self, p: Any, state: Any, lr: float) -> None:
        p.sub_(p.grad, alpha=lr / self.count)


COUNTING = (CountsInGroups, CountsInItself)


@on_ranks(2)
def test_a_class_that_counts_steps_may_step_at_the_end_of_backward() -> None:
    for counting in COUNTING:
        compare((counting, {}), ways=["hook", "register"])


def one_weight() -> nn.Module:
    """There is nothing in it for the second rank to own, and so to count."""
    return nn.Sequential(nn.Linear(16, 4, bias=False))


def counting_by_buckets(counting: type[Optimizer], module: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    setup = overlapping("interleaved", module(), (counting, {}), comm_hook=at_once)
    setup.backward(0)


def test_a_class_that_counts_steps_may_not_step_by_buckets() -> None:
    match = "{} counts its steps.*use hook_with_zero_step"
    cases = [
        (counting_by_buckets, RuntimeError, match.format(run[0].__name__), *run)
        for run in itertools.product(COUNTING, [MLP, one_weight])
    ]
    each_raises_on_every_rank(2, cases)


class KeepsGradients(OneByOne):
    """Keeps the gradient itself for the next step, not a copy of it."""

    def update(self, p: Any, state: Any, lr: float) -> None:
        p.sub_(p.grad - 0.5 * state.get("previous", 0), alpha=lr)
        state["previous"] = p.grad


@on_ranks(2)
def test_a_class_may_keep_a_gradient_beyond_the_step() -> None:
    compare((KeepsGradients, {}))


# ------------------------------------------------------------------------- communication hooks


def bf16(state, bucket):  # type: ignore[no-untyped-def]
    """Under another name: DDP refuses the one it knows where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def power_state() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


@pytest.mark.slow
@on_ranks(2)
def test_any_communication_hook_gives_the_numbers_of_ddp() -> None:
    hooks = (allreduce_hook, default_hooks.fp16_compress_hook, bf16, at_once)
    for hook, kind in itertools.product(hooks, (ADAMW, (optim.Adafactor, {"lr": 0.01}))):
        compare(kind, list(HOOKS), comm_hook=hook)
    # One bucket: PowerSGD sends from the threads in which earlier messages arrive, and on Gloo
    # DDP's own buckets mix their messages up.
    power = {"comm_hook": powerSGD_hook.powerSGD_hook, "state": power_state}
    compare(ways=list(HOOKS), steps=6, bucket_cap_mb=25, **power)


# ---------------------------------------------------------------------------- groups and ranks


@on_ranks(2)
def test_a_group_may_be_added_before_the_hook_is_made() -> None:
    reference = seen_in(with_ddp(MLP_PROBLEM.fresh()))
    for way in WAYS:
        model = in_ddp(MLP_PROBLEM.fresh())
        first, *rest = model.parameters()
        opt: Any = ZeroRedundancyOptimizer(
            [first], ADAMW[0], overlap_with_ddp=True, bucket_bytes=1, **ADAMW[1]
        )
        opt.add_param_group({"params": rest})
        if way == "register":
            register(model, opt)
        else:
            model.register_comm_hook(None, HOOKS[way](allreduce_hook, model, opt))
        assert_same(reference, seen_in(set_up(model, opt)), way)


@on_ranks(4)
def test_the_state_may_be_divided_among_some_of_ddps_ranks() -> None:
    """DDP over four ranks, the state divided among pairs of them: each pair has a copy."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    reference = seen_in(with_ddp(MLP_PROBLEM.fresh(), comm_hook=allreduce_hook))
    for way in HOOKS:
        setup = overlapping(way, MLP_PROBLEM.fresh(), zero={"process_group": pairs[rank() // 2]})
        assert_same(reference, seen_in(setup), way)


# ------------------------------------------------------------------ nothing stale, nothing early


@pytest.mark.parametrize("double", [None, LateArrival, AnyOrder])
@on_ranks(2)
def test_parameters_read_right_after_backward_are_up_to_date(double: Any) -> None:
    """Read parameters right after backward, before `step()` is called."""
    reference = with_ddp(MLP_PROBLEM.fresh())
    with behind_the_door(double) if double else contextlib.nullcontext():
        setups = {way: overlapping(way, MLP_PROBLEM.fresh()) for way in WAYS}
    readers: list[Callable[[Setup], Iterable[Tensor]]] = [
        lambda s: s.model.state_dict().values(),  # type: ignore[attr-defined]
        lambda s: s.module.state_dict().values(),
        lambda s: s.module.parameters(),
    ]
    for step, read in enumerate(readers):
        reference.backward(step)
        reference.finish()
        for way, setup in setups.items():
            setup.backward(step)
            assert_same(reference.params, copies(read(setup)), (way, step))
            setup.finish()


@on_ranks(2)
def test_no_result_of_a_hook_is_used_before_it_has_arrived() -> None:
    for double in (LateArrival, AnyOrder):
        with behind_the_door(double):
            compare(ways=list(HOOKS), comm_hook=at_once)


@on_ranks(2, raises=RuntimeError, match="modified by an inplace operation")
def test_a_parameter_that_backward_needs_after_it_has_stepped_is_an_error() -> None:
    """On every rank, whether or not it owns the weight."""
    setup = overlapping("interleaved", READS.fresh(), comm_hook=at_once)
    for step in range(3):
        setup.backward(step, READS)
        setup.finish()


# --------------------------------------------------------------------------------------- errors


def make_zero(model: Any, **options: Any) -> Any:
    return ZeroRedundancyOptimizer(
        model.parameters(), optim.SGD, lr=0.1, **{"overlap_with_ddp": True, **options}
    )


def tie(way: str, model: Any, opt: Any) -> None:
    if way == "register":
        register(model, opt)
    else:
        HOOKS[way](allreduce_hook, model, opt)


def tied(way: str, model: Any, **options: Any) -> None:
    tie(way, model, make_zero(model, **options))


def too_few_parameters(way: str) -> None:
    model = in_ddp(MLP())
    tie(way, model, make_zero(model.module.layers))
    model.module.late = nn.Linear(3, 3)
    tie(way, model, make_zero(model.module.layers))


def never_registered(way: str) -> None:
    model = in_ddp(MLP())
    opt = make_zero(model)
    hook_with_zero_step(allreduce_hook, model, opt)
    model(noise(0, 6, 16)).sum().backward()
    opt.step()


def ignored_by_ddp(way: str) -> None:
    module: Any = MLP()
    module._ddp_params_and_buffers_to_ignore = ["layers.2.weight"]
    tied(way, in_ddp(module))


def beyond_ddp(way: str) -> None:
    alone = [dist.new_group([each]) for each in range(2)][rank()]
    tied(way, in_ddp(MLP(), process_group=alone))


def turned_in_ddp(way: str) -> None:
    setup = overlapping(way, ConvNet())
    setup.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    setup.model(noise(0, 4, 3, 6, 6))


def detached(way: str) -> None:
    setup = overlapping(way, MLP())
    setup.backward(0)
    setup.opt.detach()
    with torch.no_grad():
        setup.model(noise(0, 6, 16))
    setup.backward(1)


#: Mistakes that are found before anything is sent, so that ranks are fit for the next one.
ERRORS: list[tuple[Callable[[str], None], type[Exception], str]] = [
    (
        lambda way: tied(way, in_ddp(MLP()), overlap_with_ddp=False),
        *(ValueError, "constructed with overlap_with_ddp=True"),
    ),
    (
        lambda way: tie(way, in_ddp(MLP()), make_zero(MLP())),
        *(ValueError, "parameter 0 of the optimizer is not a parameter of the DDP"),
    ),
    (
        lambda way: tied(way, MLP()),
        *(TypeError, "must be a DistributedDataParallel and zero .* not MLP and Zero"),
    ),
    (
        lambda way: tie(way, make_zero(model := in_ddp(MLP())), model),
        *(TypeError, "not ZeroRedundancyOptimizer and DistributedData"),
    ),
    (too_few_parameters, ValueError, "'late.weight' of the DDP module trains but was not given"),
    (
        lambda way: make_zero(in_ddp(MLP())).step(),
        *(RuntimeError, r"no DDP module was tied.*register\(ddp, optimizer\)"),
    ),
    (never_registered, RuntimeError, r"but none was: register the hook with ddp.register_comm"),
    (
        lambda way: make_zero(model := MLP(), module=model),
        *(ValueError, "module= replaces DDP; leave out overlap_with_ddp=True"),
    ),
    (turned_in_ddp, ValueError, r"rank \d: parameter '.*weight' got another memory format"),
    (detached, RuntimeError, r"rank \d: the optimizer .* was detached; wrap the module in Dist"),
    (ignored_by_ddp, ValueError, "'layers.2.weight' .* in DDP's parameters_to_ignore"),
    (
        lambda way: tied(way, in_ddp(MLP(), skip_all_reduce_unused_params=True)),
        *(ValueError, "skip_all_reduce_unused_params=True may leave out"),
    ),
    (
        beyond_ddp,
        *(ValueError, r"\[0, 1\], reaches beyond the DDP module's, of ranks \[[01]\]"),
    ),
]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_mistakes_are_refused_on_every_rank(way: str) -> None:
    for mistake, error, match in ERRORS:
        with pytest.raises(error, match=match):
            mistake(way)


def join_wrongly(way: str, with_zero: bool) -> None:
    setup = overlapping(way, MLP())
    with Join([setup.opt, setup.model] if with_zero else [setup.model]):  # type: ignore[list-item]
        for step in range(2 + rank()):
            setup.backward(step)


def test_the_optimizer_joins_behind_ddp() -> None:
    match = r"use Join\(\[ddp, zero\]\)"
    runs = itertools.product(WAYS, (False, True))
    each_raises_on_every_rank(2, [(join_wrongly, RuntimeError, match, *run) for run in runs])


class Complex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))


@on_ranks(2)
def test_complex_parameters_are_refused_where_ddp_shows_them_as_real() -> None:
    for way in ("interleaved", "register"):
        with pytest.raises(ValueError, match="'weight' is complex"):
            tied(way, in_ddp(Complex()))
