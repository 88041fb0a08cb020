"""The user's parameters and options: checked, and described for the planner."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from types import GeneratorType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shardstep.params.dtensor import check_placements, local_part
from shardstep.params.flat import is_dense
from shardstep.plan import ParamSpec

Groups = Sequence[Mapping[str, Any]]


def unwrap_partial(given: Any) -> Any:
    """Return the callable inside of a `functools.partial`; anything else itself."""
    while isinstance(given, functools.partial):
        given = given.func
    return given


def _as_list(params: Any) -> list[Any]:
    """Return the given parameters, groups or named parameters as a list. Raise if they are not."""
    kinds = "an iterable of tensors, of (name, tensor) pairs or of dicts"
    if isinstance(params, torch.Tensor):
        raise TypeError(f"params must be {kinds}, but a single tensor was given; pass [tensor]")
    if isinstance(params, torch.nn.Module):
        raise TypeError(f"params must be {kinds}, but a module was given; pass its parameters()")
    try:
        given = list(params)
    except TypeError as error:
        raise TypeError(f"params must be {kinds}, not {type(params).__name__}") from error
    if not given:
        raise ValueError(
            "ZeroRedundancyOptimizer was given an empty parameter list; a generator, such as "
            "model.parameters(), can be read once only"
        )
    if all(isinstance(item, dict) for item in given):
        for index, group in enumerate(given):
            if "params" not in group:
                raise ValueError(f"parameter group {index} has no 'params' key")
        return given
    for index, item in enumerate(given):
        named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
        if not isinstance(item[1] if named else item, torch.Tensor):
            kind = type(item).__name__
            raise TypeError(f"params must be {kinds}, but item {index} is a {kind}")
    return given


def _module_of(params: Any, method: Any) -> torch.nn.Module | None:
    """Return the module whose `method`, an unread generator, was given as `params`."""
    if not isinstance(params, GeneratorType) or params.gi_code is not method.__code__:
        return None
    module: torch.nn.Module | None = inspect.getgeneratorlocals(params).get("self")
    return module


class ParamsArgument:
    """The user's `params`, read once. Errors are raised later, on all ranks."""

    def __init__(self, params: Any) -> None:
        self.module = _module_of(params, torch.nn.Module.parameters)
        """The module of `module.parameters()`, if that was given."""
        named = _module_of(params, torch.nn.Module.named_parameters)
        self.watched = named if self.module is None else self.module
        """The same, also of `module.named_parameters()`, whose names are the user's."""
        self._items: list[Any] = []
        self._error: Exception | None = None
        try:
            self._items = _as_list(params)
        except (TypeError, ValueError) as error:
            self._error = error

    def items(self) -> list[Any]:
        """Return the parameters, groups or named parameters. Raise if they are something else."""
        if self._error is not None:
            raise self._error
        return self._items

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters, except for those in groups that can be read once only."""
        given = [item.get("params") if isinstance(item, dict) else item for item in self._items]
        return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def parameters(groups: Groups) -> list[torch.Tensor]:
    """Return all parameters, group after group."""
    return [param for group in groups for param in group["params"]]


def is_trainable(param: torch.Tensor) -> bool:
    """Return True if a step may change `param`. As in `torch.optim`, a gradient is enough."""
    return param.requires_grad or param.grad is not None


def describe(groups: Groups, known: Mapping[int, str] | None = None) -> list[ParamSpec]:
    """Return the planner's view of the parameters; of DTensors, this rank's part.

    `known` are names by the parameter's id, for groups without names. Raise for a parameter that
    cannot be sharded.
    """
    specs: list[ParamSpec] = []
    devices: dict[str, list[torch.device]] = {}
    spans: list[tuple[int, int, str]] = []
    seen: set[int] = set()
    for number, group in enumerate(groups):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            name = names[position] if names else (known or {}).get(id(param))
            name = name or f"param {len(specs)}"
            check_placements(param, name)
            local = local_part(param)
            _check(local, name)
            if id(param) in seen:
                raise ValueError(f"parameter {name!r} is given twice; pass each parameter once")
            seen.add(id(param))
            same_type = devices.setdefault(param.device.type, [])
            if param.device not in same_type:
                same_type.append(param.device)
            specs.append(
                ParamSpec(
                    name=name,
                    shape=tuple(local.shape),
                    stride=tuple(local.stride()),
                    dtype=local.dtype,
                    device=f"{param.device.type}#{same_type.index(param.device)}",
                    group=number,
                    trainable=is_trainable(param),
                )
            )
            if local.numel():
                spans.append((local.data_ptr(), local.data_ptr() + local.nbytes, name))
    for (_, stop, name), (start, _, other) in pairwise(sorted(spans)):
        if start < stop:
            raise ValueError(
                f"parameters {name!r} and {other!r} share memory, so two ranks could update the "
                "same elements; give each its own storage, or use one Parameter in both places"
            )
    return specs


def _check(param: torch.Tensor, name: str) -> None:
    if param.layout is not torch.strided:
        raise ValueError(
            f"parameter {name!r} is sparse ({param.layout}); only dense parameters can be sharded"
        )
    if is_traceable_wrapper_subclass(param):
        raise TypeError(
            f"parameter {name!r} is a {type(param).__name__}, a tensor subclass that wraps other "
            "tensors and cannot be sharded; pass plain tensors"
        )
    if param.device.type == "meta":
        raise ValueError(
            f"parameter {name!r} is on the meta device and has no data; materialise the model "
            "before constructing the optimizer"
        )
    if not is_dense(param):
        raise ValueError(
            f"parameter {name!r} does not fill its memory (shape {tuple(param.shape)}, stride "
            f"{tuple(param.stride())}); replace it by a Parameter of its .contiguous() data"
        )


def check_arguments(
    known: Collection[str],
    optimizer_class: Any,
    defaults: Mapping[str, Any],
    module: Any,
    bucket_bytes: Any,
) -> None:
    """Raise `TypeError` if an argument has a wrong type or a misspelt name.

    `known` are the names of our own arguments; `defaults` are the options for the class.
    """
    if not callable(optimizer_class):
        raise TypeError(
            "optimizer_class must be a class, such as torch.optim.AdamW, not an object of type "
            f"{type(optimizer_class).__name__}; pass the class, and its options as keyword "
            "arguments"
        )
    if not isinstance(module, torch.nn.Module | None):
        raise TypeError(
            f"module must be a torch.nn.Module, not {module!r}; pass the model whose parameters "
            "these are"
        )
    if bucket_bytes is not None and type(bucket_bytes) is not int:
        raise TypeError(f"bucket_bytes must be an int, not {bucket_bytes!r}")
    with contextlib.suppress(ValueError):  # of a class that is not written in Python
        taken = inspect.signature(optimizer_class).parameters.values()
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken):
            return
        known = {*known, *(each.name for each in taken)}
    for name in defaults:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        if near and name not in known:
            raise TypeError(f"there is no argument {name!r}; did you mean {near[0]!r}?")


def check_optimizer(made: Any, num_groups: int) -> None:
    """Raise `ValueError` if `made` is not a `torch.optim.Optimizer` with this many groups."""
    kind = type(made).__name__
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer_class has to make a torch.optim.Optimizer, but it made a {kind}"
        )
    # A class that hands its parameters on to others may never have called the base class.
    if not hasattr(made, "state") or len(made.param_groups) != num_groups:
        raise ValueError(
            f"{kind} does not keep state and param_groups as a torch.optim.Optimizer does, so it "
            "cannot be sharded; use it unsharded, or pass the optimizer class that it wraps"
        )


def describe_options(
    groups: Groups, noted: Callable[[torch.Tensor], Any] = torch.Tensor.tolist
) -> list[str]:
    """Return one line for each option of each group, as far as ranks can compare them.

    Of a small tensor it has what `noted` returns. For its values the host waits for the device.
    """
    return [
        f"{key}={_plain(value, noted)} in group {number}"
        for number, group in enumerate(groups)
        for key, value in sorted(group.items())
        if key not in ("params", "param_names")
    ]


def _plain(value: Any, noted: Callable[[torch.Tensor], Any]) -> str:
    if isinstance(value, torch.Tensor):
        return repr(noted(value)) if value.numel() <= 8 else f"tensor{tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_plain(each, noted) for each in value)})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    # Objects print their address, which differs between ranks that agree.
    return type(value).__name__
