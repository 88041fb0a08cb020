"""What of a checkpoint belongs where, found out from descriptions alone.

No tensor is read for it and no file opened: what cannot be loaded is refused at once, and what
claims too much costs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardstep.checkpoint.errors import CheckpointError
from shardstep.checkpoint.file_layout import deal
from shardstep.checkpoint.format import SavedModel, SavedOptimizer, SavedParam, Stored, Tree
from shardstep.checkpoint.mastered import MASTER, master_of, own_entries
from shardstep.checkpoint.names import names_of, tensors_of
from shardstep.checkpoint.read import Checkpoint
from shardstep.checkpoint.write import EXTRA_STATE, kind_of, model_tensors
from shardstep.comm import Comm
from shardstep.params.dtensor import NO_OFFSETS, refuse_dtensors
from shardstep.params.names import names_in, shorten_list, unwrapped, unwrapped_name
from shardstep.state.limits import STATE_NBYTES, STATE_RATIO, memory_nbytes
from shardstep.state.tree import Node, leaves

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer


@dataclass(slots=True)
class Match:
    """What is here, and what of a checkpoint is for it; on one rank.

    Attributes:
        checkpoint, comm, optimizer, model, strict, names: as they are given to `load`.
        missing: what is here and not in the checkpoint.
        unexpected: what is in the checkpoint and not here.
        found: the parameters of the optimizer that are in the checkpoint, by number.
        empty: those of them that train and have no state there, by name.
        options: for each group of the optimizer, the options it had; None to keep its own.
        stepped: whether the optimizer had taken a step when it was saved.
        targets: the tensors of the model.
        weights: what is stored of those that are in the checkpoint.
        twins: for one that has several names here, what else the checkpoint has under these.
        owners: which rank reads which of them.
        modules: the modules that may have state beyond tensors, by its name.
        rest: for such state in the checkpoint, its name here and what it is now.
        reads_masters: whether masters are read for a model that can hold them.
    """

    checkpoint: Checkpoint
    comm: Comm
    optimizer: ZeroRedundancyOptimizer | None
    model: torch.nn.Module | None
    strict: bool
    names: dict[str, str]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    found: dict[int, SavedParam] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    options: list[Tree | None] = field(default_factory=list)
    stepped: bool = False
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, Stored] = field(default_factory=dict)
    twins: dict[str, list[Stored]] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    rest: dict[str, tuple[str, Any]] = field(default_factory=dict)
    reads_masters: bool = False

    def find(self) -> str:
        """Find out, and change nothing.

        Returns:
            A digest of what is going to be read and sent between ranks, for them to compare.

        Raises:
            CheckpointError: if something does not fit.
            TypeError: for DTensors.
        """
        contents = self.checkpoint.contents
        refuse_dtensors(tensors_of(self.optimizer, self.model), NO_OFFSETS)
        if self.optimizer is not None:
            if contents.optimizer is None:
                raise self._unfit("there is no optimizer in it")
            self._match_optimizer(self.optimizer, contents.optimizer)
        if self.model is not None:
            if contents.model is None:
                raise self._unfit("there is no model in it")
            self._match_model(unwrapped(self.model), contents.model)
        if self.strict and (self.missing or self.unexpected):
            raise CheckpointError(
                f"{self.checkpoint.path} does not fit: {summary(self.missing, self.unexpected)}; "
                "give names={here: there} for what is called otherwise, or strict=False to load "
                "what fits"
            )
        self._check_memory()
        found = [(index, param.name) for index, param in self.found.items()]
        # A tensor that fills its memory is sent as it lies there.
        forms = [(self.targets[name].dtype, self.targets[name].stride()) for name in self.weights]
        parts = [self.optimizer is not None, self.model is not None, self.strict]
        return hashlib.sha256(repr([parts, found, self.weights, forms]).encode()).hexdigest()

    def look_again(self) -> None:
        """Find the model's tensors where they are now: the optimizer may have moved parameters."""
        if self.model is not None:
            self.targets, _, _ = model_tensors(unwrapped(self.model))

    def _match_optimizer(self, optimizer: ZeroRedundancyOptimizer, saved: SavedOptimizer) -> None:
        if self.strict and saved.kind not in (None, kind_of(optimizer)):
            raise CheckpointError(
                f"{self.checkpoint.path} was saved from {saved.kind}, but this optimizer is "
                f"{kind_of(optimizer)}; pass strict=False if their state means the same"
            )
        specs = optimizer.plan.specs
        self.found = self._match_params(optimizer, saved)
        most = STATE_NBYTES + STATE_RATIO * sum(spec.nbytes for spec in specs)
        for index, param in self.found.items():
            if param.shape != specs[index].shape:
                raise self._unfit(
                    f"parameter {param.name!r} has shape {param.shape} there, but "
                    f"{specs[index].shape} here; this checkpoint is of another model"
                )
            if specs[index].trainable and (param.state is None or _is_empty(param.state.node)):
                self.empty.append(specs[index].name)
            self._check_master(param)
            for leaf in [] if param.state is None else leaves(param.state.node):
                if leaf.shape != param.shape and leaf.nbytes > most:
                    raise self._unfit(
                        f"state {leaf.path!r} of parameter {param.name!r} takes {leaf.nbytes:,} "
                        f"bytes, which is not believed of a parameter of shape {param.shape}"
                    )
        self.options = self._match_groups(optimizer, saved)
        self.stepped = saved.stepped

    def _check_master(self, param: SavedParam) -> None:
        """Make sure that what is called a master can be one."""
        keys = [] if param.state is None else [key for key, _ in param.state.node[1]]
        if param.state is None or MASTER not in keys:
            return
        item = param.state.node[1][0][1]
        found = leaves(item) if keys[0] == MASTER and item[0] == "tensor" else []
        if not found or found[0].shape != param.shape or not found[0].dtype.is_floating_point:
            raise self._unfit(
                f"the master of parameter {param.name!r} is not a tensor of floating-point numbers "
                f"of shape {param.shape}"
            )

    def _match_params(
        self, optimizer: ZeroRedundancyOptimizer, saved: SavedOptimizer
    ) -> dict[int, SavedParam]:
        """For each parameter here, by its number, the one it is in the checkpoint."""
        names, positional = names_of(optimizer, self.model)
        if positional != saved.positional:
            # One side knows only places. They mean the same if there are equally many.
            if len(names) != len(saved.params):
                raise self._unfit(
                    f"it has {len(saved.params)} parameters and this optimizer {len(names)}, and "
                    "one of them knows no names; construct the optimizer from "
                    "model.named_parameters(), or give model= when saving and loading"
                )
            return dict(enumerate(saved.params))
        there = {param.name: param for param in saved.params}
        told = {index: self.names.get(name, name) for index, name in enumerate(names)}
        found = {index: there.pop(name) for index, name in told.items() if name in there}
        # DDP's prefix may have been told to a save and not to a load, and the other way round; and
        # not all parameters need be of one model.
        short = {name.removeprefix("module."): name for name in there}
        for index in sorted(told.keys() - found.keys()):
            name = short.pop(told[index].removeprefix("module."), None)
            if name is not None:
                found[index] = there.pop(name)
            else:
                self.missing.append(f"optimizer: {names[index]}")
        self.unexpected += [f"optimizer: {name}" for name in there]
        return dict(sorted(found.items()))

    def _match_groups(
        self, optimizer: ZeroRedundancyOptimizer, saved: SavedOptimizer
    ) -> list[Tree | None]:
        """For each group here, the options that its parameters had; None to keep its own."""
        group_of = {name: n for n, (names, _) in enumerate(saved.groups) for name in names}
        chosen: list[Tree | None] = []
        start = 0
        for number, group in enumerate(optimizer.param_groups):
            indices = range(start, start + len(group["params"]))
            there = {group_of[self.found[index].name] for index in indices if index in self.found}
            if not there and number < len(saved.groups) and not saved.groups[number][0]:
                there = {number}
            if len(there) > 1 and self.strict:
                raise self._unfit(
                    f"the parameters of group {number} are in groups {sorted(there)} there, whose "
                    "options may differ; construct the optimizer with the same groups, or pass "
                    "strict=False to keep this one's options"
                )
            chosen.append(saved.groups[there.pop()][1] if len(there) == 1 else None)
            start = indices.stop
        return chosen

    def _match_model(self, model: torch.nn.Module, saved: SavedModel) -> None:
        self.targets, aliases, rest = model_tensors(model)
        self.owners = deal(self.targets, set(), self.comm.world_size)
        further: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            further.setdefault(name, []).append(alias)
        own = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        used: set[str] = set()
        for name, target in self.targets.items():
            # A tensor with several names may have been saved under any of them.
            known = [self.names.get(each, each) for each in (name, *further.get(name, ()))]
            there = [saved.aliases.get(each, each) for each in known]
            hit = next((each for each in there if each in saved.tensors), None)
            if hit is None:
                self.missing.append(f"model: {name}")
                continue
            hits = dict.fromkeys(each for each in there if each in saved.tensors)
            used.update(hits)
            if len(hits) > 1:
                self.twins[name] = [saved.tensors[each] for each in hits]
            stored = self._finest(there, target.dtype, saved.tensors[hit])
            self._check_target(name, target, stored, _storage(target) in own)
            self.weights[name] = stored
        self.unexpected += [f"model: {name}" for name in saved.tensors if name not in used]
        told = {key for key, _ in saved.rest.node[1]}
        there_is = {name: self.names.get(name, name) for name in rest}
        self.missing += [f"model: {name}" for name in rest if there_is[name] not in told]
        self.unexpected += [f"model: {name}" for name in told - set(there_is.values())]
        self.rest = {
            there_is[name]: (name, old) for name, old in rest.items() if there_is[name] in told
        }
        self.modules = {
            unwrapped_name(f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE): module
            for name, module in model.named_modules(remove_duplicate=False)
        }
        for name, _ in self.rest.values():
            if name not in self.modules:
                raise self._unfit(
                    f"model state {name!r} is made up by the model's state_dict(), so nothing can "
                    "be given it; load it with model.load_state_dict(checkpoint.weights(path))"
                )

    def _finest(self, names: Sequence[str], wanted: torch.dtype, stored: Stored) -> Stored:
        """What to read for a tensor of the model: its master, if the model here can hold more."""
        contents = self.checkpoint.contents
        if wanted.itemsize <= stored.dtype.itemsize or contents.optimizer is None:
            return stored
        assert contents.model is not None
        known = contents.model.tensors.keys() | contents.model.aliases.keys()
        # What the optimizer calls them: it leaves out what may be DDP's prefix.
        short = [name.removeprefix("module.") for name in names]
        names = [*names, *(name for name in short if name not in known)]
        for param in contents.optimizer.params:
            master = master_of(param.state)
            if master is not None and param.name in names and master.shape == stored.shape:
                self.reads_masters = True
                return master
        return stored

    def wide(self, index: int) -> Stored | None:
        """The tensor of the model that a parameter is, if it is wider there than the parameter."""
        if self.optimizer is None or self.model is None:
            return None
        # The model's own name for it: the optimizer leaves out what may be DDP's prefix.
        name = names_in(unwrapped(self.model)).get(id(self.optimizer.shards.params[index]))
        stored = self.weights.get(unwrapped_name(name)) if name is not None else None
        dtype = self.optimizer.plan.specs[index].dtype
        return stored if stored is not None and stored.dtype.itemsize > dtype.itemsize else None

    def _check_target(self, name: str, target: torch.Tensor, stored: Stored, own: bool) -> None:
        """Make sure that copying a stored tensor to its target will not fail, nor be in vain."""
        if stored.shape != tuple(target.shape):
            raise self._unfit(
                f"model tensor {name!r} has shape {stored.shape} there, but {tuple(target.shape)} "
                "here; this checkpoint is of another model"
            )
        if not torch.can_cast(stored.dtype, target.dtype):
            raise self._unfit(
                f"model tensor {name!r} is {stored.dtype} there, which {target.dtype} here cannot "
                "hold; this checkpoint is of another model"
            )
        if target.numel() and not own:
            raise self._unfit(
                f"model tensor {name!r} is made up by the model's state_dict(), so nothing can "
                "be written to it; load it with model.load_state_dict(checkpoint.weights(path))"
            )
        if any(
            not step and size > 1 for size, step in zip(target.shape, target.stride(), strict=True)
        ):
            raise self._unfit(
                f"model tensor {name!r} has elements that share memory (stride {target.stride()}), "
                "and cannot be written to; clone it where the model is made"
            )

    def _check_memory(self) -> None:
        """Make sure that what this rank is to read can be held, before room is made for it."""
        contents = self.checkpoint.contents
        nbytes = sum(stored.nbytes for n, stored in self.weights.items() if self.mine(n))
        if self.optimizer is not None and contents.optimizer is not None:
            held = self.optimizer.plan.intervals(self.optimizer.rank)
            for index in held.keys() & self.found.keys():
                state = self.found[index].state
                if state is not None and self.optimizer.shards.params[index].device.type == "cpu":
                    share = held[index].numel / max(1, self.optimizer.plan.specs[index].numel)
                    nbytes += int(share * sum(leaf.nbytes for leaf in leaves(state.node)))
            trees = [contents.optimizer.loose, *filter(None, self.options)]
            nbytes += sum(stored.nbytes for tree in trees for stored in tree.stored.values())
        if contents.extra is not None:
            nbytes += sum(stored.nbytes for stored in contents.extra.stored.values())
        if nbytes > memory_nbytes():
            raise self._unfit(
                f"rank {self.comm.group_rank} would have to read {nbytes:,} bytes of it, and has "
                f"memory for {memory_nbytes():,}"
            )

    @property
    def given(self) -> list[int]:
        """The numbers of the parameters that the checkpoint has a state or a master for."""
        found = self.found.items()
        return [index for index, param in found if param.state and param.state.node[1]]

    def mine(self, name: str) -> bool:
        """Whether this rank reads the tensor of the model for all."""
        return self.owners[name] == self.comm.group_rank

    def _unfit(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.checkpoint.path}: {what}")


def _is_empty(node: Node) -> bool:
    """Whether a parameter's state has nothing in it, under whatever names."""
    return all(item[0] == "value" and item[1] is None for item in own_entries(node))


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """The memory that a tensor is a view of."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def summary(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What was not found, in words."""
    parts = []
    if missing:
        parts.append(f"not found in the checkpoint: {shorten_list(missing)}")
    if unexpected:
        parts.append(f"in the checkpoint but not here: {shorten_list(unexpected)}")
    return "; ".join(parts)
