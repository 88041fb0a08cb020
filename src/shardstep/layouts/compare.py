"""Comparison of tensors together, apart and in slices, to the bit.

One optimizer holds all tensors. Others share its work: one per tensor, and one per rank that would
hold slices. All take the same steps, and must end with the same parameters, state and options.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations, zip_longest
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.layouts.trial import (
    Cause,
    Coupled,
    Difference,
    Gradients,
    Part,
    Run,
    Stage,
    Trial,
    TrialFailed,
    middle,
    part,
    trials,
)
from shardstep.local.sandbox import sandbox
from shardstep.params.same_bits import fits, same, same_bits
from shardstep.plan import Interval

DECIDED = 12
"""Steps after which a class that is not element-wise is not compared further."""

GUARDED = 2
"""The first steps, in which collectives are refused. Later ones are not slowed down by a mode."""


@dataclass(slots=True)
class Comparison:
    """The outcome of comparisons so far, unless tensors are coupled.

    Attributes:
        sliced: the difference between slices and tensors together, in any comparison.
        moved: True if any parameter changed in the last one.
        global_state: True if the class kept state there that belongs to no parameter.
    """

    sliced: Difference | None = None
    moved: bool = False
    global_state: bool = False


class DrawsRandomNumbers(Exception):
    """The class uses random generators that ranks do not share."""


def compare(trial: Trial, stage: Stage, found: Comparison) -> None:
    """Run a class on tensors together, apart and in slices, unless their difference is known.

    Raise `Coupled` if tensors apart differ from tensors together, and `TrialFailed` if a step with
    all tensors together raises.
    """
    found.moved = False
    entire = [(n, Interval(0, torch.Size(shape).numel())) for n, shape in enumerate(stage.shapes)]
    together = Run(trial, stage, entire, seed=True)
    apart = _Shared(together, [[each] for each in entire])
    slices = _Shared(together, cut(stage.shapes), found.sliced)
    starts = [param.detach().clone() for param in together.params]
    for step in range(stage.steps):
        gradients = stage.gradients(step, trial.dtypes)
        guard: Any = _NoCollectives if step < GUARDED else contextlib.nullcontext
        with guard():
            drew = together.advance(step, gradients)
        if drew and not trial.constants:
            raise DrawsRandomNumbers
        found.moved = found.moved or not all(map(same_bits, starts, together.params))
        slices.advance(step, gradients)
        found.sliced = slices.difference
        apart.advance(step, gradients)
        if apart.difference or (slices.difference and found.moved and step + 1 >= DECIDED):
            break
    slices.compare_rest(cut_state=True)
    apart.compare_rest(cut_state=False)
    found.sliced = slices.difference
    found.global_state = bool(together.global_state)
    if apart.difference is not None:
        raise Coupled(apart.difference)


@dataclass(eq=False)
class _Shared:
    """Optimizers that share the work of `together`, each on one of `held`.

    They are compared with it up to the first difference, which may be known from the start.
    """

    together: Run
    held: Sequence[Sequence[Part]]
    difference: Difference | None = None
    runs: list[Run] = field(default_factory=list)

    def advance(self, step: int, gradients: Gradients) -> None:
        """Take the step that `together` has just taken, and compare parameters."""
        if self.difference is not None:
            return
        trial, stage, whole = self.together.trial, self.together.stage, self.together.params
        try:
            if not self.runs:
                self.runs = [Run(trial, stage, parts, trial.constants) for parts in self.held]
            for run in self.runs:
                run.advance(step, gradients)
                for param, (number, interval) in zip(run.params, run.parts, strict=True):
                    if not same_bits(param, part(whole[number], interval)):
                        self.difference = Difference(Cause.PARAMETER, f"from step {step + 1}")
                        return
        except TrialFailed as failure:
            error = failure.error
            self.difference = Difference(Cause.RAISED, f"{type(error).__name__}: {error}")

    def compare_rest(self, cut_state: bool) -> None:
        """Compare state, which is cut like its tensor if `cut_state`, and options."""
        if self.difference is None:
            self.difference = self._differing_state(cut_state) or self._differing_options()

    def _differing_state(self, cut_state: bool) -> Difference | None:
        for number in range(len(self.together.params)):
            [(whole, shape)] = self.together.states(number)
            pieces = [piece for run in self.runs for piece in run.states(number)]
            states, shapes = zip(*pieces, strict=True)
            if not (fits(whole, states, shape, shapes) if cut_state else same(whole, *states)):
                return Difference(Cause.STATE)
        return None

    def _differing_options(self) -> Difference | None:
        # Every rank has all groups, and must keep the same in them.
        for run in self.runs:
            for whole, own in zip(self.together.group_options, run.group_options, strict=True):
                # The first key whose place or value differs.
                for one, other in zip_longest(whole.items(), own.items()):
                    if not same(one, other):
                        return Difference(Cause.GROUP_OPTION, repr(str((one or other)[0])))
        if any(not same(self.together.global_state, run.global_state) for run in self.runs):
            return Difference(Cause.GLOBAL_STATE)
        return None


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which a collective raises `Coupled` before any rank takes part in it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise Coupled(Difference(Cause.COLLECTIVE))
        return func(*args, **(kwargs or {}))


def cut(shapes: Sequence[tuple[int, ...]]) -> list[list[Part]]:
    """Cut every tensor that is not small in two. Return the parts that each rank holds.

    A rank holds the second half of one tensor and the first half of the next.
    """
    held: list[list[Part]] = [[]]
    for number, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        bounds = sorted({0, middle(numel), numel})
        first, *rest = (Interval(*ends) for ends in pairwise(bounds))
        held[-1].append((number, first))
        held += [[(number, interval)] for interval in rest]
    return held


MIXED = Stage(((12, 10), (12, 10)), steps=3, step_scales=(1e-5, 1.0, 1e-2))
"""Some gradients are small to one dtype only. They come first, before means include others."""


def incompatible_dtypes(
    recipe: OptimizerRecipe,
    dtypes: Sequence[torch.dtype],
    devices: Sequence[torch.device],
    fill_empty_groups: bool,
) -> tuple[torch.dtype, torch.dtype] | None:
    """Return two dtypes that tensors of one group must not have together, or None.

    torch's Adafactor, for example, derives its epsilon from the first tensor of a group, which
    depends on the rank.
    """
    for pair in permutations(dtypes, 2):
        for trial in trials(recipe, pair, devices):
            if trial.sparse:
                continue
            with sandbox(recipe.optimizer_class, trial.device):
                trial = replace(trial, fill_empty_groups=fill_empty_groups)
                try:
                    compare(trial, MIXED, Comparison(sliced=Difference(Cause.PARAMETER)))
                except (DrawsRandomNumbers, TrialFailed):
                    continue
                except Coupled:
                    return pair
            break
    return None
