"""Runs a class on tensors together, apart and in slices, and says where the latter two differ.

One optimizer over all tensors goes ahead, and what it comes to at each step is remembered. Those
that share its work follow: each tensor in an optimizer of its own, and slices as ranks would hold
them. Who has nothing to say for the time being waits, and takes the steps that he has missed when
it turns out that they matter:

- As long as no parameter has moved, nobody follows.
- As long as slices come to the same, tensors apart need not follow beyond the first few steps: the
  slices of a tensor are apart from other tensors too.
- Once slices have come to something else, they have said all they can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardstep.layouts.trial import NotTried, Part, Run, Shapes, Trial, entire, part, start
from shardstep.params.same_bits import fits, same, same_bits
from shardstep.plan import ALIGNMENT, Interval

HEAD = 4
"""Tensors apart follow for so many steps in any case."""

DECIDED = 12
"""After so many steps, a class that has not been element-wise is tried no further."""

COUNTED = 1
"""After so many steps, calls of torch are counted in one: the first may prepare things that a
process prepares once, and ranks have to count alike."""

MANY_CALLS = 300
"""Beyond so many calls in that one, for two small matrices, the steps of a class take long."""


PARAMETER = "a parameter differed after step"
"""What is said to have differed where an update has: no empty group is to blame for that."""


RAISED = "it raised"
"""What is said where it has."""


class DrawsRandomNumbers(Exception):
    """The class has drawn from a source that ranks do not share."""


class Race:
    """Tensors together, apart and in slices, as far as it takes to tell them from each other.

    Args:
        trial: how the class is run.
        watch: whether to find out if random numbers are drawn.
        unlike: how slices are known to differ already; they are left out then.

    Attributes:
        together: the optimizer over all tensors.
        unlike: how slices differed from whole tensors; None if they did not.

    Raises:
        NotTried: if the class cannot be made for all tensors together.
    """

    def __init__(self, trial: Trial, watch: bool, unlike: str | None = None) -> None:
        self._trial = trial
        self._watch = watch
        self.together = Run(trial, entire(trial.shapes), seeded=True)
        self.unlike = unlike
        self._course: list[list[torch.Tensor]] = []
        self._counter = _Counter()
        self._apart = _Shared(self.together, trial, [[p] for p in entire(trial.shapes)], not watch)
        self._slices = _Shared(self.together, trial, cut(trial.shapes), not watch)

    @property
    def coupled(self) -> str | None:
        """How tensors apart differed from tensors together; None if they did not."""
        return self._apart.difference

    @property
    def long(self) -> bool:
        """Whether steps take long, counted in calls: ranks have to agree, and clocks do not."""
        return self._counter.count > MANY_CALLS

    def set_off(self, steps: int) -> bool:
        """Let the first one go alone until a parameter moves, up to step `steps`.

        Returns:
            Whether one has.

        Raises:
            NotTried: if the class does not run even with tensors together.
            DrawsRandomNumbers: if it does.
        """
        starts = [start(self._trial, number) for number in range(len(self._trial.shapes))]
        while len(self._course) < steps:
            self._advance()
            if not all(map(same_bits, starts, (param.cpu() for param in self._course[-1]))):
                return True
        return False

    def go(self, steps: int) -> None:
        """Go on up to step `steps`, or until it is known what the class looks at.

        Raises:
            NotTried: if the class does not run even with tensors together.
            DrawsRandomNumbers: if it does.
        """
        self._follow()
        while len(self._course) < steps and self.coupled is None:
            if not self._slices_matter and len(self._course) >= DECIDED:
                break
            self._advance()
            self._follow()
        self._compare_rest()

    def _advance(self) -> None:
        counting = len(self._course) == COUNTED
        with self._counter if counting else contextlib.nullcontext():
            drew = self.together.advance()
        if drew and self._watch:
            raise DrawsRandomNumbers
        self._course.append([param.detach().clone() for param in self.together.params])

    @property
    def _slices_matter(self) -> bool:
        return self.unlike is None and not self._trial.sparse

    def _follow(self) -> None:
        if self._slices_matter:
            self._slices.follow(self._course)
            self.unlike = self._slices.difference
        self._apart.follow(self._course[:HEAD] if self._slices_matter else self._course)

    def _compare_rest(self) -> None:
        """Compare state, and what is kept in groups, of those that have got there."""
        if self._slices_matter:
            self._slices.compare_rest(cut_too=True)
            self.unlike = self._slices.difference
        if not self._slices_matter:
            self._apart.follow(self._course)
        if self._apart.steps == len(self._course):
            self._apart.compare_rest(cut_too=False)


class _Shared:
    """The work of one optimizer shared by several.

    Args:
        whole: the one, over all tensors.
        trial: how the class is run.
        held: what each of the several is given.
        seeded: see `Run`.

    Attributes:
        steps: how many they have taken.
        difference: how they came to something else, or failed; None if they did not.
    """

    def __init__(
        self, whole: Run, trial: Trial, held: Sequence[Sequence[Part]], seeded: bool
    ) -> None:
        self._whole = whole
        self._trial = trial
        self._held = held
        self._seeded = seeded
        self._runs: list[Run] = []
        self.steps = 0
        self.difference: str | None = None

    def follow(self, course: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take the steps that `course` has more; it says what parameters were after each."""
        if self.difference is not None:
            return
        # What a class raises here it has not raised for tensors together.
        try:
            if not self._runs:
                self._runs = [Run(self._trial, parts, self._seeded) for parts in self._held]
            while self.difference is None and self.steps < len(course):
                self._step(course[self.steps])
        except NotTried as failure:
            self.difference = f"{RAISED} {type(failure.error).__name__}: {failure.error}"

    def _step(self, expected: Sequence[torch.Tensor]) -> None:
        self.steps += 1
        for run, parts in zip(self._runs, self._held, strict=True):
            run.advance()
            for param, (number, interval) in zip(run.params, parts, strict=True):
                if not same_bits(param, part(expected[number], interval)):
                    self.difference = f"{PARAMETER} {self.steps}"
                    return

    def compare_rest(self, cut_too: bool) -> None:
        """Compare all but parameters; the one has to have taken as many steps.

        Args:
            cut_too: whether state has to be such that it can be cut like its tensor.
        """
        if self.difference is None:
            self.difference = self._differing_state(cut_too) or self._differing_groups()

    def _differing_state(self, cut_too: bool) -> str | None:
        for number, shape in enumerate(self._trial.shapes):
            pieces = [
                (run.state(position), tuple(run.params[position].shape))
                for run, parts in zip(self._runs, self._held, strict=True)
                for position, (tensor, _) in enumerate(parts)
                if tensor == number
            ]
            states, shapes = [state for state, _ in pieces], [shape for _, shape in pieces]
            whole = self._whole.state(number)
            if not (fits(whole, states, shape, shapes) if cut_too else same(whole, *states)):
                return "the state differed"
        return None

    def _differing_groups(self) -> str | None:
        """Every rank has all groups, and has to keep the same in them."""
        for run in self._runs:
            for whole, own in zip(self._whole.groups, run.groups, strict=True):
                if not same(whole, own):
                    return f"what it keeps in its groups differed ({_first_unlike(whole, own)!r})"
        if any(not same(self._whole.loose, run.loose) for run in self._runs):
            return "state that belongs to no parameter differed"
        return None


def _first_unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first key that the other does not have in that place, or has something else under."""
    places = zip_longest(one.items(), other.items())
    return next(str((here or there)[0]) for here, there in places if not same(here, there))


class _Counter(TorchFunctionMode):
    """Counts what is called of torch, and leaves it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def cut(shapes: Shapes) -> list[list[Part]]:
    """The slices that ranks would hold: the end of a tensor, small ones, the start of the next.

    The first and the last rank hold a slice of one tensor and nothing of others.
    """
    held: list[list[Part]] = [[]]
    for number, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        units = -(-numel // ALIGNMENT)
        # At odd units: nothing that works in larger blocks is to be cut between two of them.
        bounds = sorted({0, min(numel, ALIGNMENT * (units // 2 | 1)), numel})
        first, *rest = (Interval(*ends) for ends in pairwise(bounds))
        held[-1].append((number, first))
        held += [[(number, interval)] for interval in rest]
    return held
