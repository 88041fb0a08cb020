"""Matching a checkpoint with an optimizer and a model, from descriptions alone.

No tensor is read and no file opened. So a checkpoint that does not fit is refused at once, and
excessive claims cost nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardstep.checkpoint.files import require
from shardstep.checkpoint.format import SavedModel, SavedOptimizer, SavedParam, Stored, Tree
from shardstep.checkpoint.inputs import (
    EXTRA_STATE,
    names_of,
    refuse_dtensor_params,
    split_state_dict,
)
from shardstep.checkpoint.read import Checkpoint, saved_model, saved_optimizer
from shardstep.checkpoint.write import assign_owners
from shardstep.comm import Comm
from shardstep.local.multi_class import saved_name
from shardstep.params.groups import group_ranges
from shardstep.params.names import names_in, shorten_list, unwrapped, unwrapped_name
from shardstep.state.tree import STATE_NBYTES, STATE_RATIO, memory_nbytes

if TYPE_CHECKING:
    from shardstep.optimizer import ZeroRedundancyOptimizer

OTHER_MODEL = "this checkpoint is of another model"
MADE_UP = (
    "is made up by the model's state_dict(), so nothing can be written to it; load it with "
    "model.load_state_dict(checkpoint.weights(path))"
)


@dataclass(slots=True)
class Weight:
    """A tensor of the model, and the saved tensor for it, which one rank reads for all."""

    target: torch.Tensor
    stored: Stored
    owner: int
    alternatives: list[Stored]  # the saved tensors under all names of the target


@dataclass(slots=True)
class Match:
    """The parts of a checkpoint that belong to an optimizer and a model, on one rank.

    The first six fields are the arguments of `load`.
    """

    checkpoint: Checkpoint
    comm: Comm
    optimizer: ZeroRedundancyOptimizer | None
    model: torch.nn.Module | None
    strict: bool
    names: dict[str, str]
    # Names that only optimizer and model have, and that only the checkpoint has.
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    # By number of a parameter, and those of them that train and have no state.
    found: dict[int, SavedParam] = field(default_factory=dict)
    without_state: list[int] = field(default_factory=list)
    # The options of each group; None to keep the present ones.
    options: list[Tree | None] = field(default_factory=list)
    weights: dict[str, Weight] = field(default_factory=dict)
    # By saved name: the module that has this extra state, and the present value.
    extra_state: dict[str, tuple[torch.nn.Module, Any]] = field(default_factory=dict)

    def find(self) -> str:
        """Fill the fields. Return a digest of everything that is to be read."""
        refuse_dtensor_params(self.optimizer, self.model)
        if self.optimizer is not None:
            self._match_optimizer(self.optimizer, saved_optimizer(self.checkpoint))
        if self.model is not None:
            self._match_model(unwrapped(self.model), saved_model(self.checkpoint))
        self.require(
            not self.strict or not (self.missing or self.unexpected),
            f"{self.differences()}; pass names={{here: there}} for renamed parameters, or "
            "strict=False to load the rest",
        )
        self._check_memory()
        found = [(index, param.name) for index, param in self.found.items()]
        # Tensors are broadcast in memory order, so strides must agree too.
        weights = [
            (name, each.stored, each.target.dtype, each.target.stride())
            for name, each in self.weights.items()
        ]
        parts = [self.optimizer is not None, self.model is not None, self.strict]
        return hashlib.sha256(repr([parts, found, weights]).encode()).hexdigest()

    def require(self, fits: bool, problem: str) -> None:
        """Raise `CheckpointError` unless the checkpoint fits."""
        require(fits, f"{self.checkpoint.path}: {problem}")

    def differences(self) -> str:
        """Describe what was not matched."""
        parts = {
            "not found in the checkpoint": self.missing,
            "in the checkpoint but not here": self.unexpected,
        }
        return "; ".join(f"{what}: {shorten_list(names)}" for what, names in parts.items() if names)

    def weights_of(self, group_rank: int) -> dict[str, Weight]:
        """Return the tensors of the model that a rank reads."""
        return {name: each for name, each in self.weights.items() if each.owner == group_rank}

    def wider_weights(self) -> dict[int, Stored]:
        """Return the saved model tensors that are wider than their parameters, by number."""
        if self.optimizer is None or self.model is None:
            return {}
        # By the model's name: the optimizer's may lack what looks like DDP's prefix.
        names = names_in(unwrapped(self.model))
        params = self.optimizer.shards.params
        known = {i: unwrapped_name(names[id(p)]) for i, p in enumerate(params) if id(p) in names}
        found = {i: self.weights[name].stored for i, name in known.items() if name in self.weights}
        specs = self.optimizer.plan.specs
        return {i: w for i, w in found.items() if w.dtype.itemsize > specs[i].dtype.itemsize}

    def _match_optimizer(self, optimizer: ZeroRedundancyOptimizer, saved: SavedOptimizer) -> None:
        own_class = saved_name(optimizer.optim)
        self.require(
            not self.strict or saved.class_name in (None, own_class),
            f"it was saved from {saved.class_name}, but this optimizer is {own_class}; pass "
            "strict=False if their state means the same",
        )
        specs = optimizer.plan.specs
        self.found = self._match_params(optimizer, saved)
        most = STATE_NBYTES + STATE_RATIO * sum(spec.nbytes for spec in specs)
        for index, param in self.found.items():
            self.require(
                param.shape == specs[index].shape,
                f"parameter {param.name!r} has shape {param.shape} there, but "
                f"{specs[index].shape} here; {OTHER_MODEL}",
            )
            empty = all(item == ["value", None] for item in param.entries)
            if specs[index].trainable and empty:
                self.without_state.append(index)
            for leaf in param.leaves:
                self.require(
                    leaf.shape == param.shape or leaf.nbytes <= most,
                    f"state {leaf.path!r} of parameter {param.name!r} takes {leaf.nbytes:,} bytes, "
                    f"too many for a parameter of shape {param.shape}",
                )
        self.options = self._match_groups(optimizer, saved)

    def _match_params(
        self, optimizer: ZeroRedundancyOptimizer, saved: SavedOptimizer
    ) -> dict[int, SavedParam]:
        """Return the saved parameter for each parameter here, by number."""
        names, positional = names_of(optimizer, self.model)
        if positional != saved.positional:
            # One side knows numbers only. They mean the same if there are equally many.
            self.require(
                len(names) == len(saved.params),
                f"it has {len(saved.params)} parameters and this optimizer {len(names)}, and one "
                "of them knows no names; construct the optimizer from model.named_parameters(), "
                "or give model= when saving and loading",
            )
            return dict(enumerate(saved.params))
        there = {param.name: param for param in saved.params}
        wanted = {index: self.names.get(name, name) for index, name in enumerate(names)}
        found = {index: there.pop(name) for index, name in wanted.items() if name in there}
        # Only one of save and load may have seen DDP's prefix, and only on some parameters.
        short = {name.removeprefix("module."): name for name in there}
        for index in sorted(wanted.keys() - found.keys()):
            name = short.pop(wanted[index].removeprefix("module."), None)
            if name is not None:
                found[index] = there.pop(name)
            else:
                self.missing.append(f"optimizer: {names[index]}")
        self.unexpected += [f"optimizer: {name}" for name in there]
        return dict(sorted(found.items()))

    def _match_groups(
        self, optimizer: ZeroRedundancyOptimizer, saved: SavedOptimizer
    ) -> list[Tree | None]:
        """Return the saved options for each group here; None to keep the present ones."""
        group_of = {name: n for n, (names, _) in enumerate(saved.groups) for name in names}
        chosen: list[Tree | None] = []
        for number, indices in enumerate(group_ranges(optimizer.param_groups)):
            there = {group_of[self.found[index].name] for index in indices if index in self.found}
            if not there and number < len(saved.groups) and not saved.groups[number][0]:
                there = {number}
            self.require(
                len(there) <= 1 or not self.strict,
                f"the parameters of group {number} are in groups {sorted(there)} there, whose "
                "options may differ; construct the optimizer with the same groups, or pass "
                "strict=False to keep this one's options",
            )
            chosen.append(saved.groups[there.pop()][1] if len(there) == 1 else None)
        return chosen

    def _match_model(self, model: torch.nn.Module, saved: SavedModel) -> None:
        targets, aliases, extra = split_state_dict(model.state_dict())
        owners = assign_owners(targets, (), self.comm.world_size)
        own = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        optimizer = self.checkpoint.contents.optimizer
        params = () if optimizer is None else optimizer.params
        masters = {param.name: param.master for param in params}
        saved_names = saved.tensors.keys() | saved.aliases.keys()
        used: set[str] = set()
        for name, target in targets.items():
            # A tensor with several names may have been saved under any of them.
            known = [name, *(alias for alias, other in aliases.items() if other == name)]
            there = [self.names.get(each, each) for each in known]
            there = [saved.aliases.get(each, each) for each in there]
            hits = list(dict.fromkeys(each for each in there if each in saved.tensors))
            if not hits:
                self.missing.append(f"model: {name}")
                continue
            used.update(hits)
            alternatives = [saved.tensors[each] for each in hits]
            stored = alternatives[0]
            if target.dtype.itemsize > stored.dtype.itemsize:
                # The optimizer's names may lack what looks like DDP's prefix.
                short = [each.removeprefix("module.") for each in there]
                there += [each for each in short if each not in saved_names]
                found = [master for each in there if (master := masters.get(each)) is not None]
                found = [master for master in found if master.shape == stored.shape]
                stored = found[0] if found else stored
            self._check_target(name, target, stored, _storage(target) in own)
            self.weights[name] = Weight(target, stored, owners[name], alternatives)
        self.unexpected += [f"model: {name}" for name in saved.tensors if name not in used]
        self._match_extra_state(model, extra, saved)

    def _match_extra_state(
        self, model: torch.nn.Module, extra: dict[str, Any], saved: SavedModel
    ) -> None:
        there = {key for key, _ in saved.extra_state.node[1]}
        wanted = {name: self.names.get(name, name) for name in extra}
        self.missing += [f"model: {name}" for name in extra if wanted[name] not in there]
        self.unexpected += [f"model: {name}" for name in there - set(wanted.values())]
        modules = {
            unwrapped_name(f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE): module
            for name, module in model.named_modules(remove_duplicate=False)
        }
        for name in [name for name in extra if wanted[name] in there]:
            self.require(name in modules, f"model state {name!r} {MADE_UP}")
            self.extra_state[wanted[name]] = modules[name], extra[name]

    def _check_target(self, name: str, target: torch.Tensor, stored: Stored, own: bool) -> None:
        """Raise if copying a stored tensor to its target would fail or have no effect."""
        shape, tensor = tuple(target.shape), f"model tensor {name!r}"
        self.require(
            stored.shape == shape,
            f"{tensor} has shape {stored.shape} there, but {shape} here; {OTHER_MODEL}",
        )
        self.require(
            torch.can_cast(stored.dtype, target.dtype),
            f"{tensor} is {stored.dtype} there, which {target.dtype} here cannot hold; "
            f"{OTHER_MODEL}",
        )
        self.require(own or not target.numel(), f"{tensor} {MADE_UP}")
        self.require(
            all(step or size <= 1 for size, step in zip(shape, target.stride(), strict=True)),
            f"{tensor} has elements that share memory (stride {target.stride()}), and cannot be "
            "written to; clone it where the model is made",
        )

    def _check_memory(self) -> None:
        """Raise if this rank cannot hold what it would read."""
        contents = self.checkpoint.contents
        rank = self.comm.group_rank
        nbytes = sum(weight.stored.nbytes for weight in self.weights_of(rank).values())
        trees = [contents.extra]
        if self.optimizer is not None:
            plan, params = self.optimizer.plan, self.optimizer.shards.params
            held = self.optimizer.shards.held
            for index in held.keys() & self.found.keys():
                state = self.found[index].state
                if state is not None and params[index].device.type == "cpu":
                    share = held[index].numel / max(1, plan.specs[index].numel)
                    nbytes += int(share * state.nbytes)
            trees += [saved_optimizer(self.checkpoint).global_state, *self.options]
        nbytes += sum(stored.nbytes for tree in trees if tree for stored in tree.stored.values())
        self.require(
            nbytes <= memory_nbytes(),
            f"rank {rank} would have to read {nbytes:,} bytes of it, and has "
            f"memory for {memory_nbytes():,}",
        )


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
