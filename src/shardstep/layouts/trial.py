"""Runs an optimizer class on made-up parameters: which ones, with which options and gradients."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardstep.local.empty_groups import empty_param, fill_empty_groups
from shardstep.local.multi_class import extras
from shardstep.local.train_eval import set_mode, start_training
from shardstep.params.inputs import check_optimizer
from shardstep.params.same_bits import same_bits
from shardstep.plan import ALIGNMENT, Interval

Shapes = tuple[tuple[int, ...], ...]

SMALL: Shapes = ((17, 11), (13, 19))
"""What any class takes little time for. A slice is flat, and some classes keep a matrix of as many
rows as that has elements."""

TWINS: Shapes = ((17, 11), (17, 11))
"""Two of one shape: a class may have more to do with these in common than with others."""

MATRICES: Shapes = ((33, 22), (33, 22))
"""No lengths that are multiples of a vector register's."""

OTHERS: Shapes = ((139,), (), (12, 10, 3, 3))
"""Vectors, scalars and more dimensions than two."""

SMALL_OTHERS: Shapes = ((99,), (), (6, 5, 3, 3))
"""The same for classes that take long."""

PLAIN: Shapes = ((19, 13), (13, 19))
"""In their place, for classes that take matrices only."""

LARGE: Shapes = ((128, 136), (131, 131))
"""Beyond what classes are known to make a difference at: 128 rows or columns, 4,096 elements, a
multiple of 256 of them, as many rows as columns."""

DEALT = (SMALL, OTHERS, SMALL_OTHERS)
"""Which are dealt to all groups. The others lie in one: what a class makes of a group's matrices
together cannot be seen if each has a group of its own."""

SIZES = range(129, 2**21 + 1)
"""Numbers among the options that may be sizes at which a class makes a difference, and are beyond
`LARGE`. What it makes of still larger ones would take many seconds to find out."""

ENOUGH = 16_384
"""Tensors that go beyond such a size have at least so many elements, as `LARGE` has."""

MANY = 2**16
"""More rows or columns than this, nobody takes for a matter of shape."""

SCALES = (1.0, 20.0, 0.05, 3.0, 0.3)
"""Of the gradients of one tensor and of the next: a common norm shows what it is made of."""

TURNS = (1.0, 0.2, 4.0)
"""Of the gradients of one step and of the next: norms cross the bounds that they are clipped at."""

ZEROS, SPIKE, NOT_FINITE = 3, 4, 6
"""At which steps gradients of other shapes are such. What is not finite stays: it comes last."""

TURN = 2
"""At which step a class that has modes is turned to the other one and back before."""

SWITCHES = ("capturable", "fused", "foreach", "differentiable")
"""Options that choose between ways to compute the same; not every device has all of them."""

SMALL_LR = 1e-4
USUAL_LR = 1e-3

Closures = Literal["now and then", "never", "always"]

Part = tuple[int, Interval]
"""Some elements of one of the tensors."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to run a class.

    Attributes:
        make: constructs the optimizer from groups.
        group_options: what each group has beside its parameters.
        shapes: of the parameters.
        dtype, device: of the parameters.
        sparse: whether gradients are sparse.
        num_groups: how many groups there are.
        closures: when a closure is passed to `step`.
        sizes: numbers of elements, rows or columns at which the class may make a difference.
        notes: what is particular about this way.
        filled: whether a group of which an optimizer has nothing is filled for each step.
    """

    make: Callable[[list[dict[str, Any]]], Optimizer]
    group_options: Mapping[str, Any]
    shapes: Shapes
    dtype: torch.dtype
    device: torch.device
    sparse: bool
    num_groups: int
    closures: Closures
    sizes: tuple[int, ...]
    notes: tuple[str, ...]
    filled: bool = False

    def group(self, number: int) -> int:
        """In which group a tensor is."""
        return number % self.num_groups if self.shapes in DEALT else 0

    @property
    def beyond_sizes(self) -> list[Shapes]:
        """For each of the sizes, tensors with a multiple of it in elements, rows or columns."""
        return [_beyond(size) for size in self.sizes]


def _beyond(size: int) -> Shapes:
    length = size * max(1 if size > MANY else 2, -(-ENOUGH // (2 * size)))
    return ((2, length),) if size > MANY else ((length, 2), (2, length))


class NotTried(Exception):
    """The class did not run this way.

    Attributes:
        error: what it raised.
        made: whether it was constructed, at least.
    """

    def __init__(self, error: Exception, made: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.made = made


class EvaluatesBetween(Exception):
    """The class evaluates a closure when a rank may have moved its own parameters only."""


def trials(
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    group_options: Mapping[str, Any],
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    sizes: tuple[int, ...],
) -> Iterator[Trial]:
    """The ways to run a class on matrices, the most telling first."""
    on = [name for name in SWITCHES if defaults.get(name) or group_options.get(name)]
    for dropped in ([], on) if on else ([],):
        given = {key: value for key, value in defaults.items() if key not in dropped}
        options = {key: value for key, value in group_options.items() if key not in dropped}
        for device in devices:

            def make(
                groups: list[dict[str, Any]],
                given: Mapping[str, Any] = given,
                device: torch.device = device,
            ) -> Optimizer:
                return optimizer_class(groups, **options_of_its_own(given, device))

            for num_groups, sparse in ((2, False), (2, True), (1, False)):
                notes = (
                    *([f"tried without {', '.join(dropped)}"] if dropped else ()),
                    *([f"tried on {device}"] if device.type != "cpu" else ()),
                    *(["tried with sparse gradients"] if sparse else ()),
                    *(["tried with one group"] if num_groups == 1 else ()),
                )
                for closures in get_args(Closures):
                    yield Trial(
                        make,
                        options,
                        MATRICES,
                        dtype,
                        device,
                        sparse,
                        num_groups,
                        closures,
                        sizes,
                        notes,
                    )


def sizes_among(
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    group_options: Mapping[str, Any],
    largest: int,
) -> tuple[int, ...]:
    """The numbers among a class's options that may be sizes, the class's own defaults included.

    A class may quantise tensors from so many elements on, or in blocks of so many, or factor
    matrices from so many rows on; what it is on smaller tensors says nothing then.

    Args:
        optimizer_class: the class.
        defaults: options that it is called with.
        group_options: options that its groups have of their own.
        largest: the number of elements of the largest parameter; what is beyond is of no effect.
    """
    options: dict[str, Any] = {}
    with contextlib.suppress(ValueError, TypeError):  # what is not written in Python may have none
        parameters = inspect.signature(optimizer_class).parameters
        options = {name: parameter.default for name, parameter in parameters.items()}
    found = set()
    for value in tree_leaves({**options, **defaults, **group_options}):
        number = type(value) is int or (type(value) is float and value.is_integer())
        if number and int(value) in SIZES and value <= largest:
            found.add(int(value))
    return tuple(sorted(found))


def options_of_its_own(options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The options, in memory of our own, with a learning rate that shows."""

    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().to(device)
        if type(value) in (list, tuple):
            return type(value)(own(item) for item in value)
        return {key: own(item) for key, item in value.items()} if type(value) is dict else value

    options = {name: own(value) for name, value in options.items()}
    lr = options.get("lr")
    # Zero is usual where a scheduler warms up; whatever lr multiplies would be hidden by it.
    if isinstance(lr, (int, float)) and 0 <= lr < SMALL_LR:
        options["lr"] = USUAL_LR
    elif isinstance(lr, torch.Tensor) and lr.numel() == 1 and 0 <= float(lr) < SMALL_LR:
        options["lr"] = torch.full_like(lr, USUAL_LR)
    return options


def entire(shapes: Shapes) -> list[Part]:
    """All of each tensor."""
    return [(number, Interval(0, torch.Size(s).numel())) for number, s in enumerate(shapes)]


class Run:
    """One optimizer on some parts of the tensors, step by step.

    Args:
        trial: how the class is run.
        parts: what it is given; a group of which it is given nothing is there all the same.
        seeded: whether random numbers start anew with every step, and draws are noticed.

    Attributes:
        opt: the optimizer.
        params: its parameters, in the order of `parts`.

    Raises:
        NotTried: with what the class raised, here and in `advance`.
    """

    def __init__(self, trial: Trial, parts: Sequence[Part], seeded: bool) -> None:
        self._trial = trial
        self._seeded = seeded
        self._parts = parts
        self._taken = 0
        self.params = [
            torch.nn.Parameter(part(start(trial, number), interval).to(trial.device, copy=True))
            for number, interval in parts
        ]
        groups = [
            {
                **options_of_its_own(trial.group_options, trial.device),
                "params": [
                    param
                    for param, (tensor, _) in zip(self.params, parts, strict=True)
                    if trial.group(tensor) == number
                ],
            }
            for number in range(trial.num_groups)
        ]
        draws = _Draws(0, trial.device) if seeded else None
        try:
            self.opt = trial.make(groups)
            with fill_empty_groups(self.opt, self._missing(0)):
                self._has_modes = start_training(self.opt)
        except Exception as error:
            raise NotTried(error, made=False) from error
        self._drew_when_made = draws is not None and draws.happened()
        try:
            check_optimizer(self.opt, len(groups))
        except ValueError as error:
            raise NotTried(error, made=False) from error

    def advance(self) -> bool:
        """Take the next step.

        Returns:
            Whether random numbers were drawn, from a source that all optimizers share.

        Raises:
            EvaluatesBetween: if it evaluates its closure more than once, or moves parameters first.
        """
        number, self._taken = self._taken, self._taken + 1
        evaluations = 0
        moved = False
        now = {"always": True, "never": False, "now and then": number % 3 == 2}
        with_closure = now[self._trial.closures]
        before: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            nonlocal evaluations, moved
            evaluations += 1
            moved = moved or not all(map(same_bits, before, self.params))
            self._give_gradients(number)
            return torch.full((), 1.0 / (1 + number), device=self._trial.device)

        self._give_gradients(number)
        draws = _Draws(number, self._trial.device) if self._seeded else None
        try:
            with fill_empty_groups(self.opt, self._missing(number)):
                if number == TURN and self._has_modes:
                    set_mode(self.opt, "eval")
                    set_mode(self.opt, "train")
                if with_closure:
                    before += [param.detach().clone() for param in self.params]
                    self.opt.step(closure)  # type: ignore[arg-type]
                else:
                    self.opt.step()
        except Exception as error:
            if evaluations <= 1:
                raise NotTried(error, made=True) from error
        if evaluations > 1:
            raise EvaluatesBetween(
                "a step evaluates its closure more than once, and between two evaluations a rank "
                "has moved its own parameters only"
            )
        if moved:
            raise EvaluatesBetween(
                "a step moves parameters before it evaluates its closure, and a rank has moved its "
                "own only by then"
            )
        return self._drew_when_made or (draws is not None and draws.happened())

    def _missing(self, step: int) -> dict[int, torch.nn.Parameter]:
        """The groups that are to be filled, as `filled` takes them."""
        trial, missing = self._trial, {}
        for number, group in enumerate(self.opt.param_groups if trial.filled else ()):
            if not group["params"]:
                every = range(len(trial.shapes))
                tensors = [n for n in every if trial.group(n) == number] or every
                grads = [gradient(trial.shapes, trial.dtype, n, step) for n in tensors]
                like = torch.nn.Parameter(start(trial, tensors[0]).to(trial.device))
                has_gradient = any(grad is not None for grad in grads)
                missing[number] = empty_param(like, trial.dtype, has_gradient)
        return missing

    def _give_gradients(self, step: int) -> None:
        for param, (number, interval) in zip(self.params, self._parts, strict=True):
            whole = gradient(self._trial.shapes, self._trial.dtype, number, step)
            if whole is None:
                param.grad = None
                continue
            grad = part(whole, interval).to(self._trial.device, copy=True)
            param.grad = _by_rows(grad) if self._trial.sparse else grad

    def state(self, position: int) -> Any:
        """The state of one of its parameters; None if it has none."""
        return self.opt.state.get(self.params[position])

    @property
    def groups(self) -> list[dict[str, Any]]:
        """What its groups keep beside the parameters."""
        kept = {"params", "param_names"}
        return [{k: v for k, v in g.items() if k not in kept} for g in self.opt.param_groups]

    @property
    def loose(self) -> dict[Any, Any]:
        """State that belongs to no parameter."""
        own = {k: v for k, v in self.opt.state.items() if not isinstance(k, torch.Tensor)}
        return {**own, **extras(self.opt)}


class _Draws:
    """Starts all common sources of random numbers anew, and says whether they are drawn from.

    Whoever draws, draws the same then, whatever others have drawn: the verdict has to be the same
    in every process.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._numpy: Any = sys.modules.get("numpy")
        self._device: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._start()
        self._state: Any = self._device.get_rng_state() if self._device else None

    def happened(self) -> bool:
        """Whether there were any since this was made; asked once."""
        if self._device and not torch.equal(self._state, self._device.get_rng_state()):
            return True
        # A source that has been drawn from does not go on as it started. To compare the states of
        # all of them would take longer than most steps.
        found = self._numbers()
        self._start()
        return found != self._numbers()

    def _start(self) -> None:
        torch.default_generator.manual_seed(self._seed)
        random.seed(self._seed)
        if self._numpy:
            self._numpy.random.seed(self._seed)
        if self._device:
            self._device.manual_seed(self._seed)

    def _numbers(self) -> list[float]:
        numbers = [random.random(), *torch.rand(2, dtype=torch.float32, device="cpu").tolist()]
        return [*numbers, self._numpy.random.random_sample()] if self._numpy else numbers


def start(trial: Trial, number: int) -> torch.Tensor:
    """Where a tensor starts."""
    return _draw(trial.shapes[number], trial.dtype, number, -1) * 0.1


def gradient(shapes: Shapes, dtype: torch.dtype, number: int, step: int) -> torch.Tensor | None:
    """The gradient of a tensor at a step. The second tensor has none at one of them."""
    # Small ones may take three steps and no more.
    if (number, step) == (1, 2 if shapes in (SMALL, TWINS, SMALL_OTHERS) else 5):
        return None
    # Those of all shapes that are tried anyway are worth remembering.
    drawn = _remembered if shapes in (MATRICES, OTHERS, LARGE) else _gradient
    return drawn(shapes, dtype, number, step)


def _gradient(shapes: Shapes, dtype: torch.dtype, number: int, step: int) -> torch.Tensor:
    scale = SCALES[number % len(SCALES)] * TURNS[step % len(TURNS)]
    drawn = _draw(shapes[number], dtype, number, step) * scale
    return _extreme(drawn, number, step) if shapes in (OTHERS, PLAIN) else drawn


def _extreme(drawn: torch.Tensor, number: int, step: int) -> torch.Tensor:
    """The gradient with what most are without: classes leave out what is zero, or not finite."""
    if step == ZEROS:
        # All of one tensor, and of the first a slice, but not all.
        drawn.view(-1)[: -ALIGNMENT // 2 if number == 0 else None] = 0
    elif step == SPIKE and number == 0:
        drawn *= 1e5
    elif step == NOT_FINITE and number == 0:
        drawn.view(-1)[:2] = torch.tensor([torch.inf, torch.nan])
    return drawn


_remembered = cache(_gradient)


def _draw(shape: tuple[int, ...], dtype: torch.dtype, number: int, step: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * (step + 1) + number)
    return torch.randn(shape, generator=source, device="cpu").to(dtype)


def part(tensor: torch.Tensor, interval: Interval) -> torch.Tensor:
    """Some elements of a tensor as a rank would have them: whole if these are all, else flat."""
    return tensor if interval.numel == tensor.numel() else tensor.reshape(-1)[interval.slice]


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse tensor that has all rows (`to_sparse` would take longer than many a step)."""
    rows = torch.arange(len(tensor), device=tensor.device).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, tensor, tensor.shape, is_coalesced=True)
