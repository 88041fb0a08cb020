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

Two matrices take many steps, then some tensors of other sizes and dimensions take a few. Classes
may treat large tensors otherwise: the last are large, and beyond every number among the options
that may be the size where that begins. Gradients differ in scale from tensor to tensor and from
step to step; one is missing once, and a closure is passed now and then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardstep.layout.same import fits, same, same_bits
from shardstep.layout.trial import (
    LARGE,
    OTHERS,
    NotTried,
    Part,
    Run,
    SeveralEvaluations,
    Trial,
    entire,
    start,
    trials,
)
from shardstep.layout.unseen import unseen
from shardstep.plan import ALIGNMENT, Interval, Layout

Kind = Literal["element-wise", "per tensor", "coupled", "untried"]

STEPS = 40
"""How many steps a class has to be element-wise for: some begin with something else late."""

DECIDED = 12
"""After so many steps, a class that has not been element-wise is tried no further."""

OTHER_STEPS = 7
"""How many steps the other shapes take."""

SLICES = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found out about a class with its options.

    Attributes:
        kind: what an update of an element depends on.
        why: how that is known, in words.
        random: whether it draws random numbers.
        loose: whether it keeps state that belongs to no parameter.
        error: what it raised if it could not even be constructed.
    """

    kind: Kind
    why: str
    random: bool = False
    loose: bool = False
    error: Exception | None = None

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
        with unseen(optimizer_class, trial.device), _one_thread():
            try:
                verdict = _judge(trial)
            except NotTried as failure:
                # What is reported is how far it came at best.
                if error is None or (failure.made and not made):
                    error, made = failure.error, failure.made
                continue
        notes = f" ({', '.join(trial.notes)})" if trial.notes else ""
        return replace(verdict, why=f"{verdict.why}{notes}")
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
    """Run the class in one way.

    Raises:
        NotTried: if it does not run in this way.
    """
    try:
        try:
            return _compare(trial)
        except _DrawsRandomNumbers:
            constants: Any = _Constants
            with constants():
                return replace(_compare(trial, watch=False), random=True)
    except SeveralEvaluations:
        why = (
            "a step evaluates its closure more than once, and between two evaluations a rank has "
            "moved its own parameters only"
        )
        return Verdict("coupled", why)


def _compare(trial: Trial, watch: bool = True) -> Verdict:
    race = _Race(trial, watch)
    found = race.go(STEPS)
    if not race.moved:
        raise NotTried(RuntimeError(f"no parameter changed in {STEPS} steps"), made=True)
    loose = bool(race.together.loose)
    if found.coupled is None and not trial.sparse:
        with contextlib.suppress(NotTried):  # what does not take these shapes is not asked to
            found = found.beside(_Race(replace(trial, shapes=OTHERS), watch).go(OTHER_STEPS))
    for shapes in (LARGE, *trial.beyond_sizes):
        if found.coupled is None and found.sliced_unlike is None:
            # If this does not run here, on another device it may, and may not be element-wise.
            found = _Race(replace(trial, shapes=shapes), watch).go(OTHER_STEPS)
    return found.verdict(trial, loose)


@dataclass(frozen=True, slots=True)
class _Found:
    """How tensors apart, and slices, differed from tensors together; None if they did not."""

    coupled: str | None
    sliced_unlike: str | None

    def beside(self, other: _Found) -> _Found:
        """What was found on these tensors or on those."""
        return _Found(self.coupled or other.coupled, self.sliced_unlike or other.sliced_unlike)

    def verdict(self, trial: Trial, loose: bool) -> Verdict:
        if self.coupled is not None:
            why = f"with each tensor in an optimizer of its own, {self.coupled}"
            return Verdict("coupled", why, loose=loose)
        if trial.sparse:
            why = "a sparse gradient cannot be cut into slices"
            return Verdict("per tensor", why, loose=loose)
        if self.sliced_unlike is not None:
            why = f"with tensors cut into slices, {self.sliced_unlike}"
            return Verdict("per tensor", why, loose=loose)
        why = f"slices came to the same bits as whole tensors in {STEPS} steps"
        return Verdict("element-wise", why, loose=loose)


class _DrawsRandomNumbers(Exception):
    """The class has drawn from a source that ranks do not share."""


class _Race:
    """Tensors together, apart and in slices, step by step.

    Args:
        trial: how the class is run.
        watch: whether to find out if random numbers are drawn.

    Attributes:
        together: the optimizer over all tensors.
        moved: whether any parameter has changed.
    """

    def __init__(self, trial: Trial, watch: bool) -> None:
        self._trial = trial
        self._watch = watch
        self.together = Run(trial, entire(trial.shapes), seeded=True)
        self.moved = False

    def go(self, steps: int) -> _Found:
        """Run until it is known what the class looks at.

        Raises:
            NotTried: if it does not run even with tensors together.
            _DrawsRandomNumbers: if it does.
        """
        trial, seeded = self._trial, not self._watch
        apart: list[Run] = []
        slices: list[Run] = []
        held = _cut(self._trial.shapes)
        coupled = unlike = None
        # What a class raises here it has not raised for tensors together.
        try:
            apart = [Run(trial, [part], seeded) for part in entire(trial.shapes)]
        except NotTried as failure:
            coupled = _raised(failure)
        try:
            slices = [] if trial.sparse else [Run(trial, parts, seeded) for parts in held]
        except NotTried as failure:
            unlike = _raised(failure)
        for step in range(1, steps + 1):
            if self.together.advance() and self._watch:
                raise _DrawsRandomNumbers
            self._look()
            if coupled is None:
                coupled = self._follow(step, apart)
            if coupled is not None:
                break
            if unlike is None and slices:
                unlike = self._follow_slices(step, slices, held)
            if (unlike is not None or not slices) and step >= DECIDED:
                break
        if coupled is None:
            coupled = self._compare_rest(apart)
        if unlike is None and slices:
            unlike = self._compare_states(slices, held) or self._compare_groups(slices)
        return _Found(coupled, unlike)

    def _look(self) -> None:
        if not self.moved:
            starts = [start(self._trial, n) for n in range(len(self._trial.shapes))]
            ends = [param.detach().cpu() for param in self.together.params]
            self.moved = not all(map(same_bits, starts, ends))

    def _follow(self, step: int, apart: Sequence[Run]) -> str | None:
        for number, run in enumerate(apart):
            try:
                run.advance()
            except NotTried as failure:
                return _raised(failure)
            if not same_bits(self.together.params[number], run.params[0]):
                return f"a parameter differed after step {step}"
        return None

    def _compare_rest(self, apart: Sequence[Run]) -> str | None:
        for number, run in enumerate(apart):
            if not same(self.together.state(number), run.state(0)):
                return "the state differed"
        return self._compare_groups(apart)

    def _compare_groups(self, runs: Sequence[Run]) -> str | None:
        """Every rank has all groups, and has to keep the same in them."""
        if any(not same(self.together.groups, run.groups) for run in runs):
            return "what it keeps in its groups differed"
        if any(not same(self.together.loose, run.loose) for run in runs):
            return "state that belongs to no parameter differed"
        return None

    def _follow_slices(
        self, step: int, slices: Sequence[Run], held: Sequence[Sequence[Part]]
    ) -> str | None:
        for run in slices:
            try:
                run.advance()
            except NotTried as failure:
                return _raised(failure)
        for number, whole in enumerate(self.together.params):
            pieces = [run.params[position] for run, position in _pieces(number, slices, held)]
            joined = torch.cat([piece.reshape(-1) for piece in pieces])
            if not same_bits(joined, whole.reshape(-1)):
                return f"a parameter differed after step {step}"
        return None

    def _compare_states(self, slices: Sequence[Run], held: Sequence[Sequence[Part]]) -> str | None:
        for number, shape in enumerate(self._trial.shapes):
            pieces = _pieces(number, slices, held)
            states = [run.state(position) for run, position in pieces]
            shapes = [tuple(run.params[position].shape) for run, position in pieces]
            if not fits(self.together.state(number), states, shape, shapes):
                return "the state differed"
        return None


def _raised(failure: NotTried) -> str:
    return f"it raised {type(failure.error).__name__}: {failure.error}"


def _cut(shapes: Sequence[tuple[int, ...]]) -> list[list[Part]]:
    """The slices that each of a few ranks would hold."""
    held: list[list[Part]] = [[] for _ in range(SLICES)]
    for number, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        units = -(-numel // ALIGNMENT)
        # At odd units: nothing that works in larger blocks is to be cut between two of them.
        cuts = [0, *(units * cut // SLICES | 1 for cut in range(1, SLICES)), units]
        bounds = [min(numel, ALIGNMENT * cut) for cut in cuts]
        for rank, (first, last) in enumerate(pairwise(bounds)):
            if first < last:
                held[rank].append((number, Interval(first, last)))
    return held


def _pieces(
    number: int, slices: Sequence[Run], held: Sequence[Sequence[Part]]
) -> list[tuple[Run, int]]:
    """Who has a slice of a tensor, and where."""
    return [
        (run, position)
        for run, parts in zip(slices, held, strict=True)
        for position, (tensor, _) in enumerate(parts)
        if tensor == number
    ]


class _Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this lasts, torch's random numbers are constants: what is left is how they are used."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(0.25 if tensor.is_floating_point() else 0)
        return out
