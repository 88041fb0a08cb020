"""An optimizer class together with the options that it is constructed with."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from shardstep.params.inputs import unwrap_partial

SIZES = range(129, 2**21 + 1)
"""Integers among the options that may be sizes. Probing larger tensors would take seconds."""

SMALL_LR, USUAL_LR = 1e-4, 1e-3

Options = Mapping[str, Any]


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

    def sizes(self, largest: int) -> tuple[int, ...]:
        """Return the numbers up to `largest` among all options that may be sizes.

        A class may work in blocks, or treat tensors from some size on differently.
        """
        options: dict[str, Any] = {}
        with contextlib.suppress(ValueError, TypeError):  # not written in Python
            parameters = inspect.signature(self.optimizer_class).parameters
            options = {name: parameter.default for name, parameter in parameters.items()}
        values = tree_leaves({**options, **self.defaults, **self.group_options})
        low, high = SIZES[0], min(SIZES[-1], largest)
        numbers = [v for v in values if type(v) in (int, float) and low <= v <= high]
        return tuple(sorted({int(v) for v in numbers if v == int(v)}))

    @property
    def _key(self) -> tuple[Any, ...]:
        leaves, structure = tree_flatten((dict(self.defaults), dict(self.group_options)))
        return self.optimizer_class, repr(structure), *map(_leaf_key, leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OptimizerRecipe) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


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
    # 1, 1.0 and True are equal, but differ to a class.
    return type(value).__name__, value
