"""`Sharded`: an optimizer as a `Stateful` of `torch.distributed.checkpoint` (DCP).

The state dict of every rank has the same keys and describes the same tensors by name and logical
shape. Ranks differ only in the boxes that they hold. So a checkpoint loads at any world size, in
any layout, and into other readers of the format, such as FSDP2 and plain optimizers. The format is
that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.

Note [State before the first step]. DCP reads only the keys that the loading side lists. So an
optimizer without state lists the keys of its future state. A step on copies finds them. A
parameter without state is saved as the same keys with None for values. Loading that gives a
parameter without state, not one whose step counter says 1.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardstep.checkpoint.dcp.placeholder import Cut, Placeholder
from shardstep.checkpoint.dcp.portable import from_portable, to_portable
from shardstep.checkpoint.inputs import refuse_dtensor_params, unwrapped_optimizer
from shardstep.comm import all_gather_json
from shardstep.comm.consensus import check_same_on_all_ranks
from shardstep.local.multi_class import extras, optimizer_name
from shardstep.params.groups import rename_params
from shardstep.params.names import strip_wrapper_prefixes
from shardstep.state.exchange import survey
from shardstep.state.named_dict import numbered
from shardstep.state.state_dict import run_load_hooks, run_state_dict_hooks
from shardstep.state.torch_dict import KNOWN_KEYS, Share, pack_groups, warn_of_missing_state
from shardstep.state.tree import Leaf, Node, decode, encode, leaves, unwrap
from shardstep.state.view import ShardView

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer


class Sharded:
    """A `ZeroRedundancyOptimizer` as a `Stateful`, saved and loaded in shards.

    Every rank has to save and load. Reads go to separate memory, and reach the optimizer in
    `load_state_dict` if all of them succeeded.

    Limits, most of them DCP's:

    - It pickles its metadata and all values but tensors. Load only files that you trust, or use
      `shardstep.checkpoint`, which does not pickle.
    - It reads only keys that this optimizer lists. State of a frozen parameter, or state that the
      class makes after its first step, loads only into an optimizer that has such state already. A
      list of tensors that is longer in the checkpoint is refused.
    - Masters of 16-bit parameters load with the same precision policy only. `shardstep.checkpoint`
      and full state dicts load across policies.
    - `async_save` works with its default thread. Its separate process would pickle the state and is
      refused.
    - A dict of `get_optimizer_state_dict` must be nested. Load flat ones in full with the
      optimizer's `load_state_dict`.
    - For `get_state_dict` and `set_state_dict`, pass `Sharded(optimizer).as_optimizer()`. They
      would drop masters of 16-bit parameters, so those are refused there.

    Args:
        optimizer: the optimizer.
        param_names: whether groups list `param_names`. Set it to save for a plain optimizer that
            was constructed with names, since DCP makes those a required key. Leave it out to load,
            since a checkpoint without names could not be loaded.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> parts = {"model": model, "optim": Sharded(opt)}  # doctest: +SKIP
        >>> dcp.save(parts, checkpoint_id=folder)  # doctest: +SKIP
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer, *, param_names: bool = False) -> None:
        self._optimizer: ZeroRedundancyOptimizer = unwrapped_optimizer(optimizer)
        self._param_names = param_names

    def as_optimizer(self) -> Optimizer:
        """Return this as an optimizer for torch's `get_state_dict` and `set_state_dict`.

        Example:
            >>> parts = get_state_dict(model, Sharded(opt).as_optimizer())  # doctest: +SKIP
        """
        return _OptimizerView(self, self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state. Called on every rank."""
        return run_state_dict_hooks(
            self._optimizer, lambda: _make_sharded_dict(self._optimizer, self._param_names)
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the dict of `state_dict()` after a read, or a full one. Called on every rank."""
        found = tree_leaves((state_dict.get("state"), state_dict.get("masters")))
        sharded = any(isinstance(leaf, Placeholder) for leaf in found)
        if sharded or isinstance(state_dict, _ShardedDict):
            run_load_hooks(self._optimizer, state_dict, self._load_sharded)
        else:
            self._optimizer.load_state_dict(state_dict)

    def _load_sharded(self, state_dict: dict[str, Any]) -> None:
        refuse_dtensor_params(self._optimizer)
        shards, names = self._optimizer.shards, _names(self._optimizer)
        params, described = _survey_state(shards, names)

        def read() -> tuple[Any, list[str]]:
            saved = state_dict["state"]
            named = {"state": {}, "param_groups": state_dict["param_groups"]}
            groups = numbered(named, self._optimizer.param_groups, names)["param_groups"]
            for index, param in params.items():
                if names[index] not in saved:
                    raise ValueError(
                        f"the sharded state dict has no entry for {param.owner}; load it into the "
                        "model that it was saved from"
                    )
            states = {index: each.read(saved[names[index]]) for index, each in params.items()}
            global_state = {key: each.read(saved.get(str(key))) for key, each in described.items()}
            masters = {}
            for index in sorted(shards.masters()):
                master = state_dict.get("masters", {}).get(names[index])
                if isinstance(master, Placeholder) and (part := master.take_part()) is not None:
                    masters[index] = part
            return (groups, states, global_state, masters), []

        # Nothing changes before all ranks have read their share.
        groups, states, global_state, masters = check_same_on_all_ranks(
            shards.comm, "loading a sharded state dict", read
        )
        with_state = {index for index, state in states.items() if state is not None}
        shards.begun.update(with_state)
        share = Share(
            groups,
            {index: states[index] for index in sorted(with_state & shards.held.keys())},
            masters,
            {key: value for key, value in global_state.items() if value is not None},
            {key: value for key, value in state_dict.items() if key not in KNOWN_KEYS},
            wide=shards.held,  # it was read into state of the same precision policy
            stepped=bool(with_state),
            has_masters=bool(state_dict.get("masters")),
            rounding_step=state_dict.get("rounding_step", shards.rounding_step),
        )
        share.install(shards)
        share.finish(shards)
        warn_of_missing_state(shards, with_state)


class _OptimizerView(Optimizer):
    """An optimizer that gives its state to torch's state dict functions in shards.

    Those take a step of an optimizer without state, to create it. This one says that it has some,
    and lists its future state: see Note [State before the first step].
    """

    def __init__(self, sharded: Sharded, optimizer: ZeroRedundancyOptimizer) -> None:
        self._sharded = sharded
        self.param_groups = optimizer.param_groups
        self.state = {"sharded": True}  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, by number. Called on every rank."""
        made = self._sharded.state_dict()
        names = [name for group in made["param_groups"] for name in group["params"]]
        other = {*made, *made["state"]} - {"state", "param_groups", *names}
        if other:
            raise ValueError(
                f"get_state_dict would drop {sorted(other)} of this optimizer; pass "
                "Sharded(optimizer) to torch.distributed.checkpoint itself"
            )
        return rename_params(made, {name: number for number, name in enumerate(names)})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the dict of `state_dict()` after a read. Called on every rank."""
        self._sharded.load_state_dict(state_dict)


class _ShardedDict(dict[str, Any]):
    """A state dict of `Sharded`, recognised by its class even if it has no tensors."""


def _make_sharded_dict(optimizer: ZeroRedundancyOptimizer, param_names: bool) -> _ShardedDict:
    """Return this rank's part of the state. Called on every rank."""
    refuse_dtensor_params(optimizer)
    shards = optimizer.shards
    shards.check_in_step()
    shards.sync_options()
    names = _names(optimizer)
    params, global_state = _survey_state(shards, names)
    state = {names[index]: each.make() for index, each in sorted(params.items())}
    for key, each in global_state.items():
        if str(key) in state:
            raise RuntimeError(f"state {key!r}, of no parameter, has the name of a parameter")
        state[str(key)] = each.make()
    groups = pack_groups(optimizer.param_groups)
    for group in groups:
        group.pop("param_names", None)
        group["params"] = [names[index] for index in group["params"]]
        if param_names:
            group["param_names"] = group["params"]
    made = _ShardedDict(state=state, param_groups=groups, **copy.deepcopy(extras(shards.optim)))
    if shards.precision.stochastic_rounding:
        made["rounding_step"] = shards.rounding_step
    elif shards.widened:
        made["masters"] = _make_masters(shards, names)
    return made


def _make_masters(shards: ShardView, names: list[str]) -> dict[str, Placeholder]:
    own, held = shards.masters(), shards.held
    masters = {}
    for index in sorted(shards.widened):
        spec, device = shards.plan.specs[index], shards.params[index].device
        dtype = shards.precision.step_dtype(spec.dtype)
        label = f"the master of parameter {spec.name!r}"
        cut = (held[index], spec) if index in own else None
        masters[names[index]] = Placeholder(
            label, spec.shape, dtype, device, True, own.get(index), cut
        )
    return masters


def _names(optimizer: ZeroRedundancyOptimizer) -> list[str]:
    """Return the parameters' names without prefixes of wrappers."""
    given = [spec.name for spec in optimizer.plan.specs]
    names = strip_wrapper_prefixes(given, ddp=not optimizer.shards.names_are_of_module)
    if len(set(names)) == len(names):
        return names
    # Two models that are trained together: only positions tell their parameters apart.
    return given if len(set(given)) == len(given) else [f"param {i}" for i in range(len(given))]


@dataclass(frozen=True, slots=True)
class _State:
    """The structure of a parameter's state, or of other state, and this rank's tensors of it."""

    owner: str
    node: Node
    started: bool  # or it would exist after a step
    device: torch.device
    parts: Sequence[tuple[torch.Tensor, Cut | None]]  # this rank's tensors, in order; or none

    def make(self) -> Any:
        """Return it for DCP: placeholders, and values that are small enough for all ranks."""
        parts = iter(self.parts)

        def make(leaf: Leaf) -> torch.Tensor:
            home = torch.device("cpu") if leaf.on_cpu else self.device
            part, cut = next(parts, (None, None))
            if self.started and leaf.data is not None:
                return leaf.empty(home)
            label = f"state {leaf.path!r} of {self.owner}"
            return Placeholder(label, leaf.shape, leaf.dtype, home, self.started, part, cut)

        return to_portable(decode(self.node, make, wrap=unwrap), self.started)

    def read(self, saved: Any) -> Any:
        """Return the state that DCP has read; None if it was saved as absent."""
        return from_portable(self.node, saved, self.owner)


def _survey_state(
    shards: ShardView, names: Sequence[str]
) -> tuple[dict[int, _State], dict[Any, _State]]:
    """Return the structure of all state, by parameter number and by key. Called on every rank."""
    comm, plan, held = shards.comm, shards.plan, shards.held
    found: dict[int, _State] = {}

    def add(states: Mapping[int, Any], started: bool) -> None:
        for index, each in survey(comm, plan, states).items():
            own = zip(each.tensors, each.per_element, strict=False)
            parts = [(part, (held[index], each.spec) if cut else None) for part, cut in own]
            owner, device = f"parameter {names[index]!r}", shards.params[index].device
            found[index] = _State(owner, each.node, started, device, parts)

    add({index: state for index, state in shards.local.states().items() if state}, started=True)
    lacking = [i for i, spec in enumerate(plan.specs) if spec.trainable and i not in found]
    expected: dict[Any, Any] = {}
    if lacking:
        rehearsed: dict[int, Any] = {}
        failure = None
        try:
            rehearsed, expected = shards.local.rehearse(lacking)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = {rank: why for rank, why in enumerate(all_gather_json(comm, failure)) if why}
        if failures and not found:
            rank, failure = next(iter(failures.items()))
            raise RuntimeError(
                f"rank {comm.group_rank}: this optimizer has no state yet, and its structure is "
                f"unknown: a step of {optimizer_name(shards.optim)} on copies with zero gradients "
                f"failed on rank {rank} ({failure}); take one step first, or load a full "
                "state dict with optimizer.load_state_dict()"
            )
        if not failures:
            add(rehearsed, started=False)
    existing = shards.local.global_state()

    def describe() -> tuple[dict[Any, _State], list[str]]:
        described, cpu = {}, torch.device("cpu")
        for key, value in {**expected, **existing}.items():
            node, _ = encode(value, str(key))
            found = leaves(node)
            if any(leaf.data is None for leaf in found):
                raise RuntimeError(
                    f"state {key!r} belongs to no parameter and is too large to compare between "
                    "ranks; save this optimizer with consolidate_state_dict() and state_dict()"
                )
            parts = [(leaf.empty(cpu), None) for leaf in found]
            described[key] = _State("the optimizer", node, key in existing, cpu, parts)
        lines = [f"state {key!r}: {json.dumps(each.node)}" for key, each in described.items()]
        return described, lines

    return found, check_same_on_all_ranks(comm, "describing the optimizer state", describe)
