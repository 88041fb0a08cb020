"""Replayed steps have the numbers of steps that are taken. The graphs are doubles on the CPU."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import freezing  # noqa: F401  # the scenarios
import graphs  # noqa: F401
import loops  # noqa: F401
import pytest
import surroundings  # noqa: F401
import torch
import torch.distributed as dist
import uneven  # noqa: F401
from models import ADAMW, MLP_PROBLEM, rank
from on_ranks import on_ranks
from problems import assert_alike, assert_same, copies
from ranks import run_ranks
from recorded import NOT_FUSED, capturable, steps_recorded
from scenarios import ALL, REFUSED, SCENARIOS, compared, sharded
from step_changes import CHANGES, compare, local_of, new_gradients, new_params, run, set_rate
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from shardstep import MixedPrecision, ZeroRedundancyOptimizer
from shardstep.local import step_graphs
from shardstep.local.step_graphs import PATIENCE, PAUSE

AdamW = torch.optim.AdamW
OF_ADAMW = [n for n, each in SCENARIOS.items() if ADAMW in each.kinds and n not in NOT_FUSED]
SOME = ("every_model", "freeze_and_unfreeze", "grad_scaler", "give_parameters_other_memory")


def test_a_step_that_comes_again_is_replayed() -> None:
    assert compare({}, steps=9) == [8]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_never_missed(name: str) -> None:
    act, replays = CHANGES[name]
    assert compare({5: act}) == replays


def test_a_learning_rate_that_a_scheduler_replaces_is_never_recorded() -> None:
    assert compare(dict.fromkeys(range(9), set_rate), lr=0.01) == []


def test_a_constant_learning_rate_need_not_be_a_tensor() -> None:
    assert compare({}, lr=0.01) == [8]


def test_gradients_that_take_turns_in_three_places_have_three_graphs() -> None:
    def take_turns(_: Any, params: list[nn.Parameter]) -> None:
        for param in params:
            first = param.grad
            places = param.__dict__.setdefault("places", [first.clone(), first.clone(), first])
            places.append(places.pop(0))
            param.grad = places[0].copy_(first)

    assert compare(dict.fromkeys(range(12), take_turns), steps=12) == [3, 3, 3]


def test_a_gradient_that_goes_to_another_parameter_is_seen() -> None:
    def without(_: Any, params: list[nn.Parameter]) -> None:
        params[3].grad = None

    def move(_: Any, params: list[nn.Parameter]) -> None:
        params[3].grad, params[2].grad = params[2].grad, None

    assert compare({0: without, 5: move}) == [4, 3]


def test_a_gradient_that_lies_in_memory_in_another_way_is_seen() -> None:
    def turn(_: Any, params: list[nn.Parameter]) -> None:
        params[2].grad = params[2].grad.t()

    assert compare({5: turn}) == [4, 3]


def test_states_that_change_owners_but_not_their_order_are_seen() -> None:
    def swap_owners(opt: Any, _: Any) -> None:
        state = local_of(opt).state
        owners, values = [*state], [*state.values()]
        owners[2], owners[3] = owners[3], owners[2]
        state.clear()
        state.update(zip(owners, values, strict=True))

    assert compare({5: swap_owners}) == [4, 3]


def test_after_many_new_steps_few_are_compared() -> None:
    def elsewhere(_: Any, params: list[nn.Parameter]) -> None:
        params[0].__dict__["kept"] = [param.grad for param in params]
        new_gradients(None, params)

    made = mock.patch.object(step_graphs._Footprint, "of", wraps=step_graphs._Footprint.of)
    with made as of:
        assert compare(dict.fromkeys(range(60), elsewhere), steps=60) == []
    assert of.call_count == 2 * PATIENCE
    # Once steps repeat themselves, this is noticed.
    (replays,) = compare(dict.fromkeys(range(60), set_rate), steps=3 * PAUSE, lr=0.01)
    assert replays == PAUSE


def test_what_cannot_be_recorded_is_taken_as_usual() -> None:
    params = new_params()
    with steps_recorded(), mock.patch.object(step_graphs, "record", return_value=None) as record:
        opt = ZeroRedundancyOptimizer(params, AdamW, **capturable()[1])
        got = run(opt, params, {}, 5)
    params = new_params()
    assert_alike(run(AdamW(params, **capturable()[1]), params, {}, 5), got)
    assert record.call_count == 1


def test_a_class_that_is_patched_later_is_called() -> None:
    params, calls = new_params(), []
    step = AdamW.step
    with steps_recorded() as made:
        opt = ZeroRedundancyOptimizer(params, AdamW, **capturable()[1])
        run(opt, params, {}, 4)
        patch = mock.patch.object(AdamW, "step", lambda self: (calls.append(1), step(self))[1])
        with patch:
            run(opt, params, {}, 1)
    assert (len(calls), [each.replays for each in made]) == (1, [3])


def test_one_group_that_is_not_capturable_prevents_it() -> None:
    params = new_params()
    groups = [{"params": params[:2]}, {"params": params[2:], "capturable": False}]
    with steps_recorded() as made:
        run(ZeroRedundancyOptimizer(groups, AdamW, **capturable()[1]), params, {}, 4)
    assert not made


def test_sparse_gradients_get_the_error_of_the_class() -> None:
    params = new_params()
    opt = ZeroRedundancyOptimizer(params, AdamW, **capturable()[1])
    params[0].grad = params[0].detach().to_sparse()
    with steps_recorded(), pytest.raises(RuntimeError, match="does not support sparse gradients"):
        opt.step()


def _averaged_later(recorded: bool) -> list[torch.Tensor]:
    """Train with gradients that wait for themselves: subclasses without memory of their own."""
    params = new_params()
    with steps_recorded() if recorded else nullcontext():
        opt = ZeroRedundancyOptimizer(params, AdamW, **capturable()[1])
        for step in range(6):
            for number, param in enumerate(params):
                value = torch.full(param.shape, 0.1 * (number + 1) * (step + 1) * (rank() + 1))
                param.grad = all_reduce(value, "avg", dist.group.WORLD)
            opt.step()
    return copies(params)


@on_ranks(2)
def test_gradients_of_subclasses_are_not_taken_for_others() -> None:
    assert_same(_averaged_later(False), _averaged_later(True))


def test_only_capturable_steps_are_recorded() -> None:
    assert compare({}, capturable=False) == []


class _Counting(AdamW):
    """Counts its steps in Python, which a graph would not."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


def test_a_class_that_is_not_torch_s_is_not_recorded() -> None:
    params = new_params()
    with steps_recorded() as made:
        opt = ZeroRedundancyOptimizer(params, _Counting, **capturable()[1])
        run(opt, params, {}, 5)
    assert (made, opt.optim.calls) == ([], 5)


def test_several_classes_in_one_optimizer_are_not_recorded() -> None:
    params = new_params()
    groups = [{"params": params[:2], "optimizer_class": torch.optim.Adam}, {"params": params[2:]}]
    with steps_recorded() as made:
        run(ZeroRedundancyOptimizer(groups, AdamW, **capturable()[1]), params, {}, 4)
    assert not made


def test_a_profiler_shows_a_replayed_step_without_the_span_of_the_class() -> None:
    params = new_params()
    with steps_recorded(), mock.patch.object(step_graphs, "record", return_value=lambda: None):
        opt = ZeroRedundancyOptimizer(params, AdamW, **capturable()[1])
        shown = []
        for _ in range(2):
            with torch.profiler.profile() as profiler:
                opt.step()
            shown.append({event.name for event in profiler.events()})
    taken, replayed = shown
    assert taken - replayed >= {"Optimizer.step#AdamW.step"}
    assert "shardstep::step" in taken & replayed


def test_hooks_on_the_local_optimizer_and_closures_are_called() -> None:
    params, called = new_params(), []
    with steps_recorded() as made:
        opt = ZeroRedundancyOptimizer(params, AdamW, **capturable()[1])
        run(opt, params, {}, 3)
        assert [each.replays for each in made] == [2]
        for register in (opt.optim.register_step_pre_hook, opt.optim.register_step_post_hook):
            hook = register(lambda *_: called.append("hook"))
            run(opt, params, {}, 1)
            hook.remove()
        assert opt.step(lambda: called.append("closure") or 2.5) == 2.5  # type: ignore[func-returns-value]
        opt.optim.step = lambda: called.append("step")
        opt.step()
    assert called == ["hook", "hook", "closure", "step"]
    assert [each.replays for each in made] == [2]


def test_a_step_that_was_patched_is_called_after_a_change_of_the_plan() -> None:
    params, called = new_params(), []
    with steps_recorded() as made:
        opt = ZeroRedundancyOptimizer(params, AdamW, **capturable()[1])
        step = opt.optim.step
        opt.optim.step = lambda: (called.append("step"), step())[1]
        run(opt, params, {2: CHANGES["a parameter is frozen"][0]}, 5)
    assert (called, made) == (["step"] * 5, [])


def test_a_step_that_a_factory_has_patched_is_called() -> None:
    params, called = new_params(), []

    def patched(params: Any, **options: Any) -> Any:
        made = AdamW(params, **options)
        step = made.step
        made.step = lambda: (called.append("step"), step())[1]
        return made

    with steps_recorded() as made:
        opt = ZeroRedundancyOptimizer(params, patched, layout="sliced", **capturable()[1])
        run(opt, params, {}, 5)
    assert (called, made) == (["step"] * 5, [])


def test_a_parameter_that_moves_to_another_group_is_seen() -> None:
    def move(opt: Any, _: Any) -> None:
        first, second = local_of(opt).param_groups
        second["params"].insert(0, first["params"].pop())

    seen = []
    for recorded in (False, True):
        params = new_params()
        groups = [{"params": params[:3], "weight_decay": 0.5}, {"params": params[3:]}]
        with steps_recorded() if recorded else nullcontext():
            opt = ZeroRedundancyOptimizer(groups, AdamW, **capturable()[1])
            seen.append(run(opt, params, {6: move}, 12)[0])
    assert_same(*seen)


def test_a_step_without_gradients_is_not_recorded() -> None:
    params = new_params()
    with steps_recorded() as made:
        opt = ZeroRedundancyOptimizer(params, AdamW, **capturable()[1])
        opt.zero_grad()
        for _ in range(3):
            opt.step()
    assert not made


def test_a_note_in_the_state_is_no_obstacle() -> None:
    def note(opt: Any, _: Any) -> None:
        for state in local_of(opt).state.values():
            state["note"] = "text"

    assert compare({4: note}) == [3]


@on_ranks(2)
def test_masters_are_stepped_on_by_graphs() -> None:
    seen = []
    for recorded in (False, True):
        with steps_recorded() if recorded else nullcontext():
            zero = {"precision": MixedPrecision()}
            setup = sharded("drop-in", MLP_PROBLEM.fresh().bfloat16(), capturable(), zero=zero)
            for step in range(9):
                setup.opt.zero_grad(set_to_none=False)
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
                setup.model(x.bfloat16()).square().mean().backward()
                setup.opt.step()
        seen.append(setup.params)
    assert_same(*seen)


def _elsewhere_in_secret(_: Any, params: list[nn.Parameter]) -> None:
    kept = [param.grad for param in params]
    new_gradients(None, params)
    params[0].__dict__["kept"] = kept


def test_these_tests_see_a_graph_that_is_stale() -> None:
    stale = mock.patch.object(step_graphs._Footprint, "__eq__", return_value=True)
    with stale, pytest.raises(AssertionError):
        compare({5: _elsewhere_in_secret})


def _compare_all(name: str) -> list[str]:
    warnings.simplefilter("ignore")
    refused = {mode for each, modes in REFUSED for mode in modes if each == name}
    with steps_recorded() as made:
        found = compared([name], kinds=[capturable()], modes=[m for m in ALL if m not in refused])
    if name == "every_model" and not any(each.replays for each in made):
        found.append("no step was replayed")
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name not in SOME)) for name in OF_ADAMW],
)
def test_every_scenario_is_equal_with_graphs(name: str) -> None:
    assert run_ranks(_compare_all, 2, name) == [[], []]
