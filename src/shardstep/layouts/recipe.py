"""An optimizer class together with the options that it is constructed with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from shardstep.local.sandbox import sandbox
from shardstep.params.inputs import unwrap_partial

SIZES = range(129, 2**21 + 1)
"""Numbers that may be sizes. Probing larger tensors would take seconds."""

MAX_STEPS = 500
"""The largest number that may count steps. Probing more steps would take seconds."""

SMALL_LR, USUAL_LR = 1e-4, 1e-3

Options = Mapping[str, Any]

_CPU = torch.device("cpu")


class Numbers(NamedTuple):
    """Sizes and the last step at which the rule of a class may change."""

    sizes: tuple[int, ...] = ()
    last_step: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerRecipe:
    """A callable that makes an optimizer, its keyword arguments, and options of each group."""

    optimizer_class: Callable[..., Optimizer]
    defaults: Options = field(default_factory=dict)
    group_options: Options = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the class, for messages."""
        plain = unwrap_partial(self.optimizer_class)
        return str(getattr(plain, "__name__", type(plain).__name__))

    def make(self, groups: Sequence[list[Any]], device: torch.device) -> Optimizer:
        """Construct an optimizer to try, with one group for each list of parameters.

        It gets copies of option tensors on `device`, and a learning rate that has an effect.
        """
        given = [{**_copied(self.group_options, device), "params": own} for own in groups]
        return self.optimizer_class(given, **_copied(self.defaults, device))

    def sample(self) -> Optimizer | None:
        """Construct an optimizer of one small matrix; None if that raises. The probe says why."""
        with sandbox(self.optimizer_class, _CPU), contextlib.suppress(Exception):
            return self.make([[torch.nn.Parameter(torch.zeros(2, 2))]], _CPU)
        return None

    def unwrapped(self) -> OptimizerRecipe:
        """Return the recipe with the keywords of a `functools.partial` among the defaults."""
        make: Any = self.optimizer_class
        defaults = self.defaults
        while isinstance(make, functools.partial) and not make.args:
            make, defaults = make.func, {**make.keywords, **defaults}
        return OptimizerRecipe(make, defaults, self.group_options)

    def without(self, names: Collection[str]) -> OptimizerRecipe:
        """Return the recipe without the options of these names."""
        defaults, group_options = (
            {key: value for key, value in options.items() if key not in names}
            for options in (self.defaults, self.group_options)
        )
        return OptimizerRecipe(self.optimizer_class, defaults, group_options)

    def numbers(self, largest: int) -> Numbers:
        """Return the numbers among all options, and among attributes of the class and its objects.

        A class may work in blocks of so many elements, treat tensors from some size on differently,
        or change its rule at some step. `largest` is the size of the largest parameter.
        """
        options: list[Any] = [dict(self.defaults), dict(self.group_options)]
        with contextlib.suppress(ValueError, TypeError):  # not written in Python
            parameters = inspect.signature(self.optimizer_class).parameters.values()
            options += [parameter.default for parameter in parameters]
        made = self.sample()
        bases = [base for base in type(made).__mro__ if base not in (Optimizer, object)]
        options += map(_attributes, (made, *bases))
        values = tree_leaves(options)
        records = [value for value in values if dataclasses.is_dataclass(value)]
        values += tree_leaves([_attributes(record) for record in records])
        numbers = {v for v in values if type(v) in (int, float) and 0 < v <= SIZES[-1]}
        found = sorted(int(v) for v in numbers if v == int(v))
        sizes = tuple(number for number in found if number in SIZES and number <= largest)
        return Numbers(sizes, max((number for number in found if number <= MAX_STEPS), default=0))

    @property
    def _key(self) -> tuple[Any, ...]:
        leaves, structure = tree_flatten((dict(self.defaults), dict(self.group_options)))
        return self.optimizer_class, repr(structure), *map(_leaf_key, leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OptimizerRecipe) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _attributes(value: Any) -> dict[str, Any]:
    # Python keeps numbers of lines under such names.
    found = getattr(value, "__dict__", {}).items()
    return {name: each for name, each in found if not name.startswith("__")}


def _copied(options: Options, device: torch.device) -> dict[str, Any]:
    def copy(value: Any) -> Any:
        return value.detach().clone().to(device) if isinstance(value, torch.Tensor) else value

    copied: dict[str, Any] = tree_map(copy, dict(options))
    lr = copied.get("lr")
    # Schedulers warm up from zero, which would hide whatever lr multiplies.
    if isinstance(lr, (int, float)) and 0 <= lr < SMALL_LR:
        copied["lr"] = USUAL_LR
    elif isinstance(lr, torch.Tensor) and lr.numel() == 1 and 0 <= float(lr) < SMALL_LR:
        copied["lr"] = torch.full_like(lr, USUAL_LR)
    return copied


def _leaf_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), str(value.device), repr(value.tolist())
    constant = value is None or isinstance(value, torch.dtype) or callable(value)
    by_identity: Any = object.__eq__
    if type(value).__eq__ is by_identity and not constant:
        raise TypeError(f"an option of type {type(value).__name__} is compared by identity")
    # 1, 1.0 and True are equal, but differ to a class.
    return type(value).__name__, value
