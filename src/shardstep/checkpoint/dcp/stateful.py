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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from shardstep.checkpoint.dcp.portable import Reading, holds, portable
from shardstep.checkpoint.dcp.stand_in import StandIn
from shardstep.checkpoint.names import tensors_of
from shardstep.comm import Comm, all_gather_json
from shardstep.comm.consensus import check_same_on_all_ranks
from shardstep.local.multi_class import extras
from shardstep.params.dtensor import NO_OFFSETS, refuse_dtensors
from shardstep.params.names import strip_wrapper_prefixes
from shardstep.plan import Interval
from shardstep.state.exchange import Kept, survey
from shardstep.state.named_dict import numbered
from shardstep.state.tree import Leaf, Node, decode, encode, leaves

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer

_DCP = "torch.distributed.checkpoint"


class Sharded:
    """A `ZeroRedundancyOptimizer` as a `Stateful`, to be saved and loaded as it lies.

    `torch.distributed.checkpoint.save({"optim": optimizer}, ...)` does the same: the optimizer
    notices who asks for its state dict. Wrap it where something else asks, such as a `Stateful` of
    your own that calls `state_dict()` of its parts.

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

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> parts = {"model": model, "optim": Sharded(opt)}  # doctest: +SKIP
        >>> dcp.save(parts, checkpoint_id=folder)  # doctest: +SKIP
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state. Called on every rank."""
        return self._optimizer._state_dict(sharded=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was read into `state_dict()`, or any full state dict.

        Called on every rank.
        """
        self._optimizer.load_state_dict(state_dict)


def asked_by_dcp() -> bool:
    """Whether the method that calls this was itself called by `torch.distributed.checkpoint`.

    A user who calls `state_dict()` on a rank without the consolidated state is to be told to
    consolidate; the checkpoint module, which calls the same method on every rank, can use each
    rank's part. It has no other way to say so.
    """
    return _module_of(sys._getframe(2)).startswith(_DCP)


def _loading() -> bool:
    """Whether this is called, directly or not, by `torch.distributed.checkpoint.load`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _module_of(frame) == f"{_DCP}.state_dict_loader":
            return True
        frame = frame.f_back
    return False


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def refuse_initialisation() -> None:
    """Raise if the property that calls this is read to see whether a step has to be taken.

    `get_optimizer_state_dict` and its like take a step with zero gradients wherever they find no
    state: with a divided optimizer that may be on some ranks only, which would wait forever.
    """
    if _module_of(sys._getframe(2)) == f"{_DCP}.state_dict":
        raise RuntimeError(
            "torch.distributed.checkpoint.state_dict cannot read or set the state of a "
            "ZeroRedundancyOptimizer: give the optimizer itself to torch.distributed.checkpoint."
            "save and load, as in dcp.save({'model': model, 'optim': optimizer}, ...); a full dict "
            "that get_optimizer_state_dict made elsewhere goes to optimizer.load_state_dict()"
        )


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


def sharded_state(optimizer: ZeroRedundancyOptimizer) -> ShardedDict:
    """This rank's part of the state, for `torch.distributed.checkpoint`.

    Called on every rank.

    Raises:
        RuntimeError: on every rank, if the state cannot be described.
        TypeError: on every rank, for DTensor parameters.
    """
    refuse_dtensors(tensors_of(optimizer), NO_OFFSETS)
    optimizer._local.push_options()
    optimizer._local.publish_options()
    names = _names(optimizer)
    held = optimizer.plan.intervals(optimizer.rank)
    found = _survey(optimizer)
    state: dict[str, Any] = {
        names[index]: _lay_out(form, optimizer._params[index], held.get(index))
        for index, form in sorted(found.params.items())
    }
    for key, form in found.loose.items():
        if str(key) in state:
            raise RuntimeError(f"state {key!r}, of no parameter, has the name of a parameter")
        state[str(key)] = _lay_out_loose(form, f"state {key!r}, of no parameter")
    groups: list[dict[str, Any]] = []
    have_names = any(name != f"param {index}" for index, name in enumerate(names))
    start = 0
    for group in optimizer.param_groups:
        stop = start + len(group["params"])
        options = {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        groups.append({**options, "params": names[start:stop]})
        if have_names and not _loading():
            # Wanted by an optimizer on torch's side that has them, and not there to be read if the
            # one that saved had none.
            groups[-1]["param_names"] = names[start:stop]
        start = stop
    return ShardedDict(state=state, param_groups=groups, **_beside_state(optimizer, names))


def _beside_state(optimizer: ZeroRedundancyOptimizer, names: Sequence[str]) -> dict[str, Any]:
    """What the class keeps beside its state, masters by name, and what rounding has to know."""
    beside: dict[str, Any] = copy.deepcopy(extras(optimizer.optim))
    held = optimizer.plan.intervals(optimizer.rank)
    mine = optimizer._masters()
    masters = {}
    for index in sorted(optimizer._widened) if not optimizer._precision.stochastic_rounding else ():
        spec, dtype = optimizer.plan.specs[index], optimizer._precision.step_dtype
        device = optimizer._params[index].device
        what = f"the master of parameter {spec.name!r}"
        master = StandIn(what, spec.shape, dtype(spec.dtype), device, started=True)
        if index in mine:
            entire = held[index] == Interval(0, spec.numel)
            master.hold(mine[index], None if entire else (held[index], spec))
        masters[names[index]] = master
    if masters:
        beside["masters"] = masters
    if optimizer._precision.stochastic_rounding:
        beside["rounding_step"] = optimizer._rounding.step
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
    refuse_dtensors(tensors_of(optimizer), NO_OFFSETS)
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
        for index in sorted(optimizer._masters()):
            master = state_dict.get("masters", {}).get(names[index])
            part = master.hand_over() if isinstance(master, StandIn) else None
            if part is not None:
                share.masters[index] = part
        return share, []

    return check_same_on_all_ranks(optimizer._comm, "loading a sharded state dict", make)


def _names(optimizer: ZeroRedundancyOptimizer) -> list[str]:
    """What the parameters are called, whatever wrapper the model is in."""
    given = [spec.name for spec in optimizer.plan.specs]
    names = strip_wrapper_prefixes(given, ddp=optimizer._module is None)
    if len(set(names)) == len(names):
        return names
    # Two models that are trained together: only the places of their parameters tell them apart.
    return given if len(set(given)) == len(given) else [f"param {i}" for i in range(len(given))]


def _survey(optimizer: ZeroRedundancyOptimizer) -> _Survey:
    """What the ranks keep of each parameter, or would after a step. Called on every rank."""
    comm, plan, local = optimizer._comm, optimizer.plan, optimizer._local
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
                f"have cannot be found out: a step of {type(optimizer.optim).__name__} on copies "
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
