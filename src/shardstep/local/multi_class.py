"""Several optimizer classes in one optimizer: each group may name the class that updates it."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.params.inputs import check_optimizer, unwrap_partial

CLASS_KEY = "optimizer_class"
"""Under this key a group has its class; once the optimizer is made, the class's full name."""

Group = dict[str, Any]
Make = Callable[..., Optimizer]


def names_a_class(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any of the groups names its own class."""
    return any(CLASS_KEY in group for group in groups)


def full_name(optimizer_class: Any) -> str:
    """What a class is called in groups and state dicts."""
    optimizer_class = unwrap_partial(optimizer_class)
    if isinstance(optimizer_class, str):
        return optimizer_class
    where = getattr(optimizer_class, "__module__", "")
    return f"{where}.{getattr(optimizer_class, '__qualname__', type(optimizer_class).__name__)}"


def split_options(optimizer_class: Make, group: Mapping[str, Any]) -> tuple[Group, Group]:
    """Which of a group's options the class is called with, and which stay in the group.

    A class is called with what it has a parameter for; the rest, such as a scheduler's
    `initial_lr` or a label, is none of its business.
    """
    takes = inspect.signature(optimizer_class).parameters.values()
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes)
    names = {each.name for each in takes}
    options = {k: v for k, v in group.items() if k not in ("params", "param_names", CLASS_KEY)}
    called = {k: v for k, v in options.items() if anything or k in names}
    return called, {k: v for k, v in options.items() if k not in called}


@contextlib.contextmanager
def no_defaults(opt: Optimizer) -> Iterator[None]:
    """While this lasts, a group that is added is not given the defaults of the default class.

    It gets those of the class that it names, from that class.
    """
    defaults, opt.defaults = opt.defaults, {}
    try:
        yield
    finally:
        opt.defaults = defaults


class MultiClass(Optimizer):
    """An optimizer whose groups are updated by different classes, Muon and AdamW for instance.

    A group that has a class under `"optimizer_class"` is updated by an optimizer of its own, which
    is constructed with the group's options. The other groups share one of the default class. All of
    them keep their state in one mapping and have the very groups that this optimizer has, so
    whatever is done to those (by a scheduler, say) reaches them.

    Args:
        params: parameter groups.
        optimizer_class: the class of the groups that name none.
        **defaults: options for that class.

    Attributes:
        parts: the optimizers, in the order of their first groups.
        classes: for each group, the class it names; None for the default class.

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
    classes: list[Make | None]

    def __init__(self, params: Any, optimizer_class: Make, **defaults: Any) -> None:
        self.parts = []
        self.classes = []
        self._part_of: list[int] = []
        self._common: int | None = None
        self._make_common: Make = lambda groups: optimizer_class(groups, **defaults)
        self._common_name = full_name(optimizer_class)
        self._state: Any = defaultdict(dict)
        super().__init__(params, {})
        if self._common is not None:
            # Schedulers look there for what an optimizer knows.
            self.defaults = self.parts[self._common].defaults

    @property
    def state(self) -> Any:
        """The state of all parts, by parameter."""
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        self._state = value
        for part in self.parts:
            part.state = value

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, to an optimizer of its own if it names a class.

        Args:
            param_group: parameters under `"params"`, options, and a class if it is not the default.
        """
        given = param_group.get(CLASS_KEY)
        with no_defaults(self):
            super().add_param_group(param_group)
        # What was checked is handed on: the part makes it its own, with its defaults in it.
        self.param_groups.append(self._take(self.param_groups.pop(), given))

    def _take(self, group: Group, given: Any) -> Group:
        """Hand a checked group to the part that is to update it; returns that part's own group."""
        if given is None or given == self._common_name:
            group = {**group, CLASS_KEY: self._common_name}
            if self._common is None:
                self._common = len(self.parts)
                self._join(self._make_common([group]))
            else:
                self.parts[self._common].add_param_group(group)
            self._part_of.append(self._common)
            self.classes.append(None)
            common: Group = self.parts[self._common].param_groups[-1]
            return common
        if isinstance(given, str) or not callable(given):
            raise ValueError(
                f"{CLASS_KEY!r} of a parameter group has to be an optimizer class, not {given!r}"
            )
        called, rest = split_options(given, group)
        mine: Group = {k: v for k, v in group.items() if k in ("params", "param_names")}
        part = given([{**mine, **rest}], **called)
        self._join(part)
        part.param_groups[0][CLASS_KEY] = full_name(given)
        self._part_of.append(len(self.parts) - 1)
        self.classes.append(given)
        taken: Group = part.param_groups[0]
        return taken

    def _join(self, part: Optimizer) -> None:
        check_optimizer(part, 1)
        if extras(part):
            raise ValueError(
                f"{type(part).__name__} keeps {', '.join(map(repr, extras(part)))} in its state "
                "dict, which belongs to no parameter and which several classes in one optimizer "
                "cannot share; use it alone"
            )
        self._state.update(part.state)  # some classes make their state when they are made
        part.state = self._state
        self.parts.append(part)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Have every part take a step.

        Args:
            closure: computes the loss anew and returns it; evaluated once, before all parts.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have every part load what belongs to it, in its own way.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            ValueError: if its groups are not of the lengths or classes of these.
        """
        saved = state_dict["param_groups"]
        ours, theirs = ([len(g["params"]) for g in each] for each in (self.param_groups, saved))
        if ours != theirs:
            raise ValueError(
                f"the loaded state dict has parameter groups of lengths {theirs}, but this "
                f"optimizer has groups of lengths {ours}"
            )
        check_classes(saved, self.param_groups)
        known = {identifier for group in saved for identifier in group["params"]}
        if loose := [key for key in state_dict["state"] if key not in known]:
            raise ValueError(
                f"the loaded state dict has state {loose[0]!r}, which belongs to no parameter: "
                "which of several classes it is for cannot be known"
            )
        merged: Any = defaultdict(dict)
        before = [dict(vars(part)) for part in self.parts]
        try:
            for number, part in enumerate(self.parts):
                part.state = defaultdict(dict)
                part.load_state_dict(_part_of_state_dict(state_dict, self._groups_of(number)))
                merged.update(part.state)
        except BaseException:
            # A part that is left with the state it was loading would go on from that, or from
            # zero, while the others go on from theirs.
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


def parts_of(opt: Optimizer) -> Sequence[Optimizer]:
    """Return the parts of a `MultiClass`. Any other optimizer is its only part."""
    return opt.parts if isinstance(opt, MultiClass) else [opt]


def optimizer_name(opt: Optimizer) -> str:
    """Return the names of the classes in `opt`, for messages.

    Example:
        >>> optimizer_name(torch.optim.SGD([torch.ones(2)]))
        'SGD'
    """
    return " and ".join(dict.fromkeys(type(part).__name__ for part in parts_of(opt)))


def check_classes(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Make sure that saved groups are of the classes that these groups are of.

    Raises:
        ValueError: if they name others. Groups that name none are taken.
    """
    for number, (there, here) in enumerate(zip(saved, groups, strict=True)):
        if CLASS_KEY in there and CLASS_KEY in here and there[CLASS_KEY] != here[CLASS_KEY]:
            raise ValueError(
                f"group {number} of the loaded state dict is of class {there[CLASS_KEY]}, but of "
                f"class {here[CLASS_KEY]} in this optimizer; construct it with the same classes"
            )


def of_one_class(saved: Sequence[Mapping[str, Any]], optimizer_class: type) -> list[Group]:
    """Saved groups for an optimizer of one class, which does not name it in its groups.

    Raises:
        ValueError: if they name another one. Groups that name none are taken.
    """
    check_classes(saved, [{CLASS_KEY: full_name(optimizer_class)}] * len(saved))
    return [{key: value for key, value in each.items() if key != CLASS_KEY} for each in saved]


def split_state_dict(state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The state dicts that plain optimizers, one of each class, would have.

    Args:
        state_dict: the state dict of a `MultiClass`, or of a sharded one.

    Returns:
        By full name of the class: a dict that an optimizer of this class, given the parameters of
        its groups, loads.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, 4))
        >>> opt = MultiClass([{"params": [weight]}], torch.optim.SGD, lr=0.1)
        >>> list(split_state_dict(opt.state_dict()))
        ['torch.optim.sgd.SGD']
    """
    groups = state_dict["param_groups"]
    found: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        found.setdefault(group[CLASS_KEY], []).append(number)
    parts = {}
    for name, mine in found.items():
        part = _part_of_state_dict(state_dict, mine)
        numbers: dict[Any, int] = {}
        for group in part["param_groups"]:
            del group[CLASS_KEY]
            for identifier in group["params"]:
                numbers[identifier] = len(numbers)
            group["params"] = [numbers[identifier] for identifier in group["params"]]
        part["state"] = {numbers.get(key, key): value for key, value in part["state"].items()}
        parts[name] = part
    return parts


def _part_of_state_dict(state_dict: Mapping[str, Any], mine: Sequence[int]) -> dict[str, Any]:
    groups = [dict(state_dict["param_groups"][number]) for number in mine]
    identifiers = {identifier for group in groups for identifier in group["params"]}
    state = {key: value for key, value in state_dict["state"].items() if key in identifiers}
    return {"state": state, "param_groups": groups}


def extras(opt: Optimizer) -> dict[str, Any]:
    """What a class has in its state dict beside state and groups: counters of its own, say."""
    if type(opt).state_dict is Optimizer.state_dict:
        return {}
    return {k: v for k, v in opt.state_dict().items() if k not in ("state", "param_groups")}
