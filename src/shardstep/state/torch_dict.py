"""Pack groups into a `torch.optim` state dict, and load one rank's share of a full dict.

A load warns of trainable parameters without state: these would resume from zero.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from shardstep.layouts.choose import ELEMENT_WISE
from shardstep.local.multi_class import MultiClass, of_one_class, parts_of
from shardstep.params.dtensor import local_part
from shardstep.params.flat import flat
from shardstep.params.groups import group_ranges
from shardstep.params.names import shorten_list
from shardstep.plan import Interval, ParamSpec
from shardstep.state.tree import own_copy
from shardstep.state.view import ShardView

Groups = Sequence[Mapping[str, Any]]

KNOWN_KEYS = ("state", "param_groups", "masters", "rounding_step")
"""The entries of a full state dict that this library reads; the class reads the others."""

SCALARS = ("mu_product", "eta", "mu")
"""State of torch's NAdam and ASGD that, like `step`, has another dtype than the parameter."""


def pack_groups(groups: Groups) -> list[dict[str, Any]]:
    """Return the groups with numbers in place of parameters, and copies of tensor options."""
    packed = []
    for group, indices in zip(groups, group_ranges(groups), strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        options = tree_map_only(torch.Tensor, lambda value: value.detach().clone(), options)
        packed.append({**options, "params": list(indices)})
    return packed


@dataclass(slots=True)
class Share:
    """One rank's share of a loaded state dict. Installing it may raise, finishing it does not.

    Attributes:
        groups: the options of all groups, with parameters by number.
        states: by parameter number, as masters.
        global_state: the state that belongs to no parameter.
        extra: entries that only the class reads.
        wide: the parameters whose state was saved for a master or for a tensor of a wider dtype.
        has_masters: True on every rank if any rank was given masters.
    """

    groups: Groups
    states: Mapping[int, Any]
    masters: Mapping[int, torch.Tensor]
    global_state: Mapping[Any, Any]
    extra: Mapping[str, Any]
    wide: Container[int]
    stepped: bool
    has_masters: bool
    rounding_step: int

    def install(self, shards: ShardView) -> None:
        """Load state and group options into the local optimizer."""
        # torch numbers the pieces of the local optimizer in the order of its groups.
        numbers = {index: number for number, index in enumerate(sorted(shards.held))}
        states = {numbers[index]: value for index, value in self.states.items()}
        state = {**self.global_state, **states}
        local_groups = []
        for group, local in zip(self.groups, shards.optim.param_groups, strict=True):
            share = {**group, "params": [numbers[i] for i in group["params"] if i in numbers]}
            if "param_names" in local:
                share["param_names"] = local["param_names"]
            else:
                share.pop("param_names", None)  # of the saved optimizer, which had names
            local_groups.append(share)
        shards.optim.load_state_dict({**self.extra, "state": state, "param_groups": local_groups})
        dtypes = {index: shards.plan.specs[index].dtype for index in numbers}
        narrow = [None if index in self.wide else dtype for index, dtype in dtypes.items()]
        planned = {**dtypes, **shards.pipeline.params.step_dtypes}
        cast_since = [
            tensor.dtype not in (planned[index], shards.precision.step_dtype(tensor.dtype))
            for index, tensor in zip(numbers, _tensors(shards.optim), strict=True)
        ]
        _undo_casts(shards.optim, state, narrow, cast_since)

    def finish(self, shards: ShardView) -> None:
        """Set everything that `install` does not: masters, counts, and the exposed options."""
        shards.set_masters(self.masters)
        shards.local.stepped = self.stepped
        if self.has_masters:
            shards.local.mark_changed()  # a full state dict needs them, even before the first step
        shards.rounding_step = self.rounding_step
        shards.local.publish_options()


def share_of(full: Mapping[str, Any], shards: ShardView) -> Share:
    """Cut this rank's share out of a full state dict with parameters by number.

    A dict that does not fit raises a ValueError on every rank.
    """
    local, specs, held = shards.optim, shards.plan.specs, shards.held
    groups, masters = full["param_groups"], full.get("masters", {})
    if not isinstance(local, MultiClass):
        groups = of_one_class(groups, type(local))
    for index, master in masters.items():
        if index not in range(len(specs)):
            raise ValueError(
                f"the loaded state dict has a master for {index!r}, which is in no group"
            )
        if master.shape != specs[index].shape:
            raise ValueError(
                f"the master of parameter {specs[index].name!r} has shape {tuple(master.shape)}, "
                f"but the parameter has shape {specs[index].shape}; this state dict belongs to "
                "another model"
            )
    states = {index: value for index, value in full["state"].items() if index in range(len(specs))}
    for index, value in states.items():
        if specs[index].layout == "sliced" or type(local) in ELEMENT_WISE:
            _check_shapes(value, specs[index])
    return Share(
        groups,
        {i: slice_state(states[i], held[i], specs[i]) for i in states if i in held},
        {i: slice_state(masters[i], held[i], specs[i]) for i in masters if i in held},
        {key: copy.deepcopy(value) for key, value in full["state"].items() if key not in states},
        {key: copy.deepcopy(value) for key, value in full.items() if key not in KNOWN_KEYS},
        wide={*masters, *(held if "rounding_step" in full else ())},
        stepped=any(states.values()),
        has_masters=bool(masters),
        rounding_step=full.get("rounding_step", shards.rounding_step),
    )


def _check_shapes(value: Any, spec: ParamSpec) -> None:
    """Raise unless the state is a value per element or a number, as element-wise classes have."""
    for key, item in value.items():
        tensor = local_part(item)
        if isinstance(tensor, torch.Tensor) and is_traceable_wrapper_subclass(tensor):
            raise ValueError(
                f"state {key!r} of parameter {spec.name!r} is a {type(tensor).__name__}, which the "
                "optimizer here cannot use; this state dict belongs to another optimizer class"
            )
        if isinstance(tensor, torch.Tensor) and tensor.shape != spec.shape and tensor.numel() != 1:
            raise ValueError(
                f"state {key!r} of parameter {spec.name!r} has shape {tuple(tensor.shape)}, but "
                f"the parameter has shape {spec.shape}; this state dict belongs to another model"
            )


def slice_state(value: Any, held: Interval, spec: ParamSpec) -> Any:
    """Return a copy of a whole parameter's state for the elements `held` alone."""

    def part(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        item = local_part(item)
        if held.numel == spec.numel or item.shape != spec.shape:
            return own_copy(item)
        return flat(item, spec.stride)[held.slice].clone()

    return tree_map(part, value)


def _tensors(local: Optimizer) -> list[torch.Tensor]:
    return [tensor for group in local.param_groups for tensor in group["params"]]


def _undo_casts(
    local: Optimizer,
    saved: Mapping[Any, Any],
    dtypes: Sequence[torch.dtype | None],
    cast_since: Sequence[bool],
) -> None:
    """Restore the dtypes of state that `Optimizer.load_state_dict` casts to the parameter's.

    The moments of torch's own classes have the parameter's dtype anyway; only `SCALARS` do not.
    Other classes may keep fp32 or quantised state for 16-bit parameters: the cast would ruin it.
    So it would for `cast_since`: parameters that have been cast and get a master in the next step.
    """
    part_of = {p: part for part in parts_of(local) for g in part.param_groups for p in g["params"]}
    for number, (param, dtype) in enumerate(zip(_tensors(local), dtypes, strict=True)):
        kind = type(part_of[param])
        if number not in saved or kind.load_state_dict is not Optimizer.load_state_dict:
            continue
        state = local.state[param]
        if kind.__module__.startswith("torch.optim") and not cast_since[number]:
            for key in SCALARS:
                if isinstance(saved[number].get(key), torch.Tensor):
                    state[key] = saved[number][key].to(state[key].device)
        else:
            # State in the dtype of a 16-bit parameter follows it to its new master. With a saved
            # master, 16-bit state is the choice of the class.
            cast = None if cast_since[number] or param.dtype == dtype else dtype
            local.state[param] = _recast(state, saved[number], cast)


def _recast(loaded: Any, saved: Any, cast: torch.dtype | None) -> Any:
    """Return `saved` on the devices of `loaded`, except that tensors of dtype `cast` stay cast."""

    def choose(now: Any, then: Any) -> Any:
        # Loading turns text into something else, so only tensors are taken from `loaded`.
        if not isinstance(then, torch.Tensor):
            return then
        return now if then.dtype in (now.dtype, cast) else then.to(now.device)

    items, structure = tree_flatten(saved)
    # Leaf by leaf, since loading changes the classes of dicts and the lengths of deques.
    return tree_unflatten(map(choose, tree_leaves(loaded), items), structure)


def warn_of_missing_state(shards: ShardView, present: Collection[int]) -> None:
    """Warn of trainable parameters that have no state although their optimizer keeps some.

    Other parameters of the group show that the optimizer keeps state. If none has any, a rank steps
    on a copy of its smallest piece of the group to find out.
    """
    plan = shards.plan
    trainable = [index for index, spec in enumerate(plan.specs) if spec.trainable]
    lacking = {index for index in trainable if index not in present}
    keeping = {plan.specs[index].group for index in present}
    smallest: dict[int, int] = {}
    held = shards.held
    for index in sorted(lacking & held.keys(), key=lambda index: (held[index].numel, index)):
        if plan.specs[index].group not in keeping:
            smallest.setdefault(plan.specs[index].group, index)
    if smallest:
        try:
            tried: Collection[int] = shards.local.rehearse(smallest.values())[0]
        except Exception:  # a step on zero gradients may fail in any way
            tried = smallest.values()
        keeping |= {plan.specs[index].group for index in tried}
    missed = [index for index in sorted(lacking) if plan.specs[index].group in keeping]
    if not missed:
        return
    if len(lacking) == len(trainable):
        message = "the loaded state is empty: this resumes from zero"
    else:
        names = shorten_list(plan.specs[index].name for index in missed)
        message = (
            f"the loaded state has nothing for {len(missed)} of {len(trainable)} trainable "
            f"parameters ({names}): these resume from zero"
        )
    warnings.warn(message, UserWarning, stacklevel=5)
