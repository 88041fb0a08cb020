"""Every scenario in every mode comes to the numbers of DDP and the unsharded optimizer.

At two ranks the order of every sum is the same, so all is equal to the bit; so it is at one. At
three, `module=` and `register` add gradients in the order of the ranks and DDP in another: those
two are equal to each other to the bit, and close to DDP. `FILES` has the scenarios.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import freezing
import graphs
import loops
import pytest
import surroundings
import torch
import torch.distributed as dist
import uneven
from doubles import AnyOrder, LateArrival
from models import ADAMW, MLP_PROBLEM, PROBLEMS, consolidated, rank, train
from on_ranks import on_ranks
from problems import assert_alike, assert_same, copies, differing
from ranks import each_raises_on_every_rank, run_ranks
from scenarios import ALL, APART, MODULE, REFUSED, SCENARIOS, compared, sharded, unsharded
from torch import optim

from shardstep import checkpoint

FILES = (freezing, graphs, loops, surroundings, uneven)
assert {each.loop.__module__ for each in SCENARIOS.values()} == {file.__name__ for file in FILES}


def _works(name: str) -> list[str]:
    refused = {mode for (each, modes) in REFUSED for mode in modes if each == name}
    return [mode for mode in ALL if mode not in refused]


def _compare(name: str, **options: Any) -> list[str]:
    warnings.simplefilter("ignore")
    return compared([name], **{"modes": _works(name), **options})


def marked(values: Iterable[str], mark: Any, takes_it: Callable[[str], bool]) -> list[Any]:
    """Return parameters for a test, some of them with a mark."""
    return [pytest.param(each, marks=[mark] * takes_it(each)) for each in values]


def thorough_but(*names: str) -> list[Any]:
    """Return all scenarios; those with other names run with the thorough tests."""
    return marked(SCENARIOS, pytest.mark.thorough, lambda name: name not in names)


@pytest.mark.parametrize("name", marked(SCENARIOS, pytest.mark.slow, lambda n: SCENARIOS[n].slow))
def test_two_ranks_equal_ddp_to_the_bit(name: str) -> None:
    assert run_ranks(_compare, 2, name) == [[], []]


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_equal_ddp_with_all_classes_layouts_and_options(name: str) -> None:
    assert run_ranks(_compare, 2, name, thorough=True, timeout=300) == [[], []]


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_one_and_three_ranks_equal_ddp(name: str, world_size: int) -> None:
    if world_size in SCENARIOS[name].ranks:
        assert run_ranks(_compare, world_size, name) == [[]] * world_size


@pytest.mark.parametrize(
    "name",
    thorough_but("every_model", "mixed_dtypes", "closure", "clear_some_by_hand", "never_clear"),
)
def test_without_a_process_group_it_is_the_plain_optimizer(name: str) -> None:
    if 0 in SCENARIOS[name].ranks:
        assert _compare(name, modes=APART) == []


WITH_MODULE = (
    *("every_model", "mixed_dtypes", "average_the_weights", "write_parameters"),
    *("read_parameters_in_the_loss", "step_again_on_the_same_gradients"),
    "evaluate_with_fused_attention",
)
IN_ALL_MODES = ("unused_parameters_with_no_sync", "accumulate_with_no_sync")
DOUBLES: list[Any] = [
    *(pytest.param(each, LateArrival, MODULE) for each in WITH_MODULE),
    *(pytest.param(each, AnyOrder, MODULE, marks=pytest.mark.slow) for each in WITH_MODULE),
    *(
        pytest.param(each, double, ALL, marks=[pytest.mark.thorough] * (each not in IN_ALL_MODES))
        for each in SCENARIOS
        for double in (LateArrival, AnyOrder)
    ),
]


@pytest.mark.parametrize(("name", "double", "modes"), DOUBLES)
def test_no_result_is_used_before_it_has_arrived(name: str, double: Any, modes: Any) -> None:
    modes = [mode for mode in _works(name) if mode in modes]
    assert run_ranks(_compare, 2, name, double=double, modes=modes) == [[], []]


def _refused(name: str, mode: str) -> None:
    _compare(name, modes=[mode])


def test_refusals_are_raised_on_every_rank() -> None:
    cases = [
        (_refused, error, match, name, mode)
        for (name, modes), (error, match) in REFUSED.items()
        for mode in modes
    ]
    each_raises_on_every_rank(2, cases)


# ---------------------------------------------------------------------------- ranks and subgroups


@pytest.mark.slow
@on_ranks(4)
def test_four_ranks_repeat_themselves_and_have_equal_parameters() -> None:
    for mode in (*MODULE, "register"):
        for problem in (PROBLEMS["gpt"], PROBLEMS["branching"]):
            seen = []
            for _ in range(2):
                options = {"find_unused_parameters": problem.find_unused}
                setup = sharded(mode, problem.fresh(), **options)
                train(setup, problem, range(6))
                setup.opt.verify()
                seen.append(setup.params)
            assert_same(*seen, mode)


@on_ranks(3)
def test_every_mode_works_within_a_subgroup() -> None:
    """Global ranks 1 and 2 are ranks 0 and 1 of their group."""
    group = dist.new_group([1, 2])
    if rank() == 0:
        return
    reference = unsharded(MLP_PROBLEM.fresh(), ADAMW, process_group=group)
    expected = [*train(reference, MLP_PROBLEM, range(5)), *reference.params]
    for mode in ALL:
        setup = sharded(mode, MLP_PROBLEM.fresh(), process_group=group)
        assert_same(expected, [*train(setup, MLP_PROBLEM, range(5)), *setup.params], mode)


# ------------------------------------------------------------------------------------- the state


@pytest.mark.parametrize(
    "source",
    marked([*ALL, "unsharded"], pytest.mark.slow, lambda mode: mode not in ("module", "drop-in")),
)
@on_ranks(2)
def test_state_moves_from_each_mode_to_every_other(source: str) -> None:
    """Three steps in one mode, three in another: as if all six had been taken with DDP."""
    warnings.simplefilter("ignore")  # that what no rank used has no state
    number = [*ALL, "unsharded"].index(source)
    for problem in (MLP_PROBLEM, PROBLEMS["branching"]):
        options = {
            "find_unused_parameters": problem.find_unused,
            "groups": surroundings.several_groups,
        }

        def made(mode: str, number: int, problem: Any = problem, options: Any = options) -> Any:
            if mode == "unsharded":
                return unsharded(problem.fresh(), ADAMW, **options)
            layouts = [{"layout": "sliced"}, {"layout": "whole", "bucket_bytes": 1 << 30}]
            return sharded(mode, problem.fresh(), zero=layouts[number % 2], **options)

        reference, first = made("unsharded", 0), made(source, number)
        losses = train(reference, problem, range(3))
        whole = copy.deepcopy(dict(sorted(reference.opt.state_dict()["state"].items())))
        expected = [*losses, *train(reference, problem, range(3, 6)), *reference.params]
        losses = train(first, problem, range(3))
        state = consolidated(first.opt, 1)
        assert_alike(whole, dict(sorted(state["state"].items())))
        values = {key: value.clone() for key, value in first.module.state_dict().items()}
        for place, target in enumerate((*ALL, "unsharded")):
            second = made(target, number + place + 1)
            second.module.load_state_dict(values)
            second.opt.load_state_dict(state)
            got = [*losses, *train(second, problem, range(3, 6)), *second.params]
            assert_same(expected, got, target)
            if target in MODULE:
                second.opt.detach()


def _state(setup: Any) -> list[Any]:
    params = list(setup.module.parameters())
    return [*copies(params), *(setup.opt.full_state(param) for param in params)]


def _save(folder: Path) -> dict[str, list[Any]]:
    saved = {}
    for mode in ALL:
        setup = sharded(mode, MLP_PROBLEM.fresh())
        train(setup, MLP_PROBLEM, range(2))
        checkpoint.save(folder / mode, setup.opt, setup.module)
        saved[mode] = _state(setup)
    return saved


def _load(folder: Path, saved: dict[str, list[Any]]) -> None:
    for number, source in enumerate(ALL):
        target = ALL[number - 3]
        setup = sharded(target, MLP_PROBLEM.fresh())
        checkpoint.load(folder / source, setup.opt, setup.module)
        assert_alike(saved[source], _state(setup), (source, target))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_of_any_mode_loads_into_another_at_another_number_of_ranks(
    tmp_path: Path, world_size: int
) -> None:
    saved, _ = run_ranks(_save, 2, tmp_path)
    run_ranks(_load, world_size, tmp_path, saved)


# ---------------------------------------------------------------------------- the matrix itself


@on_ranks(2)
def test_the_comparison_sees_the_last_digits() -> None:
    """Whether a comparison notices a learning rate that differs in the last digits."""
    other = (optim.AdamW, {"lr": 0.01 + 1e-7, "weight_decay": 0.1})
    reference = unsharded(MLP_PROBLEM.fresh(), ADAMW)
    setup = sharded("module", MLP_PROBLEM.fresh(), other)
    expected, got = (train(each, MLP_PROBLEM, range(3)) for each in (reference, setup))
    assert differing(expected, got)
    assert not torch.equal(reference.params[0], setup.params[0])
