"""Trials of an optimizer class: its tensors, gradients and options, and one run of it.

A run notices random numbers, and can replace them by constants.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any, Literal, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.local.empty_groups import empty_param, fill_empty_groups
from shardstep.local.multi_class import extras, global_state, group_options
from shardstep.local.train_eval import set_mode, start_training
from shardstep.params.inputs import check_optimizer
from shardstep.params.same_bits import same_bits
from shardstep.plan import ALIGNMENT, Interval

Gradients = Sequence[torch.Tensor | None]

Closures = Literal["now and then", "never", "always"]

Part = tuple[int, Interval]
"""The number of a tensor, and some of its elements."""

TENSOR_SCALES = (1.0, 20.0, 0.05, 3.0, 0.3)
"""Gradients differ in scale between tensors, so a norm over several shows."""

STEP_SCALES = (1.0, 0.2, 4.0)
"""Gradients differ in scale between steps, so norms cross the bounds that they are clipped at."""

MISSING = {2: 1, 5: 1, 8: 0}
"""Steps at which a tensor has no gradient, with its number."""

REPEATS = range(12, 24)
TURN = 20
"""Steps in which the first slice of a tensor has one gradient, and from `TURN` on its opposite.

The second slice has new gradients. So a class that compares directions finds others in slices.
"""

TINY, SPIKE, NOT_FINITE, ZEROS = -6, -4, -3, -1
"""Steps with extreme gradients, from the end.

Those that leave NaNs in parameters come late. Zeros do if a class divides by their norm.
"""

MODE_STEP = 2
"""Before this step, a class with modes switches to `eval` and back."""

SWITCHES = ("capturable", "fused", "foreach", "differentiable")
"""Options that choose an implementation. Not every device has all of them."""


def middle(numel: int) -> int:
    """Return where a tensor is cut: at an odd number of units, so that no larger block ends there.

    A small tensor is not cut.
    """
    return min(numel, ALIGNMENT * (-(-numel // ALIGNMENT) // 2 | 1))


def _clear_slice(tensor: torch.Tensor) -> None:
    """Set the first slice, and more, to zero, but not all of the tensor."""
    tensor.view(-1)[: -ALIGNMENT // 2] = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """The tensors of one comparison.

    They are `dealt` to all groups, or the first group has all: classes may combine the matrices of
    a group. `extreme` gradients are tiny, huge, zero or not finite in some steps.
    """

    shapes: tuple[tuple[int, ...], ...]
    steps: int
    dealt: bool = False
    extreme: bool = False
    step_scales: tuple[float, ...] = STEP_SCALES

    def starts(self, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Return the initial values of the tensors, whose dtypes repeat."""
        starts = [self._draw(n, -1, dtypes) * 0.1 for n in range(len(self.shapes))]
        if self.extreme:
            _clear_slice(starts[0])
        return starts

    def gradients(self, step: int, dtypes: Sequence[torch.dtype]) -> Gradients:
        """Return the gradients of one step."""
        return [
            None if MISSING.get(step) == n else self._gradient(n, step, dtypes)
            for n in range(len(self.shapes))
        ]

    def _gradient(self, number: int, step: int, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
        grad = self._draw(number, step, dtypes)
        if step in REPEATS:
            again = self._draw(number, REPEATS.start, dtypes) * (1 if step < TURN else -1)
            first = slice(middle(grad.numel()))
            grad.view(-1)[first] = again.view(-1)[first]
        scale = self.step_scales[step % len(self.step_scales)]
        grad *= TENSOR_SCALES[number % len(TENSOR_SCALES)] * scale
        extreme = step - self.steps if self.extreme else 0
        if extreme == ZEROS and number > 0:
            grad.zero_()
        elif extreme == ZEROS:
            _clear_slice(grad)
        elif extreme == NOT_FINITE and number == 0:
            grad.view(-1)[:2] = torch.tensor([torch.inf, torch.nan])
        elif extreme == SPIKE and number == 0:
            grad.view(-1)[0] = 1e6
        elif extreme == TINY and number == 0:
            grad *= 1e-6
        return grad

    def _draw(self, number: int, step: int, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
        source = torch.Generator().manual_seed(1000 * (step + 1) + number)
        drawn = torch.randn(self.shapes[number], generator=source, device="cpu")
        return drawn.to(dtypes[number % len(dtypes)])


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to run an optimizer class, with `notes` on its peculiarities for the user.

    The `dtypes` of parameters repeat. `constants` replace random numbers.
    """

    recipe: OptimizerRecipe
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    sparse: bool
    num_groups: int
    closures: Closures
    notes: tuple[str, ...]
    fill_empty_groups: bool = False
    constants: bool = False

    def group(self, stage: Stage, tensor: int) -> int:
        """Return the number of a tensor's group."""
        return tensor % self.num_groups if stage.dealt else 0


def trials(
    recipe: OptimizerRecipe, dtypes: tuple[torch.dtype, ...], devices: Sequence[torch.device]
) -> Iterator[Trial]:
    """Yield the ways to run a class, the most informative first."""
    on = [n for n in SWITCHES if recipe.defaults.get(n) or recipe.group_options.get(n)]
    ways = ((2, False), (2, True), (1, False))
    for dropped, device, (num_groups, sparse) in product([[], on] if on else [[]], devices, ways):
        notes = (
            *([f"without {', '.join(dropped)}"] if dropped else ()),
            *([f"on {device}"] if device.type != "cpu" else ()),
            *(["with sparse gradients"] if sparse else ()),
            *(["with one group"] if num_groups == 1 else ()),
        )
        made = recipe.without(dropped)
        for closures in get_args(Closures):
            yield Trial(made, dtypes, device, sparse, num_groups, closures, notes)


@dataclass(eq=False)
class TrialFailed(Exception):
    """The class raised `error`, after or before it was constructed."""

    error: Exception
    constructed: bool


class Cause(Enum):
    """An observation that separates several optimizers from one.

    In words: for optimizers on slices, and for optimizers on one tensor each.
    """

    PARAMETER = "updates each tensor as a whole", "its update of a tensor depends on others"
    STATE = (
        "keeps state that does not split with its tensor",
        "its state of a tensor depends on others",
    )
    GROUP_OPTION = (
        "computes group option {} from whole tensors",
        "its group option {} depends on all tensors",
    )
    GLOBAL_STATE = (
        "computes global state from whole tensors",
        "its global state depends on all tensors",
    )
    RAISED = "needs each tensor in its own shape", "without some of the tensors it raises {}"
    SPARSE = "takes sparse gradients, which are not sliced", ""
    CLOSURE = "", "a step {}"
    COLLECTIVE = "", "a step communicates with other ranks"


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between one optimizer and several that share its work."""

    cause: Cause
    detail: str = ""

    def words(self, apart: bool) -> str:
        """Describe the difference of tensors apart, or of slices."""
        words: tuple[str, str] = self.cause.value
        return words[apart].format(self.detail)


@dataclass(eq=False)
class Coupled(Exception):
    """Tensors apart give something else than tensors together."""

    difference: Difference


class Run:
    """One optimizer on parts of the tensors. Raises only `TrialFailed` and `Coupled`.

    With `seed`, the process's random generators are seeded before each step.
    """

    def __init__(self, trial: Trial, stage: Stage, parts: Sequence[Part], seed: bool) -> None:
        self.trial = trial
        self.stage = stage
        self.parts = parts
        self._sources = RandomSources(trial.device) if seed else None
        self._seed(0)
        starts = stage.starts(trial.dtypes)
        self.params = [
            torch.nn.Parameter(part(starts[number], interval).to(trial.device, copy=True))
            for number, interval in parts
        ]
        groups: list[list[torch.nn.Parameter]] = [[] for _ in range(trial.num_groups)]
        for param, (tensor, _) in zip(self.params, parts, strict=True):
            groups[trial.group(stage, tensor)].append(param)
        try:
            self.opt = trial.recipe.make(groups, trial.device)
            with fill_empty_groups(self.opt, self._placeholders(starts)):
                self._has_modes = start_training(self.opt)
            check_optimizer(self.opt, len(groups))
        except Exception as error:
            raise TrialFailed(error, constructed=False) from error
        self._drew = self._sources is not None and self._sources.used()

    def advance(self, step: int, gradients: Gradients) -> bool:
        """Take a step with the gradients of entire tensors. Return True if it drew random numbers.

        That is known only if generators are seeded.
        """
        evaluations = 0
        moved = False
        before: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            nonlocal evaluations, moved
            evaluations += 1
            moved = moved or not all(map(same_bits, before, self.params))
            self._set_gradients(gradients)
            # It rises and falls: a class may look for either.
            return torch.full((), (1 + 7 * step % 5) / (1 + step), device=self.trial.device)

        with_closure = {"always": True, "never": False, "now and then": step % 3 == 2}
        self._set_gradients(gradients)
        self._seed(step)
        try:
            with fill_empty_groups(self.opt, self._placeholders(gradients)):
                if step == MODE_STEP and self._has_modes:
                    set_mode(self.opt, "eval")
                    set_mode(self.opt, "train")
                if with_closure[self.trial.closures]:
                    before += [param.detach().clone() for param in self.params]
                    self.opt.step(closure)  # type: ignore[arg-type]
                else:
                    self.opt.step()
        except Coupled:
            raise
        except Exception as error:
            if evaluations <= 1:
                raise TrialFailed(error, constructed=True) from error
        if evaluations > 1:
            raise Coupled(Difference(Cause.CLOSURE, "evaluates its closure more than once"))
        if moved:
            detail = "moves parameters before it evaluates its closure"
            raise Coupled(Difference(Cause.CLOSURE, detail))
        return self._drew or (self._sources is not None and self._sources.used())

    def _seed(self, seed: int) -> None:
        if self._sources is not None:
            self._sources.seed(seed)

    def _placeholders(self, tensors: Gradients) -> dict[int, torch.nn.Parameter]:
        """Return placeholders for empty groups, with a gradient where one of `tensors` is there."""
        trial, placeholders = self.trial, {}
        for number, group in enumerate(self.opt.param_groups if trial.fill_empty_groups else ()):
            if not group["params"]:
                every = range(len(tensors))
                own = [n for n in every if trial.group(self.stage, n) == number] or list(every)
                like = torch.nn.Parameter(
                    torch.empty(self.stage.shapes[own[0]], device=trial.device)
                )
                has_gradient = any(tensors[n] is not None for n in own)
                placeholders[number] = empty_param(like, trial.dtypes[0], has_gradient)
        return placeholders

    def _set_gradients(self, gradients: Gradients) -> None:
        for param, (number, interval) in zip(self.params, self.parts, strict=True):
            whole = gradients[number]
            if whole is None:
                param.grad = None
                continue
            grad = part(whole, interval).to(self.trial.device, copy=True)
            param.grad = _sparse_rows(grad) if self.trial.sparse else grad

    def states(self, tensor: int) -> list[tuple[Any, tuple[int, ...]]]:
        """Return state and shape of each part of a tensor here; None for no state."""
        return [
            (self.opt.state.get(param), tuple(param.shape))
            for param, (number, _) in zip(self.params, self.parts, strict=True)
            if number == tensor
        ]

    @property
    def group_options(self) -> list[dict[str, Any]]:
        """Everything in the groups except for the parameters."""
        return [*map(group_options, self.opt.param_groups)]

    @property
    def global_state(self) -> dict[Any, Any]:
        """State that belongs to no parameter."""
        return {**global_state(self.opt), **extras(self.opt)}


def part(tensor: torch.Tensor, interval: Interval) -> torch.Tensor:
    """Return some elements of a tensor as a rank holds them: a flat slice, unless all."""
    return tensor if interval.numel == tensor.numel() else tensor.reshape(-1)[interval.slice]


def _sparse_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor with all rows. `to_sparse` takes longer than many a step."""
    rows = torch.arange(len(tensor), device=tensor.device).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, tensor, tensor.shape, is_coalesced=True)


class RandomSources:
    """The random generators of the process: Python's, torch's and numpy's, and one device's."""

    def __init__(self, device: torch.device) -> None:
        self._seed = 0
        self._generators: list[tuple[Callable[[int], object], Callable[[], object]]] = [
            (random.seed, random.random),
            (torch.default_generator.manual_seed, _draw),
        ]
        numpy: Any = sys.modules.get("numpy")
        if numpy:
            self._generators.append((numpy.random.seed, numpy.random.random_sample))
        if device.type != "cpu":
            module: Any = torch.get_device_module(device)
            # The state: a number could come from another device's generator than the seeded one.
            self._generators.append((module.manual_seed, lambda: module.get_rng_state().tolist()))

    def seed(self, seed: int) -> None:
        """Seed all generators: a verdict must be the same in every process."""
        self._seed = seed
        for seed_one, _ in self._generators:
            seed_one(seed)

    def used(self) -> bool:
        """Return True if numbers were drawn since `seed`. Called once after each."""
        # An unused generator continues as from its seed. On the CPU, comparing states is slower.
        found = [draw() for _, draw in self._generators]
        self.seed(self._seed)
        return found != [draw() for _, draw in self._generators]


def _draw() -> list[float]:
    numbers: list[float] = torch.rand(2, dtype=torch.float32, device="cpu").tolist()
    return numbers


class ConstantRandomNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which torch's random operations return constants."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The sandbox compiles nothing, and checking that is as slow as an operation.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(0.25 if tensor.is_floating_point() else 0)
        return out
