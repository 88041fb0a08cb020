"""The probe sees through every class, is the same in every process, and leaves no trace."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import random
import sys
import warnings
from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
import toy_optimizers as toys
from problems import ELEMENT_WISE, Case
from torch import optim
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from toy_optimizers import Simple

from shardstep.layouts.choose import ELEMENT_WISE as KNOWN
from shardstep.layouts.probe import Verdict
from shardstep.layouts.probe import probe as probe_recipe
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.params.same_bits import same_bits

Options = dict[str, Any]


def probe(cls: Any, options: Options | None = None, *args: Any) -> Verdict:
    return probe_recipe(OptimizerRecipe(cls, options or {}), *args)


CASES = [
    pytest.param(*entry, kind, id=f"{Case(*entry)} is {kind}")
    for kind, entries in toys.VERDICTS.items()
    for entry in (each if isinstance(each, tuple) else (each, {}) for each in entries)
]


#: Known classes with all their options, of which the first of each class are not slow.
FIRST_FAST = [
    case if case.optimizer_class is not before else pytest.param(case, marks=pytest.mark.slow)
    for before, case in zip(
        [None, *(case.optimizer_class for case in ELEMENT_WISE)], ELEMENT_WISE, strict=False
    )
]


@pytest.mark.parametrize(("cls", "options", "kind"), CASES)
def test_a_class_is_seen_through(cls: Any, options: Options, kind: str) -> None:
    assert str(probe(cls, options)).startswith(f"{kind}: ")


@pytest.mark.parametrize("case", FIRST_FAST, ids=str)
def test_the_probe_agrees_with_the_known_classes(case: Case) -> None:
    assert case.optimizer_class in KNOWN
    assert probe(case.optimizer_class, case.options).kind == "element-wise"


def test_options_of_a_partial_and_of_the_group_count() -> None:
    for normalise, kind in ((True, "per tensor"), (False, "element-wise")):
        made = functools.partial(toys.GroupDecides, normalise=normalise)
        assert probe(made).kind == kind
        assert probe(functools.partial(made, lr=0.2)).kind == kind
        recipe = OptimizerRecipe(toys.GroupDecides, {}, {"normalise": normalise})
        assert probe_recipe(recipe).kind == kind


def test_the_dtype_of_the_parameters_counts() -> None:
    rounds_randomly = toys.by_direction(
        "RoundsRandomly", lambda p, g: g + torch.rand_like(g) if p.dtype is torch.bfloat16 else g
    )
    assert not probe(rounds_randomly, {}, torch.float32).random
    assert probe(rounds_randomly, {}, torch.bfloat16).random
    assert probe(optim.AdamW, {}, torch.complex64).kind == "element-wise"
    assert probe(optim.AdamW, {}, torch.int8).kind == "element-wise"


def test_options_that_only_other_devices_have_are_left_out() -> None:
    verdict = probe(optim.Adam, {"capturable": True})
    assert verdict.kind == "element-wise"
    assert "probed without capturable" in verdict.why


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (optim.Muon, "needs 2-D parameters"),
        (toys.TrustRatio, "updates each tensor as a whole"),
        (toys.Hoarder, "keeps state that does not split with its tensor"),
        (optim.SparseAdam, "takes sparse gradients, which are not sliced"),
        (toys.Distance, "its update of a tensor depends on others"),
        (toys.CountsByParameter, "its group option 'updates' depends on all tensors"),
        (toys.CountsItsParameters, "its global state depends on all tensors"),
        (toys.EvaluatesTwice, "a step evaluates its closure more than once"),
    ],
)
def test_the_reason_is_in_words(cls: Any, why: str) -> None:
    assert probe(cls).why.startswith(why)


def test_large_tensors_are_not_judged_by_small_ones() -> None:
    """Kernels for large tensors may be missing here, and be there on another device."""

    class RunsOnSmallTensors(Simple):
        def direction(self, p: torch.Tensor, grad: torch.Tensor, group: Any) -> torch.Tensor:
            if p.numel() >= 4096:
                raise NotImplementedError("no kernel for this device")
            return grad

    verdict = probe(RunsOnSmallTensors)
    assert verdict.kind == "untried"
    assert "no kernel for this device" in verdict.why


@pytest.mark.parametrize(
    ("cls", "most"),
    [(toys.Momentum, 370), (toys.TrustRatio, 80), (toys.GlobalClip, 5)],
)
def test_few_steps_are_taken(cls: type[Optimizer], most: int) -> None:
    """benchmarks/probe.py takes the time."""
    taken = 0

    class Counted(cls):  # type: ignore[valid-type, misc]
        def step(self, closure: Any = None) -> Any:
            nonlocal taken
            taken += 1
            return super().step(closure)

    assert probe(Counted).kind == probe(cls).kind
    assert 0 < taken <= most


def test_the_verdict_does_not_depend_on_the_random_state_of_the_process() -> None:
    verdicts = []
    for seed in range(3):
        random.seed(seed)
        torch.manual_seed(seed)
        verdicts.append([probe(cls) for cls in (toys.DrawsFromPython, toys.Noisy, toys.NoisyTrust)])
    assert verdicts[0] == verdicts[1] == verdicts[2]


def test_it_runs_wherever_the_caller_is() -> None:
    with torch.inference_mode():
        assert probe(toys.Momentum).kind == "element-wise"
    with torch.device("meta"):
        assert probe(toys.Momentum).kind == "element-wise"


def test_one_nan_is_the_other() -> None:
    nan, other = torch.tensor([0x7FC00000, 0x7FFF0000], dtype=torch.int32).view(torch.float32)
    one = torch.tensor([0.0, nan, 1.0])
    assert same_bits(one, torch.tensor([0.0, other, 1.0]))
    assert not same_bits(one, torch.tensor([-0.0, other, 1.0]))
    assert not same_bits(one, torch.tensor([0.0, 1.0, 1.0]))


# ------------------------------------------------------------------------------------ no trace


class Leaves(Simple):
    """Leaves traces wherever it can."""

    made = 0
    names: list[str] = []  # noqa: RUF012 - on purpose
    seen: dict[str, int] = {}  # noqa: RUF012
    counted: Counter[str] = Counter()  # noqa: RUF012
    latest: deque[int] = deque([1, 2, 3], maxlen=3)  # noqa: RUF012
    nested = {"deep": defaultdict(list, at=[[0]])}  # noqa: RUF012
    total = torch.zeros(2)

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        Leaves.made += 1
        Leaves.counted["made"] += 1
        Leaves.latest.append(Leaves.made)
        Leaves.nested["deep"]["at"][0].append(Leaves.made)
        Leaves.nested["deep"]["there"].append([Leaves.made])
        Leaves.total += 1
        Leaves.names.append("one more")
        Leaves.seen["times"] = Leaves.made
        Leaves.added = True  # type: ignore[attr-defined]
        warnings.warn("constructed", stacklevel=1)
        logging.getLogger("traces").error("constructed")
        print("constructed")

    def before(self) -> None:
        random.random()
        np.random.rand()  # noqa: NPY002 - on purpose
        torch.rand(3)


def test_nothing_is_left_behind(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []
    hook = register_optimizer_step_pre_hook(lambda *args: calls.append(args))
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    own = dict(vars(Leaves))
    with warnings.catch_warnings(record=True) as warned, torch.no_grad():
        warnings.simplefilter("always")
        assert probe(Leaves).random
        assert not torch.is_grad_enabled()
    hook.remove()
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert (calls, warned, caplog.records, tuple(capfd.readouterr())) == ([], [], [], ("", ""))
    assert dict(vars(Leaves)) == own
    assert (Leaves.made, Leaves.names, Leaves.seen, Leaves.counted) == (0, [], {}, {})
    assert (Leaves.latest, Leaves.nested) == (deque([1, 2, 3]), {"deep": {"at": [[0]]}})
    assert Leaves.total.tolist() == [0, 0]
    assert not torch.is_warn_always_enabled()


def test_nothing_is_left_behind_by_several_threads() -> None:
    def found() -> list[Any]:
        hooks = len(torch_optimizer._global_optimizer_pre_hooks)
        settings = [torch.get_num_threads(), torch.is_warn_always_enabled(), warnings.filters[:]]
        return [sys.stdout, sys.stderr, logging.root.manager.disable, hooks, *settings]

    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        before = found()
        classes: list[Any] = [toys.Momentum, toys.TrustRatio, toys.Momentum, toys.TrustRatio]
        with concurrent.futures.ThreadPoolExecutor(len(classes)) as threads:
            verdicts = list(threads.map(lambda cls: probe(cls).kind, classes))
        assert verdicts == ["element-wise", "per tensor"] * 2
        assert found() == before
    finally:
        handle.remove()


def test_a_tensor_given_as_an_option_is_not_written_to() -> None:
    class Halves(Simple):
        def before(self) -> None:
            for group in self.param_groups:
                group["lr"] *= 0.5

    lr = torch.tensor(0.1)
    assert probe_recipe(OptimizerRecipe(Halves, {"lr": lr}, {"betas": [lr]})).kind == "element-wise"
    assert lr.item() == torch.tensor(0.1).item()
