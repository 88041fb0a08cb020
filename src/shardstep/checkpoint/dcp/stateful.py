"""An optimizer as `torch.distributed.checkpoint` sees it: each rank's part of one state dict.

Every rank's dict has the same keys and describes the same tensors, by name and logical shape; only
which boxes of them a rank holds differs. So what is saved names no rank, and loads at any world
size, in any layout, and into whatever else reads that format, FSDP2 and plain optimizers included.
The form is the one of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.

Note [State that is not there yet]. `torch.distributed.checkpoint` reads the keys that the loading
side lists and nothing else, so an optimizer that has no state yet has to list what it would have.
It finds out by rehearsing a step on copies. And what is saved of a parameter that never took a step
is the same keys, each with None for its value: loading that gives back a parameter without state,
and not one whose step counter says 1.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardstep.checkpoint.dcp.portable import Reading, holds, portable
from shardstep.checkpoint.dcp.stand_in import StandIn
from shardstep.checkpoint.inputs import named_params
from shardstep.comm import Comm, all_gather_json
from shardstep.comm.consensus import check_same_on_all_ranks
from shardstep.local.multi_class import extras, optimizer_name
from shardstep.params.dtensor import NO_OFFSETS, refuse_dtensors
from shardstep.params.names import strip_wrapper_prefixes
from shardstep.plan import Interval
from shardstep.state.exchange import Kept, survey
from shardstep.state.missing_state import warn_of_missing_state
from shardstep.state.named_dict import numbered
from shardstep.state.torch_dict import OURS, install
from shardstep.state.tree import Leaf, Node, decode, encode, leaves

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer


class Sharded:
    """A `ZeroRedundancyOptimizer` as a `Stateful`, to be saved and loaded as it lies.

    That module writes and reads its metadata, and whatever is not a tensor, with pickle: load only
    files that you trust, or use `shardstep.checkpoint`, which does without.

    Every rank has to save and load, as with any sharded state. What is read of a tensor goes to
    memory of its own and reaches the optimizer in `load_state_dict`, if all of it was read. Keys
    that this optimizer does not list are not read, by the nature of that module: state of a frozen
    parameter, or state that the class first makes in a later step than its first, reaches only an
    optimizer that has such state already. A list of tensors that has more entries there is refused.

    Masters of 16-bit parameters are saved beside the state: load with the same precision policy
    (`shardstep.checkpoint` and full state dicts load across policies).

    `async_save` works with its default thread; its process of its own would pickle the state and is
    refused. On torch's side, `get_optimizer_state_dict` has to give the nested form; dicts in its
    flat form go to `load_state_dict` in full.

    Args:
        optimizer: the optimizer.
        param_names: whether groups also list `param_names`. A plain optimizer that was made with
            names can load only a checkpoint that has them. Leave it out for loading: a checkpoint
            without them could not be loaded then.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> parts = {"model": model, "optim": Sharded(opt)}  # doctest: +SKIP
        >>> dcp.save(parts, checkpoint_id=folder)  # doctest: +SKIP
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer, *, param_names: bool = False) -> None:
        self._optimizer = optimizer
        self._param_names = param_names

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state. Called on every rank."""
        return self._optimizer.shards.run_state_dict_hooks(
            lambda: sharded_state(self._optimizer, self._param_names)
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was read into `state_dict()`, or any full state dict.

        Called on every rank.
        """
        if is_sharded(state_dict):
            self._optimizer.shards.run_load_hooks(state_dict, self._install)
        else:
            self._optimizer.load_state_dict(state_dict)

    def _install(self, state_dict: dict[str, Any]) -> None:
        """Give the local optimizer what was read. Called on every rank."""
        shards = self._optimizer.shards
        plan, group_rank = shards.plan, shards.comm.group_rank
        taken = read_sharded(self._optimizer, state_dict)
        shards.mark_begun(taken.present)
        held = sorted(plan.intervals(group_rank))
        install(
            shards.optim,
            held,
            taken.states,
            taken.loose,
            taken.groups,
            plan.specs,
            beside={key: value for key, value in state_dict.items() if key not in OURS},
            wide=held,  # it was read into what is here, which has the same policy
        )
        shards.set_masters(taken.masters)
        shards.rounding_step = state_dict.get("rounding_step", shards.rounding_step)
        shards.publish_options()
        warn_of_missing_state(shards.rehearse, plan, group_rank, taken.present)


class ShardedDict(dict[str, Any]):
    """What `sharded_state` returns: a dict that is known again when it comes back."""


def is_sharded(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict has this rank's part of the state only."""
    parts = (state_dict.get("state"), state_dict.get("masters"))
    return isinstance(state_dict, ShardedDict) or any(holds(part, StandIn) for part in parts)


@dataclass(frozen=True, slots=True)
class _Form:
    """What the ranks together keep of one parameter.

    Attributes:
        kept: its structure.
        started: whether it is there, or would be after a step.
        tensors: this rank's tensors of it, in order; empty if it holds nothing of the parameter.
    """

    kept: Kept
    started: bool
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Loose:
    """State that belongs to no parameter, and whether it is there or would be after a step."""

    node: Node
    started: bool


@dataclass(frozen=True, slots=True)
class _Survey:
    """What the ranks together keep, by number of the parameter or, of no parameter, by key."""

    params: dict[int, _Form]
    loose: dict[Any, _Loose]


def sharded_state(optimizer: ZeroRedundancyOptimizer, param_names: bool) -> ShardedDict:
    """This rank's part of the state, for `torch.distributed.checkpoint`.

    Called on every rank.

    Raises:
        RuntimeError: on every rank, if the state cannot be described.
        TypeError: on every rank, for DTensor parameters.
    """
    refuse_dtensors(named_params(optimizer), NO_OFFSETS)
    optimizer.shards.sync_options()
    names = _names(optimizer)
    held = optimizer.plan.intervals(optimizer.rank)
    found = _survey(optimizer)
    state: dict[str, Any] = {
        names[index]: _lay_out(form, optimizer.shards.params[index], held.get(index))
        for index, form in sorted(found.params.items())
    }
    for key, form in found.loose.items():
        if str(key) in state:
            raise RuntimeError(f"state {key!r}, of no parameter, has the name of a parameter")
        state[str(key)] = _lay_out_loose(form, f"state {key!r}, of no parameter")
    groups: list[dict[str, Any]] = []
    start = 0
    for group in optimizer.param_groups:
        stop = start + len(group["params"])
        options = {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        groups.append({**options, "params": names[start:stop]})
        if param_names:
            groups[-1]["param_names"] = names[start:stop]
        start = stop
    return ShardedDict(state=state, param_groups=groups, **_beside_state(optimizer, names))


def _beside_state(optimizer: ZeroRedundancyOptimizer, names: Sequence[str]) -> dict[str, Any]:
    """What the class keeps beside its state, masters by name, and what rounding has to know."""
    beside: dict[str, Any] = copy.deepcopy(extras(optimizer.optim))
    held = optimizer.plan.intervals(optimizer.rank)
    mine = optimizer.shards.masters()
    masters = {}
    rounds = optimizer.shards.precision.stochastic_rounding
    for index in () if rounds else sorted(optimizer.shards.widened):
        spec, dtype = optimizer.plan.specs[index], optimizer.shards.precision.step_dtype
        device = optimizer.shards.params[index].device
        what = f"the master of parameter {spec.name!r}"
        master = StandIn(what, spec.shape, dtype(spec.dtype), device, started=True)
        if index in mine:
            entire = held[index] == Interval(0, spec.numel)
            master.hold(mine[index], None if entire else (held[index], spec))
        masters[names[index]] = master
    if masters:
        beside["masters"] = masters
    if rounds:
        beside["rounding_step"] = optimizer.shards.rounding_step
    return beside


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank takes out of a sharded state dict.

    Attributes:
        states: its state by number of the parameter.
        loose: state that belongs to no parameter.
        groups: the groups of all parameters, with numbers.
        present: which parameters have state, on whichever rank.
        masters: its masters by number of the parameter.
    """

    states: dict[int, Any]
    loose: dict[Any, Any]
    groups: list[dict[str, Any]]
    present: set[int]
    masters: dict[int, torch.Tensor]


def read_sharded(optimizer: ZeroRedundancyOptimizer, state_dict: Mapping[str, Any]) -> Share:
    """This rank's share of what was read into a sharded state dict.

    Called on every rank.

    Args:
        optimizer: the optimizer whose `sharded_state` the dict is; nothing of it is changed.
        state_dict: the dict.

    Raises:
        ValueError: on every rank, if it does not fit.
    """
    refuse_dtensors(named_params(optimizer), NO_OFFSETS)
    survey = _survey(optimizer)

    def make() -> tuple[Share, list[str]]:
        names = _names(optimizer)
        held = optimizer.plan.intervals(optimizer.rank)
        read = state_dict["state"]
        groups = {"state": {}, "param_groups": state_dict["param_groups"]}
        packed = numbered(groups, optimizer.param_groups, names)["param_groups"]
        share = Share({}, {}, packed, set(), {})
        for index, form in survey.params.items():
            what = f"parameter {names[index]!r}"
            if names[index] not in read:
                raise ValueError(f"the sharded state dict has no entry for {what}")
            value = Reading(what).read(form.kept.node, read[names[index]])
            if value is not None:
                share.present.add(index)
                if index in held:
                    share.states[index] = value
        for key, loose in survey.loose.items():
            value = Reading(f"state {key!r}").read(loose.node, read.get(str(key)))
            if value is not None:
                share.loose[key] = value
        for index in sorted(optimizer.shards.masters()):
            master = state_dict.get("masters", {}).get(names[index])
            part = master.hand_over() if isinstance(master, StandIn) else None
            if part is not None:
                share.masters[index] = part
        return share, []

    return check_same_on_all_ranks(optimizer.shards.comm, "loading a sharded state dict", make)


def _names(optimizer: ZeroRedundancyOptimizer) -> list[str]:
    """What the parameters are called, whatever wrapper the model is in."""
    given = [spec.name for spec in optimizer.plan.specs]
    names = strip_wrapper_prefixes(given, ddp=not optimizer.shards.names_are_of_module)
    if len(set(names)) == len(names):
        return names
    # Two models that are trained together: only the places of their parameters tell them apart.
    return given if len(set(given)) == len(given) else [f"param {i}" for i in range(len(given))]


def _survey(optimizer: ZeroRedundancyOptimizer) -> _Survey:
    """What the ranks keep of each parameter, or would after a step. Called on every rank."""
    comm, plan, local = optimizer.shards.comm, optimizer.plan, optimizer.shards
    held = [plan.intervals(rank) for rank in range(plan.world_size)]
    states = {index: state for index, state in local.states().items() if state}
    kept, tensors = survey(comm, plan.specs, held, states)
    forms = {index: _Form(each, True, tensors.get(index, ())) for index, each in kept.items()}
    lacking = [i for i, spec in enumerate(plan.specs) if spec.trainable and i not in kept]
    expected: dict[Any, Any] = {}
    if lacking:
        rehearsed: dict[int, Any] = {}
        failure = None
        try:
            rehearsed, expected = local.rehearse(lacking)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = {rank: why for rank, why in enumerate(all_gather_json(comm, failure)) if why}
        if failures and not forms:
            rank, failure = next(iter(failures.items()))
            raise RuntimeError(
                f"rank {comm.group_rank}: this optimizer has no state yet, and which state it will "
                f"have cannot be found out: a step of {optimizer_name(optimizer.optim)} on copies "
                f"with zero gradients failed on rank {rank} ({failure}); take one step first, or "
                "load a full state dict with optimizer.load_state_dict()"
            )
        if not failures:
            kept, tensors = survey(comm, plan.specs, held, rehearsed)
            for index, each in kept.items():
                forms[index] = _Form(each, False, tensors.get(index, ()))
    return _Survey(forms, _survey_loose(comm, local.global_state(), expected))


def _survey_loose(
    comm: Comm, live: Mapping[Any, Any], expected: Mapping[Any, Any]
) -> dict[Any, _Loose]:
    """State that belongs to no parameter. Called on every rank.

    Raises:
        RuntimeError, ValueError: on every rank, if it is not the same on all: whose would be saved?
    """

    def make() -> tuple[dict[Any, _Loose], list[str]]:
        forms = {}
        lines = []
        for key, value in {**expected, **live}.items():
            node, _ = encode(value, str(key))
            if any(leaf.data is None for leaf in leaves(node)):
                raise RuntimeError(
                    f"state {key!r} belongs to no parameter and is too large to compare between "
                    "ranks; save this optimizer with consolidate_state_dict() and state_dict()"
                )
            forms[key] = _Loose(node, key in live)
            lines.append(f"state {key!r}, of no parameter: {json.dumps(node)}")
        return forms, lines

    return check_same_on_all_ranks(comm, "describing the optimizer state", make)


def _lay_out(form: _Form, param: torch.Tensor, interval: Interval | None) -> Any:
    """The state of one parameter: stand-ins, and what is small enough to be on every rank.

    Args:
        form: its form.
        param: the parameter.
        interval: which of its elements this rank holds.
    """
    kept, spec = form.kept, form.kept.spec
    number = -1

    def make(leaf: Leaf) -> torch.Tensor:
        nonlocal number
        number += 1
        device = torch.device("cpu") if leaf.on_cpu else param.device
        per_element = kept.per_element[number]
        divided = per_element and kept.shared
        if form.started and leaf.data is not None and not divided:
            return leaf.empty(device)
        what = f"state {leaf.path!r} of parameter {spec.name!r}"
        shape = spec.shape if per_element else leaf.shape
        stand_in = StandIn(what, shape, leaf.dtype, device, form.started)
        if form.tensors:
            entire = not per_element or interval == Interval(0, spec.numel)
            cut = None if entire or interval is None else (interval, spec)
            stand_in.hold(form.tensors[number], cut)
        return stand_in

    return portable(decode(kept.node, make, wrap=_taken_apart), form.started)


def _lay_out_loose(form: _Loose, what: str) -> Any:
    """State that belongs to no parameter: every rank has all of it."""

    def make(leaf: Leaf) -> torch.Tensor:
        tensor = leaf.empty(torch.device("cpu"))
        if form.started:
            return tensor
        stand_in = StandIn(what, leaf.shape, leaf.dtype, tensor.device, False)
        stand_in.hold(tensor)
        return stand_in

    return portable(decode(form.node, make, wrap=_taken_apart), form.started)


def _taken_apart(kind: str, inner: Mapping[str, Any], *described: Any) -> dict[str, Any]:
    """In place of a tensor of a subclass, what it is made of."""
    return dict(inner)
