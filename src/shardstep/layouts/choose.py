"""Which layout each group gets: the one asked for, declared, known or found by trying, if right.

A class may say itself what it needs, and is believed: `shardstep_layout = "whole"` or `"sliced"`;
also if it is given as a `functools.partial`, or made by a function.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.layouts.beside import differs_beside
from shardstep.layouts.cost import step_cost
from shardstep.layouts.known_classes import refuse_overrides
from shardstep.layouts.probe import Verdict, probe
from shardstep.layouts.trial import sizes_among
from shardstep.local.multi_class import CLASS_KEY, full_name, split_options
from shardstep.local.sandbox import sandbox
from shardstep.params.dtensor import num_parts, refuse_part
from shardstep.params.inputs import unwrap_partial
from shardstep.plan import Layout, ParamSpec

ELEMENT_WISE: frozenset[Any] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.ASGD,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    }
)
"""Classes of which the answer is known; a test compares it with what trying them says."""

LAYOUTS = ("sliced", "whole")

CACHED = 256
"""So many verdicts are remembered."""

_verdicts: OrderedDict[Any, Any] = OrderedDict()

Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What updates a group, and how it is made."""

    optimizer_class: Callable[..., Optimizer]
    defaults: Mapping[str, Any]
    group_options: Mapping[str, Any]


class Layouts:
    """The layouts of an optimizer's groups.

    Args:
        layout: what the user asked for, `"auto"` included.
        optimizer_class: the class of the groups that name none.
        defaults: options for that class.
        world_size: among how many ranks the parameters are divided.
        step_dtype: in which dtype a parameter of a dtype is stepped on.

    Attributes:
        choices: for each group, what was chosen and why.
    """

    def __init__(
        self,
        layout: str,
        optimizer_class: Callable[..., Optimizer],
        defaults: Mapping[str, Any],
        world_size: int,
        step_dtype: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        self._step_dtype = step_dtype
        self._layout = layout
        self._default = optimizer_class
        self._defaults = defaults
        self._world_size = world_size
        self._asked: list[_Asked] = []
        self._costs: dict[tuple[int, tuple[int, ...]], int] = {}
        self.choices: list[Choice] = []

    def apply(self, groups: Groups, specs: Sequence[ParamSpec]) -> list[ParamSpec]:
        """The same parameters with their layouts and costs.

        Raises:
            ValueError: if a class cannot be sharded, or not in the layout that was asked for, or
                needs whole tensors where a rank has a part of a DTensor.
        """
        for group in groups[len(self._asked) :]:
            # As the user gave it: once the optimizer is made, groups hold what it has put there.
            self._asked.append(self._read(group))
        self.choices = [
            choose(
                self._layout,
                asked.optimizer_class,
                asked.defaults,
                asked.group_options,
                group["params"],
                self._world_size * max(map(num_parts, group["params"]), default=1),
                self._step_dtype,
            )
            for asked, group in zip(self._asked, groups, strict=True)
        ]
        named = any(CLASS_KEY in group for group in groups)
        for asked, choice in zip(self._asked, self.choices, strict=True):
            if named and choice.verdict is not None and choice.verdict.loose:
                raise ValueError(
                    f"{name_of(asked.optimizer_class)} keeps state that belongs to no parameter, "
                    "which several classes in one optimizer cannot share; use it alone"
                )
        layouts = [choice.layout for choice in self.choices]
        params = [param for group in groups for param in group["params"]]
        for spec, param in zip(specs, params, strict=True):
            if layouts[spec.group] == "whole" and num_parts(param) > 1:
                refuse_part(spec.name, param, name_of(self._asked[spec.group].optimizer_class))
        return [
            replace(spec, layout=layouts[spec.group], cost=self._cost(spec.group, spec.shape))
            for spec in specs
        ]

    def filled(self) -> list[int]:
        """The groups that are to be filled for a step on a rank that has nothing of them."""
        return [n for n, c in enumerate(self.choices) if c.verdict is not None and c.verdict.filled]

    def forget(self, num_groups: int) -> None:
        """Only the first `num_groups` groups are left."""
        del self._asked[num_groups:], self.choices[num_groups:]
        self._costs.clear()

    def lines(self) -> list[str]:
        """One line per group, for ranks to compare."""
        return [
            f"layout of group {number}: {choice.layout}"
            + (f" ({choice.verdict.kind})" if choice.verdict else "")
            for number, choice in enumerate(self.choices)
        ]

    def explain(self, groups: Groups) -> list[str]:
        """One line per group, for people: the layout, and how it was come by.

        What one rank did not need to know is tried now.
        """
        said = []
        for number, (asked, choice) in enumerate(zip(self._asked, self.choices, strict=True)):
            why = choice.why
            if self._world_size == 1:
                try:
                    args = (asked.optimizer_class, asked.defaults, asked.group_options)
                    params = groups[number]["params"]
                    several = choose(self._layout, *args, params, 2, self._step_dtype)
                    why += f"; several would have it {several.layout}: {several.why}"
                except Exception as error:
                    why += f"; several could not: {error}"
            said.append(f"group {number}: {choice.layout}, since {why}")
        return said

    def _read(self, group: Mapping[str, Any]) -> _Asked:
        given = group.get(CLASS_KEY)
        options = {k: v for k, v in group.items() if k not in ("params", "param_names", CLASS_KEY)}
        if given is None or given == full_name(self._default):
            return _Asked(self._default, self._defaults, options)
        if isinstance(given, str) or not callable(given):
            raise ValueError(
                f"{CLASS_KEY!r} of a parameter group has to be an optimizer class, not {given!r}"
            )
        return _Asked(given, *split_options(given, group))

    def _cost(self, group: int, shape: tuple[int, ...]) -> int:
        if self.choices[group].layout == "sliced" or self._world_size == 1:
            return 0
        key = (group, shape)
        if key not in self._costs:
            asked = self._asked[group]
            self._costs[key] = step_cost(
                asked.optimizer_class, asked.defaults, asked.group_options, shape
            )
        return self._costs[key]


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout and how it was come by.

    Attributes:
        layout: the layout.
        why: in words.
        verdict: what trying said, if it was tried.
    """

    layout: Layout
    why: str
    verdict: Verdict | None = None


def choose(
    layout: str,
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    group_options: Mapping[str, Any],
    params: Sequence[torch.Tensor],
    world_size: int,
    step_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> Choice:
    """The layout for parameters of one group.

    One rank has everything: there, any class is right in any layout, and none is tried.

    Args:
        layout: what the user asked for, `"auto"` included.
        optimizer_class: what is to update them.
        defaults: options that the class is called with.
        group_options: options that the group has of its own.
        params: the parameters; their dtypes and devices count.
        world_size: among how many ranks they are divided.
        step_dtype: in which dtype a parameter of a dtype is stepped on.

    Raises:
        ValueError: if there is no such layout, or sharding would change the class's numbers; or
            nobody can say whether it would.
        Exception: what the class raises when it is constructed with these options, if it cannot be.
    """
    if layout not in ("auto", *LAYOUTS):
        raise ValueError(f"layout has to be 'auto', 'sliced' or 'whole', not {layout!r}")
    asked: Layout | None = None if layout == "auto" else layout  # type: ignore[assignment]
    name = name_of(optimizer_class)
    refuse_overrides(optimizer_class)
    plain = unwrap_partial(optimizer_class)
    declared = getattr(plain, "shardstep_layout", None)
    if declared is None and world_size > 1 and not isinstance(plain, type):
        made = _made_by(optimizer_class, defaults, group_options)
        declared = getattr(made, "shardstep_layout", None)
    if declared is not None and declared not in LAYOUTS:
        raise ValueError(f"{name}.shardstep_layout has to be 'sliced' or 'whole', not {declared!r}")
    # What a function makes of such a class may have got hooks that change its steps.
    element_wise = isinstance(plain, type) and plain in ELEMENT_WISE
    known: Layout | None = "sliced" if element_wise else declared
    if world_size == 1:
        return Choice(asked or known or "whole", "one rank holds everything")
    if known is not None:
        how = f"{name} declares it" if declared else f"{name} is known to be element-wise"
        if asked == "sliced" and known == "whole":
            raise ValueError(f"layout='sliced' was asked for, but {how} to need 'whole'")
        return Choice(asked or known, how if asked in (None, known) else "asked for")
    dtypes = {step_dtype(p.dtype) for p in params if p.requires_grad} or {torch.float32}
    devices = [torch.device("cpu"), *sorted({p.device for p in params if p.is_cuda}, key=str)]
    largest = max((p.numel() for p in params), default=0)
    sizes = sizes_among(optimizer_class, defaults, group_options, largest)
    verdicts = [
        verdict_on(optimizer_class, defaults, group_options, dtype, devices, sizes)
        for dtype in sorted(dtypes, key=str)
    ]
    strictness = ("untried", "coupled", "per tensor", "element-wise")
    verdict = min(verdicts, key=lambda v: (strictness.index(v.kind), not v.random))
    verdict = replace(verdict, filled=any(each.filled for each in verdicts))
    _refuse(asked, name, verdict)
    _refuse_mixed_dtypes(optimizer_class, defaults, group_options, dtypes, devices, verdict)
    needed = verdict.layout or "whole"
    return Choice(asked or needed, f"{name} was tried and is {verdict}", verdict)


def _refuse(asked: Layout | None, name: str, verdict: Verdict) -> None:
    """Raise unless a layout is right, or the user takes what nobody can know on himself."""
    if verdict.kind == "coupled":
        raise ValueError(
            f"{name} couples all parameters ({verdict.why}), so no rank can update its own alone; "
            "use it unsharded on every rank"
        )
    if asked == "sliced" and verdict.kind == "per tensor":
        raise ValueError(
            f"layout='sliced' was asked for, but {name} looks at whole tensors ({verdict.why}), so "
            "its numbers would change; use layout='whole', which 'auto' takes"
        )
    if asked is not None:
        return
    if verdict.kind == "untried":
        if verdict.error is not None:
            raise verdict.error
        raise ValueError(
            f"{name} could not be tried ({verdict.why}), so nobody knows whether ranks can divide "
            "its work; if its update of a tensor depends on that tensor alone, pass layout='whole' "
            "or declare shardstep_layout = 'whole' in the class"
        )
    if verdict.random:
        raise ValueError(
            f"{name} draws random numbers, and ranks that divide its work draw other ones than a "
            f"single one would; pass layout={verdict.layout!r} if that is all right, and seed each "
            "rank differently"
        )


def _refuse_mixed_dtypes(
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    group_options: Mapping[str, Any],
    dtypes: set[torch.dtype],
    devices: Sequence[torch.device],
    verdict: Verdict,
) -> None:
    """Raise if tensors of these dtypes, in one group, are updated otherwise than apart."""
    if len(dtypes) < 2 or verdict.random or verdict.kind == "untried":
        return
    args = (defaults, group_options, tuple(sorted(dtypes, key=str)), tuple(devices))
    key = ("mixed", optimizer_class, *map(_frozen, args[:2]), *args[2:])
    pair = _once(key, lambda: differs_beside(optimizer_class, *args))
    if pair is not None:
        raise ValueError(
            f"{name_of(optimizer_class)} updates tensors of {pair[0]} and {pair[1]} in one group "
            "otherwise than apart, so its numbers would depend on which rank owns which; give each "
            "dtype a group of its own, or keep masters with precision=MixedPrecision()"
        )


def verdict_on(
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    group_options: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
    sizes: tuple[int, ...] = (),
) -> Verdict:
    """What `probe` says; asked once for each class, set of options, dtype and sizes."""
    args = (defaults, group_options, dtype, devices, sizes)
    key = (optimizer_class, *map(_frozen, args[:2]), dtype, tuple(devices), sizes)
    found: Verdict = _once(key, lambda: probe(optimizer_class, *args))
    return found


def _once(key: Any, find: Callable[[], Any]) -> Any:
    """What `find` returns, or has returned for an equal key."""
    try:
        if key in _verdicts:
            return _verdicts[key]
    except TypeError:  # an option that cannot be told from another one
        return find()
    found = _verdicts[key] = find()
    while len(_verdicts) > CACHED:
        _verdicts.popitem(last=False)
    return found


def _made_by(
    make: Callable[..., Optimizer], defaults: Mapping[str, Any], group_options: Mapping[str, Any]
) -> Any:
    """What a function makes, which may say more than the function; None if it makes nothing."""
    # What it raises is for the trial to report.
    with sandbox(make, torch.device("cpu")), contextlib.suppress(Exception):
        param = torch.nn.Parameter(torch.zeros(2, 2))
        return make([{**group_options, "params": [param]}], **defaults)
    return None


def name_of(optimizer_class: Any) -> str:
    """What to call it in a message."""
    optimizer_class = unwrap_partial(optimizer_class)
    return str(getattr(optimizer_class, "__name__", type(optimizer_class).__name__))


def _frozen(value: Any) -> Any:
    """An equal key for equal options."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _frozen(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), str(value.device), repr(value.tolist())
    # 1, 1.0 and True are equal, and not the same to a class.
    return type(value).__name__, value
