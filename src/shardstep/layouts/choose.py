"""The layout of each parameter group: asked for, declared, known or probed.

A class may declare the layout that it needs: `shardstep_layout = "whole"` or `"sliced"`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from shardstep.layouts.compare import incompatible_dtypes
from shardstep.layouts.cost import step_cost
from shardstep.layouts.probe import Kind, Verdict, probe
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.layouts.trial import Cause
from shardstep.local.multi_class import (
    CLASS_KEY,
    check_class_of_group,
    full_name,
    group_options,
    split_options,
)
from shardstep.params.dtensor import num_parts, refuse_part
from shardstep.params.inputs import Groups, parameters, unwrap_partial
from shardstep.plan import Layout, ParamSpec
from shardstep.precision import UNCHANGED, MixedPrecision

_NAMES = "SGD Adam AdamW Adamax NAdam RAdam Adadelta Adagrad ASGD RMSprop Rprop"
ELEMENT_WISE: frozenset[Any] = frozenset(getattr(torch.optim, name) for name in _NAMES.split())
"""Classes known to be element-wise. A test compares this with the probe."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout for a class, its reason, and the verdict of the probe if there was one."""

    recipe: OptimizerRecipe
    layout: Layout
    why: str
    verdict: Verdict | None = None

    def __str__(self) -> str:
        return f"{self.layout} tensors: {self.why}"


@dataclass(eq=False)
class Layouts:
    """The layouts of an optimizer's parameter groups; `recipe` is for groups that name no class.

    Attributes:
        choices: the layout of each group, and its class with the options that it had at first.
    """

    asked: str
    recipe: OptimizerRecipe
    world_size: int
    precision: MixedPrecision
    choices: list[Choice] = field(default_factory=list)

    def apply(self, groups: Groups, specs: Sequence[ParamSpec]) -> list[ParamSpec]:
        """Return the parameters with their layouts and costs. Raise if a class has no layout."""
        # Read once: constructing the optimizer adds options to the groups.
        recipes = [choice.recipe for choice in self.choices]
        recipes += map(self._recipe, groups[len(recipes) :])
        self.choices = [
            self._choose(recipe, group["params"], self.world_size)
            for recipe, group in zip(recipes, groups, strict=True)
        ]
        several_classes = any(CLASS_KEY in group for group in groups)
        for choice in self.choices:
            if several_classes and choice.verdict is not None and choice.verdict.global_state:
                raise ValueError(
                    f"{choice.recipe.name} keeps state that belongs to no parameter, which several "
                    "classes in one optimizer cannot share; use it alone"
                )
        for spec, param in zip(specs, parameters(groups), strict=True):
            choice = self.choices[spec.group]
            if choice.layout == "whole" and num_parts(param) > 1:
                refuse_part(spec.name, param, choice.recipe.name)
        forms = {(spec.group, spec.shape) for spec in specs}
        costs = {form: self._cost(*form) for form in forms}
        return [
            replace(
                spec,
                layout=self.choices[spec.group].layout,
                cost=costs[spec.group, spec.shape],
            )
            for spec in specs
        ]

    def groups_to_fill(self) -> list[int]:
        """Return the groups that need a placeholder on ranks where they are empty."""
        verdicts = [choice.verdict for choice in self.choices]
        return [n for n, verdict in enumerate(verdicts) if verdict and verdict.fill_empty_groups]

    def refuse_sparse(self) -> None:
        """Raise if a class takes sparse gradients only."""
        for choice in self.choices:
            different = choice.verdict.difference if choice.verdict else None
            if different is not None and different.cause is Cause.SPARSE:
                raise ValueError(
                    f"{choice.recipe.name} takes sparse gradients, and module= reduces dense ones; "
                    "use a class for dense gradients, or leave out module= and synchronise "
                    "gradients"
                )

    def truncate(self, num_groups: int) -> None:
        """Drop all groups but the first `num_groups`."""
        del self.choices[num_groups:]

    def lines(self) -> list[str]:
        """Return one line per group, for ranks to compare."""
        return [
            f"layout of group {number}: {choice.layout}"
            + (f" ({choice.verdict.kind})" if choice.verdict else "")
            for number, choice in enumerate(self.choices)
        ]

    def explain(self, groups: Groups) -> list[str]:
        """Return one line per group, for the user. A single rank probes its classes now."""
        lines = []
        for number, choice in enumerate(self.choices):
            line = str(choice)
            if self.world_size == 1:
                try:
                    several = self._choose(choice.recipe, groups[number]["params"], 2)
                    line = f"{choice.why}; with more ranks, {several}"
                except Exception as error:
                    line = f"{choice.why}; more ranks are refused: {error}"
            lines.append(f"group {number}: {line}")
        return lines

    def _choose(
        self, recipe: OptimizerRecipe, params: Sequence[torch.Tensor], world_size: int
    ) -> Choice:
        shards = world_size * max(map(num_parts, params), default=1)
        return choose(self.asked, recipe, params, shards, self.precision)

    def _recipe(self, group: Mapping[str, Any]) -> OptimizerRecipe:
        given = group.get(CLASS_KEY)
        if given is None or given == full_name(self.recipe.optimizer_class):
            return replace(self.recipe, group_options=group_options(group))
        check_class_of_group(given)
        return OptimizerRecipe(given, *split_options(given, group))

    def _cost(self, group: int, shape: tuple[int, ...]) -> int:
        choice = self.choices[group]
        if choice.layout == "sliced" or self.world_size == 1:
            return 0
        return int(_cached(step_cost, choice.recipe, shape))


def choose(
    layout: str,
    recipe: OptimizerRecipe,
    params: Sequence[torch.Tensor],
    world_size: int,
    precision: MixedPrecision = UNCHANGED,
) -> Choice:
    """Choose the layout for the parameters of one group. A class on one rank is not probed.

    Raise `ValueError` if sharding would, or might, change the numbers. An error of the class's
    constructor is raised as it is.
    """
    if layout not in ("auto", "sliced", "whole"):
        raise ValueError(f"layout must be 'auto', 'sliced' or 'whole', not {layout!r}")
    asked: Layout | None = None if layout == "auto" else layout  # type: ignore[assignment]
    refuse_per_parameter_options(recipe, params)
    plain = unwrap_partial(recipe.optimizer_class)
    is_class = isinstance(plain, type)
    element_wise = is_class and plain in ELEMENT_WISE  # a function may add hooks to such a class
    known: Layout | None = "sliced" if element_wise else getattr(plain, "shardstep_layout", None)
    if known is None and world_size > 1 and not is_class:
        known = getattr(recipe.sample(), "shardstep_layout", None)
    if known not in (None, "sliced", "whole"):
        raise ValueError(
            f"{recipe.name}.shardstep_layout must be 'sliced' or 'whole', not {known!r}"
        )
    if world_size == 1:
        return Choice(recipe, asked or known or "whole", "one rank holds everything")
    if asked == "sliced" and known == "whole":
        raise ValueError(f"{recipe.name} declares that it needs layout='whole', not 'sliced'")
    verdict = None
    why = f"declared by {recipe.name}"
    if element_wise:
        why = f"{recipe.name} updates each element separately"
    elif known is None:
        verdict = _probe_group(recipe, params, precision)
        _refuse(asked, recipe.name, verdict)
        known, why = verdict.layout, f"{recipe.name} {verdict.why}"
    if asked is not None and asked != known:
        why = f"asked for with layout={asked!r}"
    return Choice(recipe, asked or known or "whole", why, verdict)


def _probe_group(
    recipe: OptimizerRecipe, params: Sequence[torch.Tensor], precision: MixedPrecision
) -> Verdict:
    """Return the strictest verdict for the dtypes. Raise if these do not go together."""
    trained = {precision.step_dtype(param.dtype) for param in params if param.requires_grad}
    dtypes = tuple(sorted(trained or {torch.float32}, key=str))
    accelerators = sorted({param.device for param in params if param.is_cuda}, key=str)
    devices = (torch.device("cpu"), *accelerators)
    largest = max((param.numel() for param in params), default=0)
    numbers = _cached(OptimizerRecipe.numbers, recipe, largest)
    verdicts: list[Verdict] = [_cached(probe, recipe, dtype, devices, numbers) for dtype in dtypes]
    strictness = (Kind.UNTRIED, Kind.COUPLED, Kind.PER_TENSOR, Kind.ELEMENT_WISE)
    verdict = replace(
        min(verdicts, key=lambda each: strictness.index(each.kind)),
        random=any(each.random for each in verdicts),
        global_state=any(each.global_state for each in verdicts),
        fill_empty_groups=any(each.fill_empty_groups for each in verdicts),
    )
    if len(dtypes) > 1 and not verdict.random and verdict.kind in strictness[2:]:
        filled = verdict.fill_empty_groups
        pair = _cached(incompatible_dtypes, recipe, dtypes, devices, filled)
        if pair is not None:
            raise ValueError(
                f"{recipe.name} updates tensors of {pair[0]} and {pair[1]} in one group "
                "differently than apart, so numbers would depend on the owner of each; give each "
                "dtype its own group, or keep masters with precision=MixedPrecision()"
            )
    return verdict


def _refuse(asked: Layout | None, name: str, verdict: Verdict) -> None:
    """Raise if no layout is right, or if only the user can decide."""
    if verdict.kind is Kind.COUPLED:
        raise ValueError(
            f"{name} couples all parameters ({verdict.why}); use it unsharded on every rank"
        )
    if asked == "sliced" and verdict.kind is Kind.PER_TENSOR:
        raise ValueError(
            f"layout='sliced' would change the numbers of {name}, which {verdict.why}; use "
            "layout='whole' or 'auto'"
        )
    if asked is not None:
        return
    if verdict.error is not None:
        raise verdict.error
    if verdict.kind is Kind.UNTRIED:
        raise ValueError(
            f"{name} could not be probed ({verdict.why}); if each tensor's update depends only on "
            "that tensor, pass layout='whole' or declare shardstep_layout = 'whole' in the class"
        )
    if verdict.random:
        raise ValueError(
            f"{name} draws random numbers, and ranks would draw others than a single process; pass "
            f"layout={verdict.layout!r} to accept that, and seed each rank differently"
        )


def _cached(find: Callable[..., Any], recipe: OptimizerRecipe, *args: Any) -> Any:
    """Return `find(recipe, *args)`, cached unless an option cannot be hashed."""
    try:
        hash(recipe)
    except TypeError:
        return find(recipe, *args)
    return _find(find, recipe, *args)


@lru_cache(maxsize=256)
def _find(find: Callable[..., Any], recipe: OptimizerRecipe, *args: Any) -> Any:
    return find(recipe, *args)


def refuse_per_parameter_options(recipe: OptimizerRecipe, params: Sequence[torch.Tensor]) -> None:
    """Raise `ValueError` if options name single parameters, or bitsandbytes has such options.

    A class finds them by the parameter, its `id` or its position, which differ for the views of a
    rank.
    """
    ids = set(map(id, params))
    for name, value in {**recipe.defaults, **recipe.group_options}.items():
        if any(id(each) in ids or (type(each) is int and each in ids) for each in _contents(value)):
            raise ValueError(
                f"option {name!r} of {recipe.name} names parameters, which the class cannot find "
                "among the views that a rank steps on; give those parameters their own group, or "
                "set the option as an attribute of each parameter, if the class can read that"
            )
    plain = unwrap_partial(recipe.optimizer_class)
    library: Any = sys.modules.get("bitsandbytes.optim.optimizer")
    base = getattr(library, "Optimizer8bit", None)
    if base is None or not isinstance(plain, type):
        return
    manager = library.GlobalOptimManager.get_instance()
    options = manager.pid2config or manager.index2config or manager.module_weight_config_triple
    if options and issubclass(plain, base):
        raise ValueError(
            "bitsandbytes' GlobalOptimManager has options for single parameters (StableEmbedding "
            f"sets some), which {plain.__name__} cannot find on a rank; clear its pid2config, "
            "index2config and module_weight_config_triple, and give those parameters a group with "
            f"its own {CLASS_KEY!r}"
        )


def _contents(value: Any) -> Iterator[Any]:
    """Yield the contents of an option at any depth, and the keys of mappings."""
    if isinstance(value, Mapping):
        yield from value
        value = value.values()
    elif not isinstance(value, (list, tuple, set, frozenset)):
        yield value
        return
    for each in value:
        yield from _contents(each)
