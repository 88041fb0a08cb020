"""Several optimizer classes in one optimizer: each group may name the class that updates it."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from shardstep.params.groups import rename_params
from shardstep.params.inputs import check_optimizer, unwrap_partial

CLASS_KEY = "optimizer_class"
"""The key of a group's class. Once the optimizer is constructed, its value is the full name."""

PER_PARAMETER = frozenset({"params", "param_names"})
"""The keys of a group that hold something for each parameter."""

NO_OPTIONS = PER_PARAMETER | {CLASS_KEY}
"""The keys of a group that are not options."""

Group = dict[str, Any]
Make = Callable[..., Optimizer]


def full_name(optimizer_class: Any) -> str:
    """Return the name of a class in groups and state dicts."""
    optimizer_class = unwrap_partial(optimizer_class)
    if isinstance(optimizer_class, str):
        return optimizer_class
    where = getattr(optimizer_class, "__module__", "")
    return f"{where}.{getattr(optimizer_class, '__qualname__', type(optimizer_class).__name__)}"


def group_options(group: Mapping[str, Any]) -> Group:
    """Return the options of a group."""
    return {key: group[key] for key in group if key not in NO_OPTIONS}


def split_options(optimizer_class: Make, group: Mapping[str, Any]) -> tuple[Group, Group]:
    """Return the options of a group that the class takes as arguments, and the others.

    The others, such as a scheduler's `initial_lr` or a label, stay in the group.
    """
    takes = inspect.signature(optimizer_class).parameters.values()
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes)
    names = {each.name for each in takes}
    options = group_options(group)
    arguments = {k: v for k, v in options.items() if takes_any or k in names}
    return arguments, {k: v for k, v in options.items() if k not in arguments}


def check_class_of_group(given: Any) -> None:
    """Raise if a group names something that cannot be called to make an optimizer."""
    if isinstance(given, str) or not callable(given):
        raise ValueError(
            f"{CLASS_KEY!r} of a parameter group must be an optimizer class, not {given!r}"
        )


@contextlib.contextmanager
def no_defaults(opt: Optimizer) -> Iterator[None]:
    """Hide the defaults of `opt` while a group is added: its class has other ones."""
    defaults, opt.defaults = opt.defaults, {}
    try:
        yield
    finally:
        opt.defaults = defaults


class MultiClass(Optimizer):
    """An optimizer whose groups are updated by different classes, such as Muon and AdamW.

    A group with a class under `"optimizer_class"` gets its own optimizer, constructed with the
    group's options. The other groups share one of the default class, `optimizer_class` with
    `defaults`. All parts share one state mapping, and the groups of this optimizer: a scheduler's
    changes reach them.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> opt = MultiClass(
        ...     [
        ...         {"params": [model.weight], "optimizer_class": torch.optim.Muon, "lr": 0.02},
        ...         {"params": [model.bias]},
        ...     ],
        ...     torch.optim.AdamW,
        ...     lr=3e-4,
        ... )
        >>> [type(part).__name__ for part in opt.parts]
        ['Muon', 'AdamW']
    """

    parts: list[Optimizer]
    """The optimizers, in the order of their first groups."""
    classes: list[Make | None]
    """For each group, the class that it names; None for the default class."""

    def __init__(self, params: Any, optimizer_class: Make, **defaults: Any) -> None:
        self.parts = []
        self.classes = []
        self._part_of: list[int] = []
        self._default: int | None = None
        self._make_default: Make = lambda groups: optimizer_class(groups, **defaults)
        self._default_name = full_name(optimizer_class)
        self._state: Any = defaultdict(dict)
        super().__init__(params, {})
        if self._default is not None:
            # Schedulers look there.
            self.defaults = self.parts[self._default].defaults

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, optimizer_name(self), 1)

    @property
    def state(self) -> Any:
        """The state of all parts, by parameter."""
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        self._state = value
        for part in self.parts:
            part.state = value

    @override
    def add_param_group(self, param_group: Group) -> None:
        given = param_group.get(CLASS_KEY)
        with no_defaults(self):
            super().add_param_group(param_group)
        # Replace the checked group by that of the part, which has the defaults of its class.
        group = self.param_groups.pop()
        if given is None or given == self._default_name:
            given, group = None, {**group, CLASS_KEY: self._default_name}
            if self._default is None:
                self._default = self._join(self._make_default([group]))
            else:
                self.parts[self._default].add_param_group(group)
            owner = self._default
        else:
            check_class_of_group(given)
            arguments, rest = split_options(given, group)
            per_parameter = {k: v for k, v in group.items() if k in PER_PARAMETER}
            owner = self._join(given([{**per_parameter, **rest}], **arguments))
            self.parts[owner].param_groups[0][CLASS_KEY] = full_name(given)
        self.param_groups.append(self.parts[owner].param_groups[-1])
        self._part_of.append(owner)
        self.classes.append(given)

    def _join(self, part: Optimizer) -> int:
        """Add a part, and return its number."""
        check_optimizer(part, 1)
        if extras(part):
            raise ValueError(
                f"{type(part).__name__} keeps {', '.join(map(repr, extras(part)))} in its state "
                "dict, which belongs to no parameter and which several classes in one optimizer "
                "cannot share; use it alone"
            )
        self._state.update(part.state)  # some classes make state in their constructor
        part.state = self._state
        self.parts.append(part)
        return len(self.parts) - 1

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step with every part. The closure is evaluated once, before all parts."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["param_groups"]
        ours, theirs = ([len(g["params"]) for g in each] for each in (self.param_groups, saved))
        if ours != theirs:
            raise ValueError(
                f"the loaded state dict has parameter groups of lengths {theirs}, but this "
                f"optimizer has groups of lengths {ours}"
            )
        check_classes(saved, self.param_groups)
        known = {identifier for group in saved for identifier in group["params"]}
        if unknown := [key for key in state_dict["state"] if key not in known]:
            raise ValueError(
                f"the loaded state dict has state {unknown[0]!r}, which belongs to no parameter, "
                "and so to none of the classes of this optimizer"
            )
        merged: Any = defaultdict(dict)
        before = [dict(vars(part)) for part in self.parts]
        try:
            for number, part in enumerate(self.parts):
                part.state = defaultdict(dict)
                part.load_state_dict(_select_groups(state_dict, self._groups_of(number)))
                merged.update(part.state)
        except BaseException:
            # Undo all: the parts must not continue from different points.
            for part, attributes in zip(self.parts, before, strict=True):
                vars(part).clear()
                vars(part).update(attributes)
            raise
        for number, part in enumerate(self.parts):
            for group, loaded in zip(self._groups_of(number), part.param_groups, strict=True):
                self.param_groups[group] = loaded
        self.state = merged

    def _groups_of(self, part: int) -> list[int]:
        return [group for group, owner in enumerate(self._part_of) if owner == part]


def refuse_new_class(group: Mapping[str, Any], opt: Optimizer) -> None:
    """Raise if `group` names a class, and is to be added to an optimizer of one class."""
    if CLASS_KEY in group and not isinstance(opt, MultiClass):
        raise ValueError(
            f"this optimizer was constructed with one class for all groups, so a group with "
            f"{CLASS_KEY!r} cannot be added; name the class of a group from the start"
        )


def parts_of(opt: Optimizer) -> Sequence[Optimizer]:
    """Return the parts of a `MultiClass`. Any other optimizer is its only part."""
    return opt.parts if isinstance(opt, MultiClass) else [opt]


def optimizer_name(opt: Optimizer) -> str:
    """Return the names of the classes in `opt`, for messages."""
    return " and ".join(dict.fromkeys(type(part).__name__ for part in parts_of(opt)))


def saved_name(opt: Optimizer) -> str:
    """Return the full names of the classes in `opt`, for checkpoints."""
    return " and ".join(dict.fromkeys(full_name(type(part)) for part in parts_of(opt)))


def check_classes(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ValueError if saved groups name other classes than `groups` do."""
    for number, (there, here) in enumerate(zip(saved, groups, strict=True)):
        if CLASS_KEY in there and CLASS_KEY in here and there[CLASS_KEY] != here[CLASS_KEY]:
            raise ValueError(
                f"group {number} of the loaded state dict is of class {there[CLASS_KEY]}, but of "
                f"class {here[CLASS_KEY]} in this optimizer; construct it with the same classes"
            )


def of_one_class(saved: Sequence[Mapping[str, Any]], optimizer_class: type) -> list[Group]:
    """Return saved groups without the names of their classes, which must be the given one."""
    check_classes(saved, [{CLASS_KEY: full_name(optimizer_class)}] * len(saved))
    return [{key: value for key, value in each.items() if key != CLASS_KEY} for each in saved]


def split_state_dict(state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the state dicts for plain optimizers, by the full name of their class.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, 4))
        >>> opt = MultiClass([{"params": [weight]}], torch.optim.SGD, lr=0.1)
        >>> list(split_state_dict(opt.state_dict()))
        ['torch.optim.sgd.SGD']
    """
    groups_of: dict[str, list[int]] = {}
    for number, group in enumerate(state_dict["param_groups"]):
        groups_of.setdefault(group[CLASS_KEY], []).append(number)
    parts = {}
    for name, numbers in groups_of.items():
        part = _select_groups(state_dict, numbers)
        for group in part["param_groups"]:
            del group[CLASS_KEY]
        old_ids = [each for group in part["param_groups"] for each in group["params"]]
        parts[name] = rename_params(part, {old: new for new, old in enumerate(old_ids)})
    return parts


def _select_groups(state_dict: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    groups = [dict(state_dict["param_groups"][number]) for number in numbers]
    identifiers = {identifier for group in groups for identifier in group["params"]}
    state = {key: value for key, value in state_dict["state"].items() if key in identifiers}
    return {"state": state, "param_groups": groups}


def global_state(opt: Optimizer) -> dict[Any, Any]:
    """Return the state that belongs to no parameter."""
    return {key: value for key, value in opt.state.items() if not isinstance(key, torch.Tensor)}


def extras(opt: Optimizer) -> dict[str, Any]:
    """Return the entries that a class adds to its state dict, such as counters."""
    if type(opt).state_dict is Optimizer.state_dict:
        return {}
    return {k: v for k, v in opt.state_dict().items() if k not in ("state", "param_groups")}
