"""The probe: finds out by trial which layout an optimizer class admits.

The class runs on a few small tensors: all in one optimizer, each in its own, and cut into slices as
ranks would hold them. Parameters, state and group options are compared to the bit.

- Slices give the same as whole tensors: the class is *element-wise*.
- Tensors apart give the same as tensors together, but slices do not: it is *per tensor*.
- Tensors apart differ: it is *coupled*.
- It draws random numbers: ranks would draw others. Constants in their place show the rest.
- It does not run on these tensors: it is *untried*.

The stages below show most differences early. The largest tensors exceed every number of the class
that may be a size, and the last step every number that may count steps. benchmarks/probe.py
measures the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from shardstep.layouts.compare import Comparison, DrawsRandomNumbers, compare
from shardstep.layouts.recipe import Numbers, OptimizerRecipe
from shardstep.layouts.trial import (
    Cause,
    ConstantRandomNumbers,
    Coupled,
    Difference,
    Stage,
    Trial,
    TrialFailed,
    trials,
)
from shardstep.local.sandbox import sandbox
from shardstep.plan import Layout

SMALL = Stage(((17, 11), (13, 19)), steps=2, dealt=True)
"""Cheap for any class. Some keep a matrix with as many rows as a slice has elements."""

MATRICES = Stage(((33, 22), (33, 22)), steps=40)
"""Many steps, since some classes change their rule late. No multiples of a vector register."""

OTHERS = Stage(((139,), (), (12, 10, 3, 3)), steps=7, dealt=True, extreme=True)
"""Other numbers of dimensions."""

PLAIN = Stage(((19, 13), (13, 19)), steps=7, extreme=True)
"""In place of `OTHERS`, for classes that take matrices only."""

MORE = Stage(((5, 4, 7), (1, 140), (140, 1), (12, 11, 1, 1), (3, 2, 4, 3, 2)), steps=2)
"""Five tensors in a group: three and five dimensions, one row, one column, a 1x1 convolution."""

FEWER = replace(MORE, shapes=MORE.shapes[:-1])
"""In place of `MORE`, for classes that do not take five dimensions."""

LARGE = Stage(((144, 176), (131, 131)), steps=7)
"""Above known thresholds: 128 rows or columns, 4,096 elements, multiples of 16 and 256, square."""

ENOUGH_ELEMENTS = 16_384
"""Tensors for a size among the options have at least so many elements, as `LARGE` has."""

MANY_ROWS = 2**16
"""No class is expected to treat rows or columns differently beyond this number."""


BEYOND = 5
"""Steps beyond a number among the options that may count steps."""

NO_NUMBERS = Numbers()


class Kind(StrEnum):
    """The scope of an update: one element, its tensor, or all tensors."""

    ELEMENT_WISE = "element-wise"
    PER_TENSOR = "per tensor"
    COUPLED = "coupled"
    UNTRIED = "untried"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a probe.

    Attributes:
        why: the reason, in words that follow the name of the class.
        global_state: True if the class keeps state that belongs to no parameter.
        error: the exception of its constructor.
        fill_empty_groups: True if groups that are empty on a rank need a placeholder.
    """

    kind: Kind
    why: str
    difference: Difference | None = None
    random: bool = False
    global_state: bool = False
    error: Exception | None = None
    fill_empty_groups: bool = False

    @property
    def layout(self) -> Layout | None:
        """The layout in which the class can be sharded, if any."""
        layouts: dict[Kind, Layout] = {Kind.ELEMENT_WISE: "sliced", Kind.PER_TENSOR: "whole"}
        return layouts.get(self.kind)

    def __str__(self) -> str:
        return f"{self.kind}{' and random' if self.random else ''}: {self.why}"


def probe(
    recipe: OptimizerRecipe,
    dtype: torch.dtype = torch.float32,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
    numbers: Numbers = NO_NUMBERS,
) -> Verdict:
    """Find out the scope of an optimizer class's updates, on the first device on which it runs.

    `numbers` may be sizes and steps at which its rule changes. The verdict is the same in every
    process, and the probe has no side effects.
    """
    recipe = recipe.unwrapped()
    if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize < 2:
        dtype = torch.float32
    failure: TrialFailed | None = None
    for trial in trials(recipe, (dtype,), devices):
        with sandbox(recipe.optimizer_class, trial.device):
            try:
                verdict = _judge(trial, numbers)
            except TrialFailed as failed:
                # Report the trial that came furthest.
                if failure is None or (failed.constructed and not failure.constructed):
                    failure = failed
                continue
        filled = ["with placeholders in empty groups"] if verdict.fill_empty_groups else []
        notes = ", ".join([*trial.notes, *filled])
        return replace(verdict, why=f"{verdict.why}, probed {notes}" if notes else verdict.why)
    assert failure is not None
    stage = "a step" if failure.constructed else "constructing it"
    return Verdict(
        Kind.UNTRIED,
        f"{stage} on small tensors raised {type(failure.error).__name__}: {failure.error}",
        error=None if failure.constructed else failure.error.with_traceback(None),
    )


def _judge(trial: Trial, numbers: Numbers) -> Verdict:
    """Judge one trial. If empty groups may be to blame, judge it with placeholders in them."""
    verdict = _judge_random(trial, numbers)
    blameless = (None, Cause.PARAMETER, Cause.CLOSURE, Cause.COLLECTIVE)
    cause = verdict.difference.cause if verdict.difference else None
    if verdict.kind is not Kind.COUPLED or cause in blameless or trial.num_groups == 1:
        return verdict
    try:
        filled = _judge_random(replace(trial, fill_empty_groups=True), numbers)
    except TrialFailed:
        return verdict
    if filled.kind is not Kind.COUPLED:
        return replace(filled, fill_empty_groups=True)
    # The other obstacle, unless it is the placeholder.
    raised = filled.difference is not None and filled.difference.cause is Cause.RAISED
    return verdict if raised else filled


def _judge_random(trial: Trial, numbers: Numbers) -> Verdict:
    """Judge one trial, with constants if the class draws random numbers."""
    try:
        return _run_stages(trial, numbers)
    except DrawsRandomNumbers:
        with ConstantRandomNumbers():  # type: ignore[no-untyped-call]
            return replace(_run_stages(replace(trial, constants=True), numbers), random=True)


def _run_stages(trial: Trial, numbers: Numbers) -> Verdict:
    """Judge one trial by all stages, unless the class fails or draws random numbers."""
    found = Comparison(sliced=Difference(Cause.SPARSE) if trial.sparse else None)
    needs_matrices = False

    def fails(stage: Stage) -> bool:
        """Compare on tensors that a class may refuse: small ones, other dimensions, infinities."""
        try:
            compare(trial, stage, found)
        except TrialFailed:
            return True
        return False

    try:
        fails(SMALL)
        steps = max(MATRICES.steps, numbers.last_step + BEYOND)
        compare(trial, replace(MATRICES, steps=steps), found)
        if not found.moved:
            error = RuntimeError(f"no parameter changed in {steps} steps")
            raise TrialFailed(error, constructed=True)
        has_global_state = found.global_state
        if not trial.sparse:
            if fails(OTHERS):
                needs_matrices = not found.moved
                fails(PLAIN)
            if found.sliced is None and fails(MORE):
                fails(FEWER)
        for stage in (LARGE, *map(_stage_for_size, numbers.sizes)):
            if found.sliced is None or found.sliced.cause is Cause.SPARSE:
                # Must not fail: another device may run these, and not element-wise.
                compare(trial, stage, found)
    except Coupled as coupled:
        difference = coupled.difference
        return Verdict(Kind.COUPLED, difference.words(apart=True), difference)
    kind, why = Kind.ELEMENT_WISE, "updates each element separately"
    if found.sliced is not None:
        kind, why = Kind.PER_TENSOR, found.sliced.words(apart=False)
        if found.sliced.cause is Cause.RAISED and needs_matrices:
            why = "needs 2-D parameters"
    return Verdict(kind, why, found.sliced, global_state=has_global_state)


def _stage_for_size(size: int) -> Stage:
    """Return tensors with a multiple of `size` elements, rows and columns."""
    many = size > MANY_ROWS
    length = size * max(1 if many else 2, -(-ENOUGH_ELEMENTS // (2 * size)))
    return Stage(((2, length),) if many else ((length, 2), (2, length)), steps=LARGE.steps)
