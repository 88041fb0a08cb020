"""What an optimizer class looks at when it updates an element, found by trying it.

The class is run with its options on a few small tensors: as it is (all tensors in one optimizer),
with each tensor in an optimizer of its own, and with each tensor cut into slices as ranks would
hold them. What comes out is compared to the bit: parameters, state, and what is kept in groups.

- Slices give the same as the whole: the class is *element-wise*.
- Tensors apart give the same as tensors together, but slices do not: it is *per tensor*.
- Tensors apart give something else: it is *coupled* across tensors.
- It draws random numbers: no two ranks would draw what one would have drawn. Which of the three it
  is beyond that, is found out with the random numbers replaced by constants.
- It cannot be run on what we have for it: it stays *untried*.

Two small matrices take a step or two, which shows most differences; then two larger ones, of one
shape and in one group, take many steps, and some tensors of other sizes and dimensions a few.
Classes may treat large tensors otherwise: the last are large, and beyond every number among the
options that may be the size where that begins. Gradients differ in scale from tensor to tensor and
from step to step; one is missing once, one is zero, one is huge and one not finite; and a closure
is passed now and then.

It is to take less than 100 ms (benchmarks/probe.py). So nobody takes a step that cannot change the
verdict (`race`), and a class whose steps take long is left at small tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from shardstep.layouts.compare import DECIDED, HEAD, PARAMETER, RAISED, DrawsRandomNumbers, Race
from shardstep.layouts.constants import constants_everywhere, quick_constants
from shardstep.layouts.trial import (
    LARGE,
    OTHERS,
    PLAIN,
    SMALL,
    SMALL_OTHERS,
    TWINS,
    EvaluatesBetween,
    NotTried,
    Shapes,
    Trial,
    trials,
)
from shardstep.local.sandbox import sandbox
from shardstep.plan import Layout

Kind = Literal["element-wise", "per tensor", "coupled", "untried"]

STEPS = 40
"""How many steps a class has to be element-wise for: some begin with something else late."""

OTHER_STEPS = 7
"""How many steps the other shapes take."""

GLANCE = 2
"""How many steps show whether slices differ, for nearly all classes."""

FEWEST = 3
"""How many steps other shapes take if steps take long: gradients have been of all sizes then, and a
closure has been passed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found out about a class with its options.

    Attributes:
        kind: what an update of an element depends on.
        why: how that is known, in words.
        random: whether it draws random numbers.
        loose: whether it keeps state that belongs to no parameter.
        error: what it raised if it could not even be constructed.
        filled: whether that holds only if groups of which a rank has nothing are filled.
    """

    kind: Kind
    why: str
    random: bool = False
    loose: bool = False
    error: Exception | None = None
    filled: bool = False

    @property
    def layout(self) -> Layout | None:
        """The layout in which it can be divided among ranks; None if there is none."""
        layouts: dict[Kind, Layout] = {"element-wise": "sliced", "per tensor": "whole"}
        return layouts.get(self.kind)

    def __str__(self) -> str:
        return f"{self.kind}{' and random' if self.random else ''}: {self.why}"


def probe(
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    group_options: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
    sizes: tuple[int, ...] = (),
) -> Verdict:
    """Find out what `optimizer_class` looks at.

    The answer is the same in every process. Nothing that can be seen is left behind.

    Args:
        optimizer_class: the class, or whatever makes an optimizer out of groups and options.
        defaults: options that it is called with.
        group_options: options that its groups have of their own.
        dtype: of the parameters.
        devices: where to try it; further ones only if it does not run on those before.
        sizes: numbers of elements, rows or columns at which it may make a difference.
    """
    while isinstance(optimizer_class, functools.partial) and not optimizer_class.args:
        defaults = {**optimizer_class.keywords, **defaults}
        optimizer_class = optimizer_class.func
    if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize < 2:
        dtype = torch.float32
    error: Exception | None = None
    made = False
    for trial in trials(optimizer_class, defaults, group_options, dtype, devices, sizes):
        with sandbox(optimizer_class, trial.device), _one_thread():
            try:
                verdict = _judge(trial)
            except NotTried as failure:
                # What is reported is how far it came at best.
                if error is None or (failure.made and not made):
                    error, made = failure.error, failure.made
                continue
        filling = ["with a tensor without elements in empty groups"] if verdict.filled else []
        notes = ", ".join([*trial.notes, *filling])
        return replace(verdict, why=f"{verdict.why} ({notes})" if notes else verdict.why)
    assert error is not None
    stage = "a step of it" if made else "constructing it"
    return Verdict(
        "untried",
        f"{stage} on small tensors raised {type(error).__name__}: {error}",
        error=None if made else error.with_traceback(None),
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Large tensors are divided among threads, and the parts' ends are computed otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _judge(trial: Trial) -> Verdict:
    """Run the class in one way; if tensors seem coupled, with empty groups filled.

    Raises:
        NotTried: if it does not run in this way.
    """
    verdict = _judge_as_it_is(trial)
    if verdict.kind == "coupled" and PARAMETER not in verdict.why and trial.num_groups > 1:
        with contextlib.suppress(NotTried):
            other = _judge_as_it_is(replace(trial, filled=True))
            if other.kind != "coupled":
                return replace(other, filled=True)
            # What is in the way of it apart from that; not that it cannot be filled either.
            return verdict if RAISED in other.why else other
    return verdict


def _judge_as_it_is(trial: Trial) -> Verdict:
    try:
        try:
            return _compare(trial)
        except DrawsRandomNumbers:
            for constants in (quick_constants, constants_everywhere):
                with constants():
                    verdict = _compare(trial, watch=False)
                if verdict.kind != "coupled":
                    break
            return replace(verdict, random=True)
    except EvaluatesBetween as found:
        return Verdict("coupled", str(found))


def _compare(trial: Trial, watch: bool = True) -> Verdict:
    glance = _glance(trial, watch)
    unlike = glance.unlike if glance else None
    if glance and glance.coupled is not None:
        race, brief = glance, True
    elif glance and unlike is not None and glance.long:
        race, brief = Race(replace(trial, shapes=TWINS), watch, unlike), True
        race.go(DECIDED - GLANCE)
    else:
        race, brief = Race(trial, watch, unlike), False
        if not race.set_off(STEPS):
            raise NotTried(RuntimeError(f"no parameter changed in {STEPS} steps"), made=True)
        race.go(HEAD)
    coupled = race.coupled
    if coupled is None:
        coupled = _try_others(race, trial, watch, brief)
    if coupled is None and not brief:
        race.go(STEPS)
        coupled = race.coupled
    loose = bool(race.together.loose)
    if coupled is not None:
        why = f"with each tensor in an optimizer of its own, {coupled}"
        return Verdict("coupled", why, loose=loose)
    if trial.sparse:
        why = "a sparse gradient cannot be cut into slices"
        return Verdict("per tensor", why, loose=loose)
    if race.unlike is not None:
        why = f"with tensors cut into slices, {race.unlike}"
        return Verdict("per tensor", why, loose=loose)
    why = f"slices came to the same bits as whole tensors in {STEPS} steps"
    return Verdict("element-wise", why, loose=loose)


def _glance(trial: Trial, watch: bool) -> Race | None:
    """Run the class on small matrices for a step or two; None if nothing comes of that."""
    with contextlib.suppress(NotTried):
        race = Race(replace(trial, shapes=SMALL), watch)
        if race.set_off(GLANCE):
            race.go(GLANCE)
            return race
    return None


def _try_others(race: Race, trial: Trial, watch: bool, brief: bool) -> str | None:
    """Run the class on other shapes for a few steps.

    Whether slices have come to something else is noted in `race`, which need not go on for long
    then.

    Args:
        race: the one on matrices.
        trial: how the class is run.
        watch: whether to find out if random numbers are drawn.
        brief: whether steps take long, so that few have to do.

    Returns:
        How tensors apart differed from tensors together; None if they did not.
    """

    def run(shapes: Shapes) -> str | None:
        other = Race(replace(trial, shapes=shapes), watch, race.unlike)
        try:
            other.go(FEWEST if brief else OTHER_STEPS)
        finally:
            race.unlike = other.unlike  # also if it does not go all the way
        return other.coupled

    coupled = None
    if not trial.sparse:
        # What does not take some shapes, or gradients that are not finite, is not asked to.
        for shapes in (SMALL_OTHERS,) if brief else (OTHERS, PLAIN):
            with contextlib.suppress(NotTried):
                coupled = run(shapes)
                break
    for shapes in (LARGE, *trial.beyond_sizes):
        if coupled is None and race.unlike is None:
            # If this does not run here, on another device it may, and may not be element-wise.
            coupled = run(shapes)
    return coupled
