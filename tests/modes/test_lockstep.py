"""Ranks that differ are told so: groups edited by hand, other options, calls that one rank skips.

And a batch that fails on one rank can be given up on all of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ddp_ways import WAYS
from models import MLP_PROBLEM, PROBLEMS, SGD, Setup, from_rank, rank, with_zero
from on_ranks import on_ranks
from problems import assert_same
from ranks import each_raises_on_every_rank, run_ranks
from recovery import Broken, differences
from scenarios import ALL, APART, MODULE, sharded
from torch import Tensor, nn
from traffic import counted

from shardstep import BatchSkippedError, checkpoint
from shardstep.comm import Operation, OutOfStepError, collectives, headers
from shardstep.comm import group as comm_group
from shardstep.comm.consensus import LostRankError
from shardstep.gradients import lockstep
from shardstep.gradients.lockstep import Lockstep

EDITS: dict[str, tuple[Callable[[list[Any]], object], str]] = {
    "remove a parameter": (lambda groups: groups[0]["params"].pop(), "'.*' is no longer in it"),
    "replace a parameter": (
        lambda groups: groups[0]["params"].__setitem__(0, nn.Parameter(torch.ones(2))),
        "is no longer in it",
    ),
    "append a group": (
        lambda groups: groups.append({**groups[0], "params": [nn.Parameter(torch.ones(2))]}),
        r"group 1 .* call add_param_group\(\)",
    ),
    "append an empty group": (
        lambda groups: groups.append({**groups[0], "params": []}),
        r"groups of \[10, 0\] parameters, in place of \[10\]",
    ),
    "sort": (lambda groups: groups[0]["params"].reverse(), "in another order"),
}


def _edited(mode: str, name: str, on: int | None) -> None:
    setup = sharded(mode, MLP_PROBLEM.fresh())
    setup.backward(0)
    setup.finish()
    if on is None or rank() == on:
        EDITS[name][0](setup.opt.param_groups)
    setup.backward(1)
    setup.finish()


@pytest.mark.parametrize("mode", ["drop-in", "module", *WAYS])
def test_other_parameters_in_the_groups_are_refused_on_every_rank(mode: str) -> None:
    edits = [(name, match) for name, (_, match) in EDITS.items()]
    everywhere = [(_edited, ValueError, match, mode, name, None) for name, match in edits]
    there = [(_edited, ValueError, f"rank 1: .*{match}", mode, name, 1) for name, match in edits]
    each_raises_on_every_rank(2, everywhere + there[:3])
    each_raises_on_every_rank(1, everywhere)


# ------------------------------------------------------------------------------- out of step


def _other_lr(setup: Setup) -> None:
    setup.opt.param_groups[0]["lr"] *= 1 + rank()


def _missing_option(setup: Setup) -> None:
    if rank() == 1:
        del setup.opt.param_groups[0]["weight_decay"]


def _load_here(setup: Setup) -> None:
    setup.opt.consolidate_state_dict(1)
    if rank() == 1:
        setup.opt.load_state_dict(setup.opt.state_dict())


def _differ(mode: str, act: Callable[[Setup], None]) -> None:
    setup = sharded(mode, MLP_PROBLEM.fresh(), SGD)
    for step in range(3):
        setup.backward(step)
        setup.finish()
        if step == 0:
            act(setup)


DIFFER = {
    _other_lr: "'lr' of group 0 is 0.05 on rank 0 and 0.1 on rank 1",
    _missing_option: "'weight_decay' of group 0 is 0.01 on rank 0 and missing on rank 1",
    _load_here: r"rank 0 counts 0 calls of load_state_dict\(\) where rank 1 counts 1",
}


def test_other_options_and_a_load_on_one_rank_are_named_on_every_rank() -> None:
    runs = itertools.product(ALL, DIFFER)
    cases = [(_differ, OutOfStepError, DIFFER[act], mode, act) for mode, act in runs]
    each_raises_on_every_rank(2, cases)


class _Number(float):
    """As NumPy's are."""

    def __repr__(self) -> str:
        return f"np.float64({super().__repr__()})"


@on_ranks(2)
def test_numbers_of_different_types_are_equal_options() -> None:
    for mode in ALL:
        setup = sharded(mode, MLP_PROBLEM.fresh(), SGD)
        setup.opt.param_groups[0]["lr"] = _Number(0.05) if rank() else 0.05
        setup.opt.param_groups[0]["weight_decay"] = 1.0 if rank() else 1
        setup.backward(0)
        setup.finish()


def _differ_in_one_step(mode: str) -> None:
    """Train as on an accelerator, where notes are compared in the next step."""
    setup = sharded(mode, MLP_PROBLEM.fresh(), SGD)
    with mock.patch.object(lockstep, "WAITED_FOR", ()):
        for step in range(4):
            for group in setup.opt.param_groups:
                group["lr"] = 0.1 if step == 1 and rank() == 1 else 0.05
            setup.backward(step)
            setup.finish()


def test_options_that_are_equal_again_when_notes_are_compared_are_named() -> None:
    cases = [(_differ_in_one_step, OutOfStepError, DIFFER[_other_lr], mode) for mode in ALL]
    each_raises_on_every_rank(2, cases)


SAVES: list[Callable[[Setup], object]] = [
    lambda setup: setup.opt.consolidate_state_dict(0),
    lambda setup: checkpoint.save("never", setup.opt),
    lambda setup: checkpoint.Sharded(setup.opt).state_dict(),
]


def _differ_and_save(mode: str, save: int) -> None:
    """Save after the only step with different options, as on an accelerator."""
    setup = sharded(mode, MLP_PROBLEM.fresh(), SGD)
    with mock.patch.object(lockstep, "WAITED_FOR", ()):
        _other_lr(setup)
        setup.backward(0)
        setup.finish()
        SAVES[save](setup)


def test_the_state_of_a_step_that_was_not_the_same_on_all_ranks_is_not_saved() -> None:
    runs = itertools.product(ALL, range(len(SAVES)))
    cases = [(_differ_and_save, OutOfStepError, DIFFER[_other_lr], *run) for run in runs]
    each_raises_on_every_rank(2, cases)


def _caught(mode: str) -> None:
    setup = sharded(mode, MLP_PROBLEM.fresh())
    steps = iter(range(5))

    def closure() -> Tensor:
        setup.opt.zero_grad()
        step = next(steps)
        if rank() == 1 and step == 2:
            raise Broken
        return setup.backward(step)

    for _ in range(5):
        with contextlib.suppress(Broken):
            setup.opt.step(closure)


def _clear_here(mode: str, zero: bool, of: int, steps: int = 0) -> None:
    """Clear some gradients on one rank, or set them to zero, before backward or before a step."""
    setup = sharded(mode, MLP_PROBLEM.fresh())
    setup.backward(0)
    if rank() == 1:
        setup.opt.zero_grad(set_to_none=False) if zero and of == 10 else None
        for param in list(setup.module.parameters())[:of]:
            if zero:
                param.grad.zero_()  # a second time counts no more
            else:
                param.grad = None
    for _ in range(steps):
        setup.finish()
    setup.backward(1)
    setup.finish()


def test_a_closure_that_raised_and_gradients_cleared_on_one_rank_are_noticed_at_once() -> None:
    raised = r"rank 0 counts 0 calls of step\(\) that raised where rank 1 counts 1"
    cleared = "rank 0 counts 10 gradients that were not cleared where rank 1 counts {}"
    zeroed = "rank 0 counts 0 gradients that were set to zero where rank 1 counts {}"
    cases: list[Any] = [(_caught, OutOfStepError, raised, mode) for mode in APART]
    for mode, of in itertools.product(MODULE, (1, 10)):
        case = (_clear_here, OutOfStepError)
        cases.append((*case, cleared.format(10 - of), mode, False, of))
        cases += [(*case, zeroed.format(of), mode, True, of, steps) for steps in (0, 1)]
    each_raises_on_every_rank(2, cases)


def _unscale(setup: Setup) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(setup.opt)


NORM, NOTES = "computing the norm of the gradients", "comparing notes with the other ranks"

CALLS: dict[str, tuple[Callable[[Setup], object], str]] = {
    "backward": (lambda setup: setup.backward(1), "reducing gradients"),
    "clip": (lambda setup: setup.opt.clip_grad_norm_(1.0), NORM),
    "norms": (lambda setup: setup.opt.grad_norms(), NORM),
    "unscale": (_unscale, "looking for infinite gradients"),
    "gradient": (lambda setup: setup.opt.full_grad("0.weight"), "gathering a whole gradient"),
    "verify": (lambda setup: setup.opt.verify(), "comparing parameters"),
    "consolidate": (lambda setup: setup.opt.consolidate_state_dict(0), NOTES),
    "apply": (lambda setup: setup.opt.apply(lambda optim: None), NOTES),
}
"""Calls that one rank makes alone between backward and step, and its words for them."""

PLACES = {
    "forward": "rank 0 is reducing gradients where rank 1 is copying buffers",
    "no step": "rank 0 is ending the step where rank 1 is reducing gradients",
    "step": "rank 0 is reducing gradients where rank 1 is ending the step",
    "step, cleared": "rank 1 ran no backward pass where rank 0 has gradients",
    "step, cleared, then verify": "rank 0 is comparing parameters where rank 1 is reducing",
    "no backward": "rank 1 ran no backward pass where rank 0 has gradients",
    "no backward, then clip": "rank 1 ran no backward pass where rank 0 has gradients",
    "freeze": f"rank 0 is reducing gradients where rank 1 is {NOTES}",
    "loop": "rank 0 is reducing gradients where rank 1 is comparing parameters",
    **{
        name: f"rank 0 is ending the step where rank 1 is {said}"
        for name, (_, said) in CALLS.items()
    },
}


OUT_OF_STEP = (OutOfStepError, LostRankError)
_made: list[Any] = []


def _alone(what: str, buckets: int) -> None:
    """Let the last rank do something alone, in the second of three iterations."""
    between = nn.BatchNorm1d(16) if what == "forward" else nn.Linear(16, 16)
    module = nn.Sequential(nn.Linear(16, 16), between, nn.Linear(16, 4))
    setup = with_zero(module, bucket_bytes=buckets)
    _made.append(setup.opt)
    for step in range(3):
        mine = what if rank() == 1 and step == 1 else None
        if mine == "loop":
            break
        if mine == "forward":
            MLP_PROBLEM.loss(setup.model, step)
        if not (mine or "").startswith("no backward"):
            setup.backward(step)
        if mine in CALLS:
            CALLS[mine][0](setup)
        if what.endswith("then clip"):
            setup.opt.clip_grad_norm_(1.0)
        if mine != "no step":
            setup.opt.step()
        if mine == "step":
            setup.opt.step()
        if mine == "freeze":
            module[0].requires_grad_(False)
        setup.opt.zero_grad()
        if step == 1:
            if (mine or "").startswith("step, cleared"):
                setup.opt.step()
            if what.endswith("then verify"):
                setup.opt.verify()
    setup.opt.verify()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_call_that_only_one_rank_makes_is_named_on_every_rank(world_size: int) -> None:
    """Small buckets make a backward pass wait before its end, large ones do not."""
    cases = itertools.product(PLACES.items(), (1, 2**20))
    each_raises_on_every_rank(
        world_size, [(_alone, OUT_OF_STEP, said, what, size) for (what, said), size in cases]
    )


def _recover_from(what: str) -> None:
    try:
        _alone(what, 1)
    except OUT_OF_STEP:
        _made[-1].recover()


def test_ranks_that_made_different_calls_cannot_recover() -> None:
    """A step that one rank took cannot be given up."""
    cases = [(_recover_from, OutOfStepError, PLACES[what], what) for what in ("step", "no step")]
    each_raises_on_every_rank(2, cases)


def _messages(mode: str) -> tuple[dict[str, int], int]:
    with counted() as traffic:
        setup = sharded(mode, MLP_PROBLEM.fresh())
    for step in range(4):  # the first steps also compare gradients
        traffic.reset()
        setup.backward(step)
        setup.finish()
    return dict(traffic.calls), len(setup.opt.plan.training_buckets)


def test_notes_add_no_message_to_a_round_and_one_to_a_step_without_rounds() -> None:
    calls, buckets = run_ranks(_messages, 2, "module")[0]
    # Which parameters were used is one message. It was there before, and carries the note. A header
    # begins the round. The one that begins the gathers also tells whether the step succeeded.
    assert calls == {"reduce_scatter": buckets, "all_gather": buckets + 1, "header": 2}
    calls, buckets = run_ranks(_messages, 2, "drop-in")[0]
    assert calls == {"all_gather": buckets + 1, "header": 1}
    guide = Path(__file__).parents[2] / "docs" / "guide.md"
    assert f"({Lockstep.nbytes} bytes to each rank)" in guide.read_text()
    assert f"one more message of {headers.NBYTES} bytes" in guide.read_text()


def test_an_accelerator_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its notes are compared when the next ones are read."""
    opt = sharded("drop-in", MLP_PROBLEM.fresh()).opt
    lockstep: Lockstep = opt.mode.lockstep
    notes = bytearray(lockstep.write(opt.mode.pipeline.params))
    lockstep.rounds += 1
    notes += lockstep.write(opt.mode.pipeline.params)
    rows = torch.frombuffer(notes, dtype=torch.uint8)
    compared: list[Any] = []
    monkeypatch.setattr(lockstep, "_compare", lambda comm, late: compared.append(late.notes()))
    lockstep.read(opt.mode.comm, rows.view(2, -1))
    assert [note[-2] for note in compared[0]] == [0, 1]


# ------------------------------------------------------------------------------------- recover


WHERE = ["loader", "forward", "backward"]


@pytest.mark.parametrize("where", WHERE)
@on_ranks(2, 3)
def test_a_batch_that_fails_on_a_rank_is_skipped_on_all(where: str) -> list[str]:
    return differences(where)


def _in_one_order(setup: Setup) -> None:
    """Let the notes of reductions meet what is launched before and after them, as over NCCL."""
    comm = setup.opt.mode.comm
    comm._exchange._apart[Operation.NOTES] = comm._exchange._launched
    comm.headers.of_every_call = False


@pytest.mark.parametrize("where", WHERE)
@on_ranks(2)
def test_a_failed_batch_is_skipped_where_reductions_run_in_one_order(where: str) -> list[str]:
    with mock.patch.object(lockstep, "WAITED_FOR", ()):
        return differences(where, _in_one_order, recoverable=True)


@contextlib.contextmanager
def _connected_at_first_use() -> Iterator[None]:
    """Let collectives of each group begin by waiting for all ranks, as over NCCL."""
    connected: set[Any] = set()
    reduce, gather = collectives._reduce_scatter_single, collectives._all_gather_single

    def connecting(collective: Callable[..., Any], *args: Any, group: Any, **options: Any) -> Any:
        if group not in connected:
            dist.barrier(group)
            connected.add(group)
        return collective(*args, group=group, **options)

    with (
        mock.patch.object(comm_group, "EXCHANGING", frozenset()),
        mock.patch.object(collectives, "_reduce_scatter_single", partial(connecting, reduce)),
        mock.patch.object(collectives, "_all_gather_single", partial(connecting, gather)),
        mock.patch.object(lockstep, "WAITED_FOR", ()),
    ):
        yield


@pytest.mark.parametrize("where", WHERE)
@on_ranks(2)
def test_a_failed_batch_is_skipped_where_ranks_connect_at_the_first_use(where: str) -> list[str]:
    with _connected_at_first_use():
        return differences(where, recoverable=True)


@pytest.mark.parametrize("collectives_only", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_a_batch_may_fail_after_one_that_all_ranks_have_left_out(
    failing: int, collectives_only: bool
) -> None:
    """Ranks that go on copy buffers before their forward pass, since no step has done so."""
    with _connected_at_first_use() if collectives_only else contextlib.nullcontext():
        setup = sharded("module", PROBLEMS["conv"].fresh(), SGD, zero={"recoverable": True})
        for step in range(7):
            try:
                setup.opt.zero_grad()
                if step in (2, 4, 5) and rank() == failing:
                    raise Broken
                setup.backward(step, PROBLEMS["conv"])
                if step not in (1, 3):
                    setup.opt.step()
            except (Broken, BatchSkippedError):
                setup.opt.recover()
        setup.opt.verify()
        buffers = list(setup.module.buffers())
        assert_same(from_rank(0, buffers), buffers)


def _refused(mode: str) -> None:
    sharded(mode, MLP_PROBLEM.fresh()).opt.recover()


def test_a_finished_backward_pass_cannot_be_given_up() -> None:
    """Other ranks may have stepped on it."""
    setup = sharded("module", MLP_PROBLEM.fresh())
    setup.backward(0)
    with pytest.raises(RuntimeError, match=r"call step\(\) here too"):
        setup.opt.recover()
    setup.finish()
    setup.opt.recover()


@pytest.mark.parametrize("place", ["an accelerator", "the CPU without Gloo"])
@on_ranks(2, raises=RuntimeError, match="recoverable=True")
def test_recover_is_refused_without_connections_for_it(place: str) -> None:
    """Other ranks would have stepped by then, or wait for the notes of another operation."""
    accelerator = mock.patch.object(lockstep, "WAITED_FOR", ())
    collectives_only = mock.patch.object(comm_group, "EXCHANGING", frozenset())
    with accelerator if place == "an accelerator" else collectives_only:
        _refused("module")


def test_recover_needs_a_module() -> None:
    modes = [mode for mode in APART if mode not in MODULE]
    each_raises_on_every_rank(2, [(_refused, RuntimeError, "needs module=", m) for m in modes])
